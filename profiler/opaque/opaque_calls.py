"""How a module or function that cannot be traced becomes one node of the graph.

While the model is traced, the forward of the module, or the code of the function, is replaced: it rehearses the call,
and calls an operator that stands for it in the graph and knows shapes only. In the finished graph `OpaqueCall`s take
the place of that operator.
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
from profiler.observe.draws import has_foreign_backward
from profiler.observe.libraries import Libraries
from profiler.observe.named_functions import SEPARATOR, function_named
from profiler.opaque.call import OpaqueCall, OwnDevice, Slot
from profiler.opaque.called_functions import CalledFunction, content_of, handed_on
from profiler.opaque.custom_functions import FunctionCall
from profiler.opaque.held import Held
from profiler.opaque.made_up import RehearsedCall, TakenTensor
from profiler.opaque.operators import LIBRARY, replace_operator
from profiler.opaque.rehearsal import rehearse


class NotCallableError(NotTraceableError):
    """What was to be called as it is cannot be.

    Args:
        reason: why it cannot be called.
        path: of the module, or the function's name.
        not_traced: why it cannot be traced, where that is known.
    """

    def __init__(self, reason: str, *, path: str, not_traced: str = "") -> None:
        super().__init__(reason + not_traced)
        self.reason = reason
        self.path = path

    def not_traced_for(self, reason: str) -> NotCallableError:
        """The same, with why it cannot be traced."""
        known = reason.removeprefix("cannot trace the model: ")
        told = "" if reason == self.reason else f"; why it cannot be traced: {known}"
        return NotCallableError(self.reason, path=self.path, not_traced=told)


_CALLS: ContextVar[OpaqueCalls | None] = ContextVar("opaque calls of the trace that is under way", default=None)


class OpaqueCalls:
    """The calls of modules and functions that are called as they are, in one trace.

    Args:
        model: that is traced.
        paths: of those modules, and names of those functions.
        sizes: micro-batch sizes to rehearse at: two, or one where the batch is not dynamic.

    Raises:
        NotTraceableError: a function is not there.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], sizes: Sequence[int]) -> None:
        called = {id(module): (path, module) for path in paths for module in [_called(model, path)]}
        self._held = [Held(path, module) for path, module in called.values()]
        self._sizes = sizes
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # export puts fake ones there
        self._libraries = Libraries.now()  # an export switches them off
        self._sites: list[OpaqueCall] = []
        self._made = 0  # calls in the present run of the model; a second run makes the same calls

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, a call of one of the modules becomes a node of the graph."""
        token = _CALLS.set(self)
        self._made = 0
        try:
            with contextlib.ExitStack() as replaced:
                for held in self._held:
                    replaced.enter_context(self._replaced(held))
                yield
        finally:
            _CALLS.reset(token)

    @contextlib.contextmanager
    def _replaced(self, held: Held) -> Iterator[None]:
        if isinstance(held.module, CalledFunction):
            with handed_on(held.path, held.module.function, lambda args, kwargs: self._traced(held, *args, **kwargs)):
                yield
            return
        held.module.forward = partial(self._traced, held)
        try:
            yield
        finally:
            del held.module.__dict__["forward"]
            if held.own_forward is not None:
                held.module.__dict__["forward"] = held.own_forward

    def _traced(self, held: Held, *args: Any, **kwargs: Any) -> Any:
        """What replaces the module's forward, or the function."""
        if _CALLS.get() is not self:  # inside another module that is called as it is
            return held.forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self._made == len(self._sites):
            try:
                self._sites.append(self._call(held, leaves, tree))
            except NotTraceableError as problem:
                raise NotCallableError(str(problem), path=held.path) from problem
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
        template = [_template(held, leaf, order) for leaf in leaves]
        taken = [TakenTensor(tuple(t.shape), t.dtype, t.requires_grad, t.device) for t in tensors]
        call = RehearsedCall(held, template, tree, taken, numbers, self._others(held))
        with self._libraries.in_use():
            signature, cost = rehearse(call, self._sizes)
        return OpaqueCall(held, sum(call.path == held.path for call in self._sites), signature, cost)

    def _others(self, held: Held) -> dict[str, Tensor]:
        """The model's parameters and buffers that are none of the module's, by other names either."""
        own = {id(tensor) for tensor in (*held.parameters.values(), *held.buffers.values())}
        return {name: tensor for name, tensor in self._tensors.items() if id(tensor) not in own}

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


def _called(model: nn.Module, path: str) -> nn.Module:
    """The module with that path, or the function with that name."""
    if SEPARATOR not in path:
        return model.get_submodule(path)
    function = function_named(path)
    if function is None:
        raise NotTraceableError(
            f"cannot trace the model: function {path!r} was called as it is, for it could not be traced, and is not "
            "there now; import its module before, and let it be a function of that module's top level"
        )
    return CalledFunction(function)


def _template(held: Held, leaf: Any, order: Mapping[int, int]) -> Any:
    """What a call's signature says of an argument: its place among tensors and numbers, or the argument itself."""
    if id(leaf) in order:
        return Slot(order[id(leaf)])
    if isinstance(leaf, torch.device) and held.is_function:
        return OwnDevice()
    if isinstance(leaf, torch.SymBool):
        return bool(leaf)  # a condition on values, which is asked for as where the model branches on it
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype):
        return leaf
    if held.is_function and content_of(leaf) is not None:
        return leaf
    raise NotTraceableError(
        f"cannot trace the model: {held} is to be called as it is, for it cannot be traced, and it takes a "
        f"{type(leaf).__name__}; keep a larger module together that takes tensors and plain constants"
    )


def _member(module: nn.Module, name: str) -> Tensor:
    path, _, own_name = name.rpartition(".")
    member: Tensor = getattr(module.get_submodule(path), own_name)
    return member


def _shapes(tensors: Sequence[Tensor], numbers: Sequence[Any], site: int) -> list[Tensor]:
    calls = _CALLS.get()
    assert calls is not None, "the operator exists in traces only"
    return calls.shapes(tensors, site)


torch.library.register_fake("gpipe_autoplan::called_as_is", _shapes, lib=LIBRARY)


def opaque_calls_of(node: fx.Node) -> list[OpaqueCall]:
    """The calls that a node makes, itself or in its region."""
    return [target for target in _targets_of(node) if isinstance(target, OpaqueCall)]


def runs_code_in_backward(node: fx.Node) -> bool:
    """Whether its backward pass, or one in its region, is code of somebody's."""
    return any(
        isinstance(target, OpaqueCall | FunctionCall) or has_foreign_backward(target) for target in _targets_of(node)
    )


def _targets_of(node: fx.Node) -> Iterator[Any]:
    """What a node calls, itself or in its region."""
    yield node.target
    root = node.graph.owning_module
    for source in node.all_input_nodes:
        region = getattr(root, str(source.target), None) if source.op == "get_attr" else None
        for inner in region.graph.nodes if isinstance(region, fx.GraphModule) else ():
            yield from _targets_of(inner)
