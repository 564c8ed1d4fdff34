"""Colours of all pictures: those of Okabe and Ito (2008), which people of every colour vision tell apart.

Each has a middle brightness or its own letter, so that it stands out on a white page and on a black one.
"""

from __future__ import annotations

from typing import Final

from planner.plan.actions import ActionKind

ACTION_COLOURS: Final = {
    ActionKind.F: "#0072b2",
    ActionKind.R: "#cc79a7",
    ActionKind.B: "#e69f00",
    ActionKind.I: "#e69f00",
    ActionKind.W: "#009e73",
    ActionKind.SEND_F: "#56b4e9",
    ActionKind.SEND_B: "#d55e00",
}
ACTION_NAMES: Final = {
    ActionKind.F: "forward",
    ActionKind.R: "recompute",
    ActionKind.B: "backward",
    ActionKind.I: "backward, of inputs",
    ActionKind.W: "backward, of parameters",
    ActionKind.SEND_F: "send outputs",
    ActionKind.SEND_B: "send gradients",
}
MEMORY_COLOURS: Final = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "deferred": "#f0e442",
    "transient": "#cc79a7",
    "receive_buffers": "#d55e00",
    "reserve": "#999999",
}
"""By class of `planner.plan.stage.StageMemory`."""
_DARK: Final = 0.45
"""Brightness below which white letters are read best [chosen]."""


def letters_on(colour: str) -> str:
    """White or black, whichever is read better on a colour.

    >>> letters_on("#0072b2"), letters_on("#f0e442")
    ('white', 'black')
    """
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < _DARK else "black"
