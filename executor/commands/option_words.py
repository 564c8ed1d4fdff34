"""Errors speak of Python's keywords; whoever typed a command knows its options."""

from __future__ import annotations

import re

import click

from executor.commands.settings import MEASURING, planning, with_options

_QUOTED = re.compile(r'((?<!=)"[^"]*")')  # a line of the user's source, which stays as it is
_VALUE = r"""=(?:\['([^']*)'\]|'([^']*)'|"([^"]*)"|(?=[\w-]))"""


def in_options(text: str, command: click.Command) -> str:
    """The text with the command's options where it names their keywords.

    A keyword of one word, such as stages, is also an English word: it is an option only where a value is set, or where
    the text begins with it.

    >>> plan = click.Command("plan", params=[click.Option(["--max-stages"]), click.Option(["--stages"])])
    >>> in_options("stages is 3 and max_stages is 2; set stages=1, or stages stay idle", plan)
    '--stages is 3 and --max-stages is 2; set --stages 1, or stages stay idle'
    >>> in_options('set stages="auto"', plan)
    'set --stages auto'
    >>> in_options("pass stages=, a number", plan)
    'pass --stages, a number'
    """
    parts = _QUOTED.split(text)
    for parameter in command.params:
        long = next((name for name in parameter.opts if name.startswith("--")), None)
        if long is None or parameter.name is None:
            continue
        named = r"\b(?<![-.'/])" + re.escape(parameter.name)
        with_value, without = re.compile(named + _VALUE), re.compile(named + r"=(?=[,;])")
        alone = re.compile(named + r"\b(?![.'/])" if "_" in parameter.name else rf"\A{named}(?= is )")
        for place in range(0, len(parts), 2):
            changed = with_value.sub(
                lambda found, long=long: f"{long} {found[1] or found[2] or found[3] or ''}", parts[place]
            )
            parts[place] = alone.sub(long, without.sub(long, changed))
    return "".join(parts)


def in_settings(text: str) -> str:
    """The text with the options of `autoplan plan` where it names keywords, for what is said of a plan.

    >>> in_settings("without the rule M >= 4K: K = 4, step 2 s; set micro_batches_per_stage=2 for it")
    'without the rule M >= 4K: K = 4, step 2 s; set --micro-batches-per-stage 2 for it'
    """
    return in_options(text, _SETTINGS)


_SETTINGS = click.command("settings")(with_options(*MEASURING, *planning())(lambda: None))
"""Names options, and does nothing."""
