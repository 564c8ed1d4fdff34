"""Regions without gradient or under autocast that write what lies outside of them, written out in the graph.

    before                                      after
    buffer, x --> region[no_grad:               buffer, x --> detach, detach --> copy_ (a write like any other)
                    copy_(buffer, x.mean())]

Export keeps such a region as one operation with a graph of its own, in which a write is hidden: nobody would see that
it moves a buffer, in every micro-batch and again when recomputed. Without gradient is what computes with detached
values; an autocast region that is switched off where none is on changes nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from profiler.torch_private import HigherOrderOperator, OpOverload, can_carry, schema_of
from profiler.tracing.refusals import written_bases, written_from_outside
from profiler.tracing.writes import moves_statistics

_WITHOUT_GRADIENT = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def write_out_regions(root: fx.GraphModule, *, under_autocast: bool) -> None:
    """Write out the regions that write what they take, where that is no parameter; others stay as they are.

    Args:
        root: a graph and the regions that it calls.
        under_autocast: whether the graph itself runs under autocast.
    """
    pending: list[fx.Node] = list(root.graph.nodes)
    changed = False
    while pending:
        node = pending.pop(0)
        region = _region_of(root, node)
        if region is None or not _can_be_written_out(root, node, region, under_autocast=under_autocast):
            continue
        pending = [*_write_out(root, node, region), *pending]  # there may be regions in it
        changed = True
    if changed:
        root.graph.lint()
        root.recompile()


def forget_metadata_checks(graph_module: fx.GraphModule) -> None:
    """Take out of a region's graph the checks that what is converted (`x.float()`) has the type of the export.

    An LSTM in an autocast region has another one in training, since an export switches oneDNN off.
    """
    checks = [
        node for node in graph_module.graph.nodes if node.target is torch.ops.aten._assert_tensor_metadata.default
    ]
    for node in checks:
        graph_module.graph.erase_node(node)
    if checks:
        graph_module.recompile()


def autocast_dtypes(root: fx.GraphModule, device_type: str) -> Iterator[torch.dtype]:
    """In which the autocast regions of a graph let a kind of device compute, those inside of others included."""
    for part in root.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if str(node.target) == _AUTOCAST:
                kind, dtype, enabled, _ = node.args[: _position(node)]
                if enabled and kind == device_type:
                    yield dtype


def _held(root: fx.GraphModule, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), root)


def _region_of(root: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    if not isinstance(node.target, HigherOrderOperator) or str(node.target) not in (_WITHOUT_GRADIENT, _AUTOCAST):
        return None
    source = node.args[_position(node)]
    region = _held(root, str(source.target)) if isinstance(source, fx.Node) and source.op == "get_attr" else None
    return region if isinstance(region, fx.GraphModule) else None


def _position(node: fx.Node) -> int:
    """Of the region among the arguments; what it takes comes after it."""
    return 1 if str(node.target) == _WITHOUT_GRADIENT else 4


def _can_be_written_out(root: fx.GraphModule, node: fx.Node, region: fx.GraphModule, *, under_autocast: bool) -> bool:
    settings = node.args[: _position(node)]
    if str(node.target) == _AUTOCAST:
        _, _, enabled, _ = settings
        plain = not enabled and not under_autocast
    else:
        plain = settings == (False,) and not any(map(_lets_gradients_in, region.modules()))
    if not plain or written_from_outside(region) is None:
        return False
    taken = dict(zip(_placeholders(region), node.args[_position(node) + 1 :], strict=True))
    written = [taken[base] for base in written_bases(region) if base in taken]
    return not any(_is_parameter(root, value) for value in written)


def _lets_gradients_in(module: Any) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(str(node.target) == _WITHOUT_GRADIENT and node.args[0] is not False for node in nodes)


def _is_parameter(root: fx.GraphModule, value: Any) -> bool:
    """Whether it is the model's parameter, or shares its memory."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.args:
        value = value.args[0]
    held = _held(root, str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else None
    return isinstance(held, torch.nn.Parameter)


def _placeholders(region: fx.GraphModule) -> list[fx.Node]:
    return [node for node in region.graph.nodes if node.op == "placeholder"]


def _write_out(root: fx.GraphModule, node: fx.Node, region: fx.GraphModule) -> list[fx.Node]:
    """Put a region's operations in its place; returns them."""
    taken: Sequence[Any] = node.args[_position(node) + 1 :]
    without_gradient = str(node.target) == _WITHOUT_GRADIENT
    given: dict[fx.Node, Any] = dict(zip(_placeholders(region), taken, strict=True))
    known = dict(given)
    copies: list[fx.Node] = []
    with root.graph.inserting_before(node):
        for inner in list(known) if without_gradient else ():
            if isinstance(inner.meta.get("val"), Tensor) and not _is_statistic(inner):
                known[inner] = root.graph.call_function(torch.ops.aten.detach.default, (known[inner],))
                known[inner].meta.update(node.meta | {"val": inner.meta["val"].detach()})
        for inner in region.graph.nodes:
            if inner.op == "get_attr":
                known[inner] = root.graph.get_attr(_on_root(root, _held(region, str(inner.target))))
                known[inner].meta.update(inner.meta)
            elif inner.op == "call_function":
                known[inner] = root.graph.node_copy(inner, known.__getitem__)
                copies.append(known[inner])
    returned = next(inner for inner in region.graph.nodes if inner.op == "output").args[0]
    for user in list(node.users):
        assert user.target is operator.getitem, "a region returns a tuple"
        result = returned[user.args[1]]
        written = _written_itself(result)
        user.replace_all_uses_with(known[result] if written is None else given[written])
        root.graph.erase_node(user)
    root.graph.erase_node(node)
    return copies


def _written_itself(result: fx.Node) -> fx.Node | None:
    """What a region takes and returns written; to write without gradient takes no gradient away from it."""
    while isinstance(result.target, OpOverload) and isinstance(result.args[0], fx.Node):
        returns = schema_of(result.target).returns
        if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
            return None
        result = result.args[0]
    return result if result.op == "placeholder" else None


def _is_statistic(taken: fx.Node) -> bool:
    """Whether what a region takes is nothing but statistics of a batch normalization, which never carry a gradient."""
    return all(moves_statistics(user) and taken in user.args[3:5] for user in taken.users) or (
        not can_carry(taken.meta["val"])
    )


def _on_root(root: fx.GraphModule, held: Any) -> str:
    """The name under which a region in a region, or a constant of it, is held by the root from now on."""
    number = next(
        i for i in range(len(root._modules) + len(root._buffers) + 1) if not hasattr(root, f"written_out_{i}")
    )
    name = f"written_out_{number}"
    if isinstance(held, Tensor) and not isinstance(held, torch.nn.Parameter):
        root.register_buffer(name, held, persistent=False)
    else:
        setattr(root, name, held)
    return name
