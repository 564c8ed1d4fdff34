"""The private parts of torch that we use, all in one place: what each is for, and what there is about it upstream.

A new version of torch may move any of them without a word; then this is the file to mend. All were seen in torch 2.13,
with which the tests run; where other versions are known, it says so. Issues (#) and pull requests (PR) are those of
github.com/pytorch/pytorch.

Other files may use what torch's own documentation and the libraries around it use, since there is nothing public in its
place: `torch.utils._pytree`, `torch.utils._python_dispatch.TorchDispatchMode`, `torch._subclasses.fake_tensor`; a
tensor's `_version`; the tables of a module (`_parameters`, `_buffers`, `_modules`), which every pickled module holds.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.autograd.function import _SingleLevelFunction
from torch.backends.cudnn import rnn
from torch.fx._symbolic_trace import PH
from torch.nn.modules import module as module_file
from torch.utils._python_dispatch import _disable_current_modes

# Classes of `torch.ops.aten.add.Tensor` and of `torch.ops.higher_order.cond`; what symbolic_trace makes an input of.
__all__ = ["PH", "HigherOrderOperator", "OpOverload"]

T = TypeVar("T")


# Tensors and their memory.


def can_carry(tensor: Tensor) -> bool:
    """Whether a tensor of this type can have a gradient: complex numbers can."""
    return tensor.is_floating_point() or tensor.is_complex()


def storage_of(tensor: Tensor) -> int:
    """What tensors on the same memory have in common, for as long as one of them lives.

    `data_ptr` is 0 for all fake tensors, and for all empty ones.
    """
    return number_of_storage(tensor.untyped_storage())


def number_of_storage(storage: torch.UntypedStorage) -> int:
    """What `storage_of` says of tensors on it."""
    return int(storage._cdata)


copy_all: Callable[[list[Tensor], list[Tensor]], object] = torch._foreach_copy_
"""Copies tensors to tensors, of other types too; on CUDA in one kernel for many, as torch's optimizers do."""

add_all: Callable[..., object] = torch._foreach_add_
"""Adds tensors to tensors, or a number to all, in place; this and the next as `copy_all`."""
lerp_all: Callable[..., object] = torch._foreach_lerp_
"""Moves tensors towards tensors in place, by that share of the way."""

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many hold a living tensor's memory, given `tensor.untyped_storage()._cdata`; the call itself is one of them.

PR 155451 made it one for all kinds of device; builds with debug assertions need PR 157694.
"""


def values_of(sparse: Tensor) -> Tensor:
    """The values of a sparse tensor that need not be coalesced; `Tensor.values` refuses it."""
    return sparse._values()


def parts_of(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of a sparse tensor, on whose memory it lies; also where places may stand twice."""
    return sparse._indices(), sparse._values()


def is_view(tensor: Tensor) -> bool:
    """Whether autograd has a tensor for a view of another one."""
    return tensor._is_view()


def is_lazy(tensor: Tensor) -> bool:
    """Whether a parameter or buffer has no shape yet, as those of lazy modules before their first call."""
    return nn.parameter.is_lazy(tensor)


def flatten_for_cudnn(
    weights: Sequence[Tensor],
    per_layer: int,
    features: int,
    mode: str,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    bidirectional: bool,
) -> None:
    """Give the weights of a recurrent network memory as cuDNN wants it, as `nn.RNNBase.flatten_parameters` does.

    Args:
        weights: in the order of `nn.RNNBase`.
        per_layer: how many of them one direction of a layer has.
        features: of its input.
        mode: cuDNN's name of the network.
        hidden: width of its state.
        projected: width of a projection; 0 for none.
        layers: of the network.
        batch_first: whether samples come before steps.
        bidirectional: whether it goes both ways.
    """
    number = rnn.get_cudnn_mode(mode)
    sizes = features, number, hidden, projected, layers, batch_first, bidirectional
    torch._cudnn_rnn_flatten_weight(list(weights), per_layer, *sizes)


# Operators.


def schema_of(operator: Any) -> Any:
    """What an operator says of its arguments and results: which it writes, and which lie in the same memory."""
    return operator._schema


def backward_of_operation(name: str) -> Any:
    """What `register_autograd` was given for an operation that `torch.library.custom_op` has made; else None."""
    from torch._library.custom_ops import OPDEFS

    return getattr(OPDEFS.get(name), "_backward_fn", None)


# Functions of torch's in whose place another is put for a while.


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """A function that all calls of a kind pass, by whatever name their caller knows it.

    Attributes:
        owner: makes the object that holds it; called late, since some take long to import.
        name: that it has there.
    """

    owner: Callable[[], Any]
    name: str

    @property
    def original(self) -> Any:
        """What stands there now."""
        return getattr(self.owner(), self.name)

    def replaced_by(self, other: Any) -> contextlib.AbstractContextManager[Any]:
        """Within, another one stands there."""
        return mock.patch.object(self.owner(), self.name, other)


def _shape_environment() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv


CUSTOM_FUNCTION_CALL = PatchPoint(lambda: _SingleLevelFunction, "apply")
"""The end of `torch.autograd.Function.apply`; export follows the forward pass and drops the backward pass (#106388)."""
SAVED_TENSORS_HOOKS = PatchPoint(lambda: torch._C._autograd, "_push_saved_tensors_default_hooks")
"""Entered by every `saved_tensors_hooks`, which a graph would lose."""
BACKWARD_PASS = PatchPoint(lambda: torch.autograd, "_engine_run_backward")
"""Entered by `torch.autograd.grad` and `backward`, which a graph would lose (#125984)."""
CHECKPOINT = PatchPoint(lambda: torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
"""What `torch.utils.checkpoint` does before and after a function that it will run again."""
INFERENCE_MODE = PatchPoint(lambda: torch._C, "_InferenceMode")
"""Made by `torch.inference_mode`, which a graph cannot hold."""
CAUSAL_MASK_TEST = PatchPoint(lambda: nn.modules.transformer, "_detect_is_causal_mask")
"""Looks at a mask's values, for a shortcut that transformers can do without; a graph cannot (PR 91171)."""
MODULE_CALL = PatchPoint(lambda: fx.Tracer, "call_module")
"""Puts a module on the stack of those that are called, and leaves it there if the call raises (seen in torch 2.13)."""
EXTENT_FIXED = PatchPoint(_shape_environment, "_set_replacement")
"""Told that a dynamic extent can only be one number, where the forward pass has asked for it."""
FAKE_KERNELS = PatchPoint(lambda: FakeTensorMode, "dispatch")
"""Runs an operation on fake tensors; what it returns may lie in another order than the real kernel's result."""
EXPORTING_FLAG = PatchPoint(lambda: torch.compiler, "_is_exporting_flag")
"""Behind `torch.compiler.is_exporting`, which models ask to take another path."""
COMPILING_FLAG = PatchPoint(lambda: torch.compiler, "_is_compiling_flag")
"""Behind `torch.compiler.is_compiling`, likewise."""


# Tracing.

# Packages whose custom functions are the machinery of tracing, or belong to operations that a graph holds as such.
MACHINERY = (
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._library",
    "torch._prims_common",
    "torch._subclasses",
    "torch.fx",
    "torch.utils.checkpoint",
)


def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The end of `function.apply`, after what a class of the user's may have put in front of it."""
    return super(_SingleLevelFunction, function).apply(*args, **kwargs)


def lazy_graph_modules() -> contextlib.AbstractContextManager[Any]:
    """Within, graph modules are compiled when they are first called: export's passes make many, and run none of them.

    Used by torch.compile itself (PR 117911).
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def depends_on_data(symbol: Any) -> bool:
    """Whether a symbol of a graph stands for an extent that depends on data, as that of a selection by a mask."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


asserted: Callable[[Any, str], Any] = torch._assert
"""What models that are made for tracing write in the place of an assert statement."""


def unknown_value_errors() -> tuple[type[Exception], ...]:
    """What is raised where a symbol that depends on data is asked for its value."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (GuardOnDataDependentSymNode,)


@contextlib.contextmanager
def registration_hooks_stay() -> Iterator[None]:
    """Afterwards every module has the hooks on registrations that it had before.

    An export that fails leaves one behind, which refuses for a buffer what is not traced (seen in torch 2.11).
    """
    hooks = module_file._global_buffer_registration_hooks
    before = {*hooks}
    try:
        yield
    finally:
        for key in {*hooks} - before:
            del hooks[key]


def has_side_effect(operator: Any) -> None:
    """Keep calls of an operator in graphs though nothing reads what it returns."""
    from torch.fx.node import has_side_effect as register

    register(operator)


def parsed_move(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Device, dtype, whether to wait, and memory format, as `nn.Module.to` understands its arguments."""
    parsed: tuple[Any, Any, Any, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return parsed


def is_inside_function_transform(tensor: Tensor) -> bool:
    """Whether a tensor is one of `torch.vmap` or `torch.func`, which no operation outside can have."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def known_extent(number: Any) -> Any:
    """A number, or a symbolic one as it is in the traced example, which fixes nothing; None if it depends on data."""
    return number.node.hint if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Within, operations on real tensors are what they are outside of any trace."""
    with without_torch_function(), _disable_current_modes():
        yield


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Within, no mode or subclass sees calls of torch's functions; also modes that symbolic_trace may have set."""
    return torch._C.DisableTorchFunction()


# Modules.

NormBase: type[nn.Module] = nn.modules.batchnorm._NormBase
"""The base of all normalizations that may track running statistics."""
BatchNormBase: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""The base of the batch normalizations among them."""


def has_backward_hooks(owner: nn.Module | Tensor) -> bool:
    """Whether a module or a parameter has hooks that its backward pass calls."""
    tables = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(owner, table, None) for table in tables)


def gradient_hooks(tensor: Tensor) -> int:
    """How many hooks are called with a tensor's gradient."""
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def hook_first(tensor: Tensor, hook: Callable[[Tensor], object]) -> None:
    """Have a hook called with a leaf's gradient before all that others have registered."""
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    assert hooks is not None, "it has one"
    others = {number: other for number, other in hooks.items() if number != handle.id}
    for number in others:  # by the order of insertion they are called
        del hooks[number]
    hooks.update(others)


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """What is called before a module's forward pass."""
    return list(module._forward_pre_hooks.values())


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or after a module's forward pass, of its own or of all modules."""
    everywhere = module_file._global_forward_hooks or module_file._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or everywhere)


@contextlib.contextmanager
def graph_called(module: nn.Module) -> Iterator[None]:
    """Within, export calls a module that is a graph itself as it calls others: with hooks, and a `forward` set on it.

    It would run the nodes of a `GraphModule` one by one, and nothing else.
    """
    kind = type(module)
    if isinstance(module, fx.GraphModule):
        module.__class__ = type(kind.__name__, (nn.Module,), {"forward": kind.forward})
    try:
        yield
    finally:
        module.__class__ = kind


_SEQUENTIAL = ("__call__", "_call_impl", "forward", "__iter__", "__len__", "named_children")
"""What an `nn.Sequential` calls its children by, and engines count and find them by."""


def calls_its_children(module: nn.Module) -> bool:
    """Whether it is an `nn.Sequential` that calls its children one after the other, and does nothing else."""
    if not isinstance(module, nn.Sequential) or has_forward_hooks(module):
        return False
    return all(getattr(getattr(module, name), "__func__", None) is getattr(nn.Sequential, name) for name in _SEQUENTIAL)


def has_backward_hooks_of_all_modules() -> bool:
    """Whether `register_module_full_backward_hook` and its like have registered any."""
    return bool(module_file._global_backward_hooks or module_file._global_backward_pre_hooks)


def not_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that its state leaves out."""
    return module._non_persistent_buffers_set


# Running.

# As Megatron-LM does: `torch.autograd.backward` checks in Python what our callers know, which takes 14 us. [measured]
run_engine: Callable[..., tuple[Tensor, ...]] = Variable._execution_engine.run_backward


def is_profiled() -> bool:
    """Whether a profiler of torch's is at work; naming ranges for it costs time even if nobody looks."""
    return torch.autograd.profiler._is_profiler_enabled


def reports_to_a_profiler() -> bool:
    """Whether a profiler at work around us gets the reports of allocations; then `allocations_in` cannot."""
    return _profiler_enabled()


def allocations_in(call: Callable[[], T]) -> tuple[T, Iterable[int]]:
    """A call's result, and by how many bytes each allocation and each release within has changed the host's memory.

    By torch's light profiler; the public one takes milliseconds for each call and writes lines to the terminal.
    """
    of_memory_alone = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(of_memory_alone)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    changes = [event for events in threads for event in events if str(event.kind()) == "memory_alloc"]
    return result, [event.cpu_memory_usage() for event in changes]


def clear_product_workspaces() -> None:
    """Free what cuBLAS keeps from its first product on; otherwise the next allocates nothing (#184084, PR 187726)."""
    torch._C._cuda_clearCublasWorkspaces()


def hold_back(cycles: int) -> None:
    """Let the current CUDA stream do nothing for that many cycles of its clock, as torch's own tests do."""
    torch._C._cuda_sleep(cycles)


def process_groups_of_this_process() -> Iterator[Any]:
    """All process groups; their destructors wait for all that is under way in them (PR 154976)."""
    from torch.distributed.distributed_c10d import _world

    return iter(_world.pg_map)


# Autocast regions, which know of no other way to let all of them within keep no casts.

_set_cache_enabled = torch.set_autocast_cache_enabled
_keeping_no_casts = threading.local()  # `depth`: how many times this thread is within
_patched = {"by": 0}  # how many threads and levels need the replacement
_patching = threading.Lock()


@contextlib.contextmanager
def keeping_no_casts() -> Iterator[None]:
    """Within, autocast regions of this thread cast at each use, those too that ask torch to keep the casts of leaves.

    A region calls `torch.set_autocast_cache_enabled` when it begins and ends.
    """
    kept = torch.is_autocast_cache_enabled()
    with _patching:
        _patched["by"] += 1
        torch.set_autocast_cache_enabled = _set_cache_enabled_elsewhere
    _keeping_no_casts.depth = depth = getattr(_keeping_no_casts, "depth", 0) + 1
    _set_cache_enabled(False)
    try:
        yield
    finally:
        _set_cache_enabled(kept)
        _keeping_no_casts.depth = depth - 1
        with _patching:
            _patched["by"] -= 1
            if not _patched["by"]:
                torch.set_autocast_cache_enabled = _set_cache_enabled


def _set_cache_enabled_elsewhere(enabled: bool) -> None:
    if not getattr(_keeping_no_casts, "depth", 0):
        _set_cache_enabled(enabled)


# Pipelines of torch.distributed.pipelining.


def pipeline_runtime(
    stages: list[Any],
    micro_batches: int,
    loss_fn: Callable[[Any, Any], Tensor],
    table: str,
    batch_dims: Iterable[int | None],
) -> Any:
    """The runtime of torch for any schedule, which has no public name and reads its passes from a file.

    Args:
        stages: `PipelineStage`s of this process.
        micro_batches: M.
        loss_fn: of a micro-batch's output and target; gradients are not scaled after it.
        table: the passes, one line a rank.
        batch_dims: of each input; None for one that each micro-batch gets whole.
    """
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(
        stages,
        micro_batches,
        loss_fn=loss_fn,
        args_chunk_spec=tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in batch_dims),
        scale_grads=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(table, encoding="utf-8")
        runtime._load_csv(str(file), format="compute_only")
    return runtime
