"""A rehearsal: what a module that cannot be traced returns and costs, found by running it on made-up tensors.

It runs at a few micro-batch sizes; extents and bytes lie on a line. A fresh thread keeps the tracer's
modes, which live in thread-local state, out of it; so the rehearsal can take place in the middle of a trace.

Of a module that draws random numbers, which may decide what it does (layer drop), a few draws are tried first, and the
dearest is planned for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.machine.backend import HOST, device_of_first
from profiler.observe.elsewhere import Unwritten, lasting_spots, spots_of
from profiler.observe.flops import FlopCounter
from profiler.observe.outside_world import outside_told
from profiler.observe.random_states import preserved
from profiler.observe.reads import Reads
from profiler.observe.standing_in import standing_in
from profiler.observe.storage_watch import StorageWatch
from profiler.opaque.call import Affine, Cost, Signature, TensorKind, same_structure, with_slots
from profiler.opaque.custom_function_tracing import functions_noticed
from profiler.opaque.held import Changed, ChangesAttribute, Done, Held, Refused
from profiler.opaque.independent import independent
from profiler.opaque.made_up import (
    Circumstances,
    Entering,
    Numbers,
    RehearsedCall,
    backward_from,
    extent_at,
    own_parameters,
)
from profiler.opaque.run_again import takes_objects
from profiler.opaque.statistics import buffer_of, is_measurable
from profiler.text import counted
from profiler.torch_private import applied, can_carry, storage_of

DRAWS_TRIED = (
    4  # [chosen] a layer that is dropped with a chance of 1/10 is not in one of them, but for 1 case in 10,000
)


@dataclass(slots=True)
class _Run:
    size: int
    done: Done
    draws: bool
    runs_again: bool
    begins_alike: bool
    flops: int
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]


def rehearse(call: RehearsedCall, sizes: Sequence[int]) -> tuple[Signature, Cost]:
    """Run a module at these micro-batch sizes.

    Args:
        call: of the module.
        sizes: one, or three where the batch is dynamic: two make a line, and the third must lie on it.

    Raises:
        NotTraceableError: it cannot be run on made-up tensors, or does what no layer may do.
    """
    held = call.held
    _refuse_held(held)
    around = Circumstances.now(device_of_first((*held.parameters.values(), *held.buffers.values(), *call.tensors)))
    problem: Exception | None = None
    for numbers in Numbers.tried(call.tensors):
        try:
            runs = _runs(call, sizes, around, numbers)
            return _signature(call, runs), _cost(runs)
        except NotTraceableError:
            raise
        except Refused as refusal:
            raise NotTraceableError(_text(held, str(refusal))) from refusal
        except Exception as failure:
            problem = problem or failure
    words = (str(problem).splitlines() or [""])[0]
    raise NotTraceableError(
        _text(held, f"it fails on made-up tensors ({type(problem).__name__}: {words}); ")
        + "keep a larger module together that can be run on random numbers, whole numbers of 0, of 1 or (one a sample) "
        "as large as its sequence is long, and true flags; lines around it can be moved into it"
    ) from problem


def _runs(call: RehearsedCall, sizes: Sequence[int], around: Circumstances, numbers: Numbers) -> list[_Run]:
    """One run at each size; each from the same attributes, where these change and later calls do not depend on that."""
    try:
        return _some_runs(call, sizes, around, numbers, Changed.REFUSED)
    except ChangesAttribute:
        runs = _some_runs(call, sizes, around, numbers, Changed.PUT_BACK)
        with ThreadPoolExecutor(1) as thread:
            if not thread.submit(independent, call, sizes[0], around, numbers).result():
                raise
        return runs


def _some_runs(
    call: RehearsedCall, sizes: Sequence[int], around: Circumstances, numbers: Numbers, changed: Changed
) -> list[_Run]:
    """One run at each size, of the dearest of some draws if it draws random numbers."""
    made: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as afterwards:
        unwritten = thread.submit(Unwritten, {**call.held.constants, **call.held.parameters}).result()
        afterwards.callback(lambda: thread.submit(unwritten.put_back).result())
        ends = [thread.submit(spots_of, call.held.module).result()]  # there, since threads have values of their own

        def run(size: int, seed: int) -> _Run:
            done = thread.submit(_run, call, size, around, made, seed, numbers, changed).result()
            ends.append(thread.submit(spots_of, call.held.module).result())
            elsewhere = lasting_spots(ends[-2], ends[-1])
            if elsewhere and len(ends) > 2:  # in the first run it may make a cache
                raise Refused(f"it changes {elsewhere[0].name!r} in each call; keep that in a buffer (register_buffer)")
            return done

        first = run(sizes[0], 0)
        seed = _dearest_draw([run(sizes[0], other) for other in range(DRAWS_TRIED)]) if first.draws else 0
        runs = [run(size, seed) for size in sizes]
        again = run(sizes[0], seed)
        if not thread.submit(_alike, runs[0].done.result, again.done.result).result():
            raise Refused(
                "with the same arguments and the same random numbers it returns something else: it computes with the "
                "time, or with something that it keeps between calls where nobody sees it; keep that in a buffer "
                "(register_buffer), or pass it as an argument"
            )
        once = first.done.written.difference(*(run.done.written for run in runs))
        if once:
            raise Refused(
                f"it writes its buffer {min(once)!r} in its first call alone, and no other process would; use the "
                "model once before planning, so that the buffer is filled, or write it in each call"
            )
        return runs


def _alike(one: Any, other: Any) -> bool:
    """Whether two results agree, but for rounding."""
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False))
    tensors = [(a.detach(), b.detach()) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(
        a.shape == b.shape and (torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) if can_carry(a) else True)
        for a, b in tensors
    )


def _dearest_draw(runs: Sequence[_Run]) -> int:
    """Which of several draws costs most, and is to be planned for.

    Raises:
        Refused: what the module returns depends on the draw in more than its values.
    """
    shapes = []
    for run in runs:
        leaves, structure = pytree.tree_flatten(run.done.result)
        shapes.append((structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
    if any(shape != shapes[0] for shape in shapes):
        raise Refused("the shapes of what it returns depend on the random numbers that it draws")
    costs = [(run.kept_bytes, run.flops, run.forward_bytes) for run in runs]
    return costs.index(max(costs))


def _text(held: Held, reason: str) -> str:
    return f"cannot trace the model: {held} is to be called as it is, for it cannot be traced, and {reason}"


def _refuse_held(held: Held) -> None:
    if any(tensor.is_meta for tensor in chain(held.parameters.values(), held.buffers.values())):
        raise NotTraceableError(
            _text(held, "it is on the meta device, where nothing runs; materialize the model first: to_empty('cpu')")
        )
    for path, part in held.moving.items():
        if not is_measurable(part):
            raise NotTraceableError(
                _text(
                    held,
                    f"its {path or 'own'} normalization moves running statistics in a way of its own; freeze it "
                    "(eval()), set track_running_stats=False, or use torch's BatchNorm with a fixed momentum",
                )
            )


def _run(
    call: RehearsedCall,
    size: int,
    around: Circumstances,
    made: dict[str, Any],
    seed: int,
    numbers: Numbers,
    changed: Changed,
) -> _Run:
    held = call.held
    found = Entering.of(call, size, around, numbers)
    args, kwargs = found.call
    device = torch.device(around.device_type)
    own = own_parameters(held) | {name: tensor.clone() for name, tensor in held.buffers.items()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor
        return tensor

    given: list[Any] = []

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        if takes_objects(args, kwargs):
            given.append(function)
        return applied(function, *args, **kwargs)

    with preserved([HOST, device]), around.in_force(), StorageWatch() as watch:
        torch.manual_seed(seed)
        reads = Reads(call.others, own.values())
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            FlopCounter() as counter,
            reads,
            outside_told(_refuse_outside),
            functions_noticed(note),
        ):
            done = held.call(own, args, kwargs, made, may_draw=True, seed=seed, changed=changed)
        if reads.names:
            raise Refused(f"it reads {min(reads.names)!r}, which is not its own; pass that as an argument")
        forward_bytes = watch.peak_bytes_with_workspace
        outputs = [leaf for leaf in pytree.tree_leaves(done.result) if isinstance(leaf, Tensor)]
        entered = {storage_of(tensor): position for position, tensor in enumerate(found.tensors)}
        left = {storage_of(tensor): position for position, tensor in enumerate(outputs)}
        inside = [t for storage, t in saved.items() if storage not in entered and storage not in left]
        kept_bytes = sum(watch.bytes_of(tensor) or 0 for tensor in inside)
        kept_bytes += sum(own[name].nbytes for name in done.replaced if storage_of(own[name]) in saved)
        own |= done.replaced
        before = watch.live_bytes
        watch.restart()
        _run_backward(held, own, found.tensors, outputs, done, seed, runs_again=bool(given))
        return _Run(
            size,
            done,
            done.draws or counter.draws_random,
            bool(given),
            changed is Changed.PUT_BACK,
            counter.flops,
            kept_bytes,
            forward_bytes,
            watch.peak_bytes_with_workspace - before,
            tuple(sorted(position for storage, position in entered.items() if storage in saved)),
            tuple(sorted(position for storage, position in left.items() if storage in saved)),
        )


def _run_backward(
    held: Held,
    own: dict[str, Tensor],
    entering: Sequence[Tensor],
    outputs: Sequence[Tensor],
    done: Done,
    seed: int,
    *,
    runs_again: bool,
) -> None:
    """The backward pass of a call.

    Args:
        held: what was called.
        own: its parameters and buffers.
        entering: tensors that it was called with.
        outputs: tensors that it returned.
        done: what it did.
        seed: of its random generators.
        runs_again: whether functions of its own are given what may be run again, as checkpoints are.

    Raises:
        Refused: it hooks the node of an argument, or would move statistics in this pass, too.
    """
    counters = [own[buffer_of(path, "num_batches_tracked")] for path in held.moving]
    counted_before = [counter._version for counter in counters]
    if any(map(_has_hooked, entering)):
        raise Refused("it hooks the node that makes its argument; let it hook a value of its own (x = x.view_as(x))")
    with standing_in(held.module, own), held.seeded(seed), held.as_left(done.left), outside_told(_refuse_outside):
        backward_from(outputs)
    if done.measured and (runs_again or counted_before != [counter._version for counter in counters]):
        raise Refused(
            f"its {done.measured[0].path or 'own'} normalization would move running statistics once more in the "
            "backward pass, which runs it again; freeze it (eval()), or set track_running_stats=False"
        )


def _has_hooked(tensor: Tensor) -> bool:
    """Whether there is a hook at the node that has made a tensor."""
    node = tensor.grad_fn
    if node is None:
        return False
    ours = [node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)]
    hooked = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in ours)
    for handle in ours:
        handle.remove()
    return hooked


def _refuse_outside(what: str) -> None:
    raise Refused(f"it {what}, which no recomputed pass may do, nor another process")


def _signature(call: RehearsedCall, runs: Sequence[_Run]) -> Signature:
    flat = [pytree.tree_flatten(run.done.result) for run in runs]
    result_leaves, result_tree = flat[0]
    _refuse_unlike(call.held, runs, flat)
    sizes = [run.size for run in runs]
    inputs = [
        TensorKind(
            tuple(Affine.through(sizes, [extent_at(extent, size) for size in sizes]) for extent in tensor.shape),
            tensor.dtype,
        )
        for tensor in call.tensors
    ]
    return Signature(
        tuple(call.leaves),
        call.tree,
        tuple(inputs),
        tuple(Affine.through(sizes, [extent_at(number, size) for size in sizes]) for number in call.numbers),
        tuple(with_slots(result_leaves)),
        result_tree,
        tuple(_output_kinds(call.held, sizes, [_tensors(leaves) for leaves, _ in flat])),
        _normalizations(call.held, runs),
        frozenset().union(*(run.done.written for run in runs)),
        frozenset().union(*(run.done.replaced for run in runs)),
        any(run.done.draws for run in runs),
        any(run.runs_again for run in runs),
        any(run.begins_alike for run in runs),
    )


def _refuse_unlike(held: Held, runs: Sequence[_Run], flat: Sequence[tuple[Sequence[Any], Any]]) -> None:
    """Refuse results, flattened, that differ between sizes in more than extents, or that no graph can hold."""
    first, structure = flat[0]
    for leaves, other in flat:
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and not (leaf is None or isinstance(leaf, bool | int | float | str)):
                raise NotTraceableError(_text(held, f"it returns a {type(leaf).__name__}; let it return tensors"))
        if not same_structure(other, structure) or [*map(_kind, leaves)] != [*map(_kind, first)]:
            raise NotTraceableError(
                _text(
                    held,
                    f"what it returns for {runs[0].size} and for {counted(runs[-1].size, 'sample')} differs in "
                    "more than size",
                )
            )


def _kind(leaf: Any) -> Any:
    """What of a result is the same at every size."""
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf


def _output_kinds(held: Held, sizes: Sequence[int], results: Sequence[Sequence[Tensor]]) -> Iterator[TensorKind]:
    """Of each tensor that is returned, whose extents lie on a line: through two sizes, and the third must lie on it."""
    for same in zip(*results, strict=True):
        extents = zip(*(tensor.shape for tensor in same), strict=True)
        kind = TensorKind(tuple(Affine.through(sizes, each) for each in extents), same[0].dtype)
        for size, tensor in zip(sizes, same, strict=True):
            if kind.shape_at(size) != tuple(tensor.shape):
                raise NotTraceableError(
                    _text(
                        held,
                        f"the shape of what it returns depends on data: {list(tensor.shape)} for "
                        f"{counted(size, 'sample')}, not {list(kind.shape_at(size))}; let it return results of one "
                        "shape",
                    )
                )
        yield kind


def _normalizations(held: Held, runs: Sequence[_Run]) -> tuple[str, ...]:
    """Paths of those that yield statistics, in the order of their calls: the same at every size."""
    found = [tuple(measured.path for measured in run.done.measured) for run in runs]
    if found.count(found[0]) != len(found):
        raise NotTraceableError(_text(held, "which of its batch normalizations run depends on the micro-batch's size"))
    return found[0]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _cost(runs: Sequence[_Run]) -> Cost:
    sizes = [run.size for run in runs]

    def line(figure: Callable[[_Run], int]) -> Affine:
        return Affine.through(sizes, [figure(run) for run in runs])

    return Cost(
        flops=line(lambda run: run.flops),
        kept_bytes=line(lambda run: run.kept_bytes),
        forward_bytes=line(lambda run: run.forward_bytes),
        backward_bytes=line(lambda run: run.backward_bytes),
        kept_inputs=tuple(sorted({position for run in runs for position in run.kept_inputs})),
        kept_outputs=tuple(sorted({position for run in runs for position in run.kept_outputs})),
    )
