"""Layers after each other, written out as one function of Python that calls their operations.

    def run(values, b):                                 # layers `linear` and `tanh`; `b` are buffers
        v0 = f0(values["x"], p0, p1)
        v1 = f1(v0)
        del v0
        values["tanh"] = v1

Between large kernels the caches are cold, and to go from one layer to the next takes as long as a small operation: a
forward pass of 14 operations of 40 us took 1.1 times as long layer by layer [measured]. What is called, in which order
and with what is the same.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, fx

from profiler.tracing.sequence import Layer

Run: TypeAlias = Callable[[dict[str, Any], Mapping[str, Tensor]], None]
_ALONE = (bool, int, type(None))  # constants that are written as they are


@dataclass(frozen=True, slots=True)
class Part:
    """One of the layers.

    Attributes:
        layer: the layer.
        parameters: its tensors in the order of its names.
        forget: names of values that nothing needs after it.
    """

    layer: Layer
    parameters: Sequence[Tensor]
    forget: Sequence[str]


def graph_of(layer: Layer) -> fx.Graph | None:
    """The graph of a layer that can be written out; None if it has modules of its own, or an unusual call."""
    graph = getattr(getattr(layer.function, "__self__", None), "graph", None)
    if not isinstance(graph, fx.Graph):
        return None
    kinds = {"placeholder", "call_function", "call_method", "output"}
    usual = all(node.op in kinds and not any(map(keyword.iskeyword, node.kwargs)) for node in graph.nodes)
    return graph if usual else None


def written_out(parts: Sequence[Part]) -> Run:
    """The layers as one function of values and buffers by name; values that are needed later join the others.

    Args:
        parts: layers in order, each with a graph (`graph_of`).
    """
    text = _Text()
    for part in parts:
        text.add(part)
    return text.compiled({name for part in parts for name in part.forget})


@dataclass(slots=True)
class _Text:
    """A function under construction."""

    lines: list[tuple[str, tuple[str, ...]]] = field(
        default_factory=list
    )  # with the variables that each reads or makes
    names: dict[str, Any] = field(default_factory=dict)  # that the function finds around itself
    known: dict[int, str] = field(default_factory=dict)  # by `id`
    values: dict[str, str] = field(default_factory=dict)  # the variable of each value
    read: dict[str, str] = field(default_factory=dict)  # likewise, of those that were there before

    def add(self, part: Part) -> None:
        """One more layer."""
        layer, graph = part.layer, graph_of(part.layer)
        assert graph is not None, "it was looked at before"
        variables: dict[fx.Node, str] = {}
        sources = [self._around("p", parameter) for parameter in part.parameters]
        sources += [f'b["{name}"]' for name in layer.buffers]
        sources += [self._value(name) for name in layer.values]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        variables.update(zip(placeholders, sources, strict=True))
        for node in graph.nodes:
            if node.op.startswith("call"):
                self._call(node, variables)
            elif node.op == "output":
                results = [variables[result] for result in node.args[0]]
                self.values.update(zip(layer.outputs, results, strict=True))

    def _call(self, node: fx.Node, variables: dict[fx.Node, str]) -> None:
        arguments = [self._written(argument, variables) for argument in node.args]
        arguments += [f"{name}={self._written(argument, variables)}" for name, argument in node.kwargs.items()]
        used = tuple(variables[source] for source in node.all_input_nodes)
        made = variables[node] = f"v{len(self.lines)}"
        called = self._around("f", node.target) if node.op == "call_function" else f"{arguments.pop(0)}.{node.target}"
        self.lines.append((f"{made} = {called}({', '.join(arguments)})", (*used, made)))

    def _written(self, argument: Any, variables: Mapping[fx.Node, str]) -> str:
        """An argument of a call as text."""
        if isinstance(argument, fx.Node):
            return variables[argument]
        if isinstance(argument, list | tuple):
            inner = "".join(f"{self._written(item, variables)}, " for item in argument)
            return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
        if isinstance(argument, dict):
            items = (f"{self._around('c', key)}: {self._written(item, variables)}" for key, item in argument.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(argument, slice):
            ends = (argument.start, argument.stop, argument.step)
            return f"slice({', '.join(self._written(end, variables) for end in ends)})"
        return repr(argument) if type(argument) in _ALONE else self._around("c", argument)

    def _around(self, kind: str, value: Any) -> str:
        """The name of something that the function finds around itself; it lives as long as the function."""
        if id(value) not in self.known:
            name = self.known[id(value)] = f"{kind}{len(self.names)}"
            self.names[name] = value
        return self.known[id(value)]

    def _value(self, name: str) -> str:
        if name not in self.values:
            variable = self.values[name] = self.read[name] = f"r{len(self.read)}"
            self.lines.append((variable, (variable,)))
        return self.values[name]

    def compiled(self, forgotten: set[str]) -> Run:
        """The function; each value is let go after its last use, also by the caller where nothing needs it later."""
        taken = {
            variable: f'{variable} = values.pop("{name}")' if name in forgotten else f'{variable} = values["{name}"]'
            for name, variable in self.read.items()
        }
        leaving = {name: variable for name, variable in self.values.items() if name not in forgotten | self.read.keys()}
        kept = set(leaving.values())
        body = [f'values["{name}"] = {variable}' for name, variable in reversed(leaving.items())]
        for line, variables in reversed(self.lines):
            own = [variable for variable in dict.fromkeys(variables) if variable[0] in "vr" and variable not in kept]
            kept.update(own)
            body += [f"del {', '.join(own)}"] if own else []
            body.append(taken.get(line, line))
        space = dict(self.names)
        exec("def run(values, b):\n    " + "\n    ".join([*reversed(body), "return"]), space)
        run: Run = space["run"]
        return run
