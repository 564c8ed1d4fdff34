"""How a module that cannot be traced becomes one node of the graph.

While the model is traced, the module's forward is replaced: it rehearses the call, and calls an operator that stands
for it in the graph and knows shapes only. In the finished graph `OpaqueCall`s take the place of that operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.machine.backend import device_of_first
from profiler.opaque.call import Held, OpaqueCall, Slot
from profiler.opaque.operators import LIBRARY, replace_operator
from profiler.opaque.rehearsal import TakenTensor, rehearse

_CALLS: ContextVar[OpaqueCalls | None] = ContextVar("opaque calls of the trace that is under way", default=None)


class OpaqueCalls:
    """The calls of modules that are called as they are, in one trace.

    Args:
        model: that is traced.
        paths: of those modules.
        sizes: micro-batch sizes to rehearse at: two, or one where the batch is not dynamic.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], sizes: Sequence[int]) -> None:
        modules = {id(module): (path, module) for path in paths for module in [model.get_submodule(path)]}
        self._held = [Held(path, module) for path, module in modules.values()]
        self._sizes = sizes
        self._sites: list[OpaqueCall] = []
        self._made = 0  # calls in the present run of the model; a second run makes the same calls

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, a call of one of the modules becomes a node of the graph."""
        token = _CALLS.set(self)
        self._made = 0
        try:
            for held in self._held:
                held.module.forward = partial(self._traced, held)
            yield
        finally:
            _CALLS.reset(token)
            for held in self._held:
                del held.module.__dict__["forward"]
                if held.own_forward is not None:
                    held.module.__dict__["forward"] = held.own_forward

    def _traced(self, held: Held, *args: Any, **kwargs: Any) -> Any:
        """What replaces the module's forward."""
        if _CALLS.get() is not self:  # inside another module that is called as it is
            return held.forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self._made == len(self._sites):
            self._sites.append(self._call(held, leaves, tree))
        signature = self._sites[self._made].signature
        values = [v for t, v in sorted((t.position, i) for i, t in enumerate(signature.leaves) if isinstance(t, Slot))]
        taken = [leaves[index] for index in values]
        tensors, numbers = taken[: len(signature.inputs)], taken[len(signature.inputs) :]
        own = [_member(held.module, name) for name in held.names]
        outputs = torch.ops.gpipe_autoplan.called_as_is([*own, *tensors], numbers, self._made)
        self._made += 1
        result = [outputs[leaf.position] if isinstance(leaf, Slot) else leaf for leaf in signature.result_leaves]
        return pytree.tree_unflatten(result, signature.result_tree)

    def _call(self, held: Held, leaves: Sequence[Any], tree: pytree.TreeSpec) -> OpaqueCall:
        """The call with these arguments, after a rehearsal."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        order = {id(leaf): position for position, leaf in enumerate((*tensors, *numbers))}
        template = [self._template(held, leaf, order) for leaf in leaves]
        taken = [TakenTensor(tuple(t.shape), t.dtype, t.requires_grad, t.device) for t in tensors]
        signature, cost = rehearse(held, template, tree, taken, numbers, self._sizes)
        return OpaqueCall(held, sum(call.path == held.path for call in self._sites), signature, cost)

    def _template(self, held: Held, leaf: Any, order: Mapping[int, int]) -> Any:
        if id(leaf) in order:
            return Slot(order[id(leaf)])
        if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype):
            return leaf
        raise NotTraceableError(
            f"cannot trace the model: module {held.path!r} is to be called as it is, for it cannot be traced, and it "
            f"takes a {type(leaf).__name__}; keep a larger module together that takes tensors and plain constants"
        )

    def shapes(self, tensors: Sequence[Tensor], site: int) -> list[Tensor]:
        """What the operator returns for tensors without data."""
        call = self._sites[site]
        inputs = tensors[len(tensors) - len(call.signature.inputs) :]
        size = call.size_of(inputs)
        device = device_of_first(tensors)
        return [torch.empty(kind.shape_at(size), dtype=kind.dtype, device=device) for kind in call.signature.outputs]

    def put_into(self, root: fx.GraphModule) -> None:
        """Replace the operator by the calls, in the graph and in its regions."""
        replace_operator(root, torch.ops.gpipe_autoplan.called_as_is.default, self._sites, lambda _: ())


def _member(module: nn.Module, name: str) -> Tensor:
    path, _, own_name = name.rpartition(".")
    member: Tensor = getattr(module.get_submodule(path), own_name)
    return member


def _shapes(tensors: Sequence[Tensor], numbers: Sequence[Any], site: int) -> list[Tensor]:
    calls = _CALLS.get()
    assert calls is not None, "the operator exists in traces only"
    return calls.shapes(tensors, site)


LIBRARY.impl("called_as_is", _shapes, "Meta")


def opaque_calls_of(node: fx.Node) -> list[OpaqueCall]:
    """The calls that a node makes, itself or in its region."""
    if isinstance(node.target, OpaqueCall):
        return [node.target]
    root = node.graph.owning_module
    regions = [getattr(root, str(source.target), None) for source in node.all_input_nodes if source.op == "get_attr"]
    inner = [n for region in regions if isinstance(region, fx.GraphModule) for n in region.graph.nodes]
    return [call for each in inner for call in opaque_calls_of(each)]
