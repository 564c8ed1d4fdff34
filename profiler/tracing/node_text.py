"""Operations of a graph as people and digests read them: names, modules, lines of source, shapes, arguments."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from profiler.torch_private import OpOverload
from profiler.tracing.export import module_stack

MICRO_BATCH_SIZE = sympy.Symbol("n", integer=True, positive=True)  # the micro-batch size in symbolic shapes
RUN_IN = "run_in"
"""Of an operation's `meta`: paths of modules of what it runs, where its regions are also those of other operations."""
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
ANY_DEVICE = torch.device("meta")
"""As texts show every device."""
_DEVICE_TEXT = re.compile(r"device\(type='\w+'(, index=\d+)?\)")


def attribute(root: torch.nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    found: Any = root
    for part in path.split("."):
        found = getattr(found, part)
    return found


def operation_name(node: fx.Node) -> str:
    """`aten.linear.default`, `getitem`: what people call an operation."""
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that the operation comes from; "" for the model itself."""
    stack = module_stack(node)
    return stack[-1] if stack else ""


def module_paths(node: fx.Node) -> tuple[str, ...]:
    """`module_path` of an operation, or of those in the regions that it runs, in order."""
    root, sources = node.graph.owning_module, [each for each in node.all_input_nodes if each.op == "get_attr"]
    held = [attribute(root, str(source.target)) for source in sources] if root is not None else []
    regions = [region for region in held if isinstance(region, fx.GraphModule)]
    inside = [each for region in regions for each in region.graph.nodes if each.op == "call_function"]
    paths = node.meta.get(RUN_IN) or tuple(path for each in inside for path in module_paths(each))
    return paths if any(paths) else (module_path(node),)


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost line outside torch that the operation comes from; "" if unknown."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [place for place in places if not place[0].startswith(_TORCH)]
    return ":".join(own[-1]) if own else ""


def symbolic_shape(value: Tensor) -> tuple[Any, ...]:
    """Shape with every dynamic extent as an expression of the micro-batch size `MICRO_BATCH_SIZE`."""
    return tuple(symbolic(extent) for extent in value.shape)


def symbolic(extent: int | torch.SymInt) -> Any:
    """An extent as an int, or as an expression of `MICRO_BATCH_SIZE`."""
    if not isinstance(extent, torch.SymInt):
        return int(extent)
    expression = extent.node.expr
    return expression.subs(dict.fromkeys(expression.free_symbols, MICRO_BATCH_SIZE))


def value_text(value: object) -> str:
    """Shape and dtype of a tensor, the expression of a number, the code of a graph (see `arguments_text`)."""
    if isinstance(value, Tensor):
        return f"{symbolic_shape(value)} {value.dtype}"
    if isinstance(value, torch.SymInt):
        return str(symbolic(value))
    if isinstance(value, fx.GraphModule):
        return _DEVICE_TEXT.sub(repr(ANY_DEVICE), value.code)
    return type(value).__name__


def node_text(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """An operation as text that does not depend on what its arguments are called."""
    return f"{operation_name(node)} {arguments_text(node, name)}"


def arguments_text(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """An operation's arguments as text, other nodes by the given names, and one device for all.

    Which one it is follows from where the model is, while a plan belongs to it wherever it is.
    """

    def shown(argument: fx.node.Argument) -> fx.node.Argument:
        if isinstance(argument, fx.Node):
            return _Named(name(argument))
        return ANY_DEVICE if isinstance(argument, torch.device) else argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), shown)
    return f"{args} {dict(sorted(kwargs.items()))}"


class _Named(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def digest(lines: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
