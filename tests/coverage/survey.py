"""Tries every model that `survey_models` names and prints what came of each: `make survey`.

A model is one of three: faithful (any cut the same in every bit, and what the eager model computes, from the batch and
from one sample of it), refused by an error that says where, why and what to do, or wrong: unfaithful, or ended by an
error that is not ours. What does not train as it is, without us, is not counted.

It takes an hour or two, so each row is kept in a file as it comes, and a survey goes on where the last one ended.
"""

import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from profiler import LayerSequence, NotTraceableError, trace
from profiler.run.loss import loss_of
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.tracing.sample import call_arguments
from tests.coverage.fidelity import eager, eager_difference, run, same_bits, some_cuts
from tests.coverage.model_list import Case
from tests.coverage.rows import Row, known_rows
from tests.coverage.survey_models import Candidate, candidates
from tests.coverage.table import machine

CLOSE = 1e-5
CLOSE_IN_FLOAT64 = 1e-9  # where float32 rounds too much, as batch normalization over a handful of values does
SECONDS_AT_MOST = 240


EAGER_IS_WRONG = "eager gradients are wrong by finite differences, the layers' right"
STRIDE = 1e-6  # of finite differences in float64; a kink of ReLU within it shows
STEEP = 1e-4  # by which slopes may differ, relative


class Outcome(StrEnum):
    """What came of a model."""

    FAITHFUL = "faithful"
    REFUSED = "refused"
    WRONG = "**wrong**"
    UNTRAINABLE = "does not train"


def tried(candidate: Candidate) -> Row:
    """Build a model, train it as it is, trace it, and compare."""
    return Row(candidate.library, candidate.name, *_outcome(candidate))


def _outcome(candidate: Candidate) -> tuple[Outcome, str, float]:
    """What came of it, why, and the seconds of the trace."""
    try:
        with limit(SECONDS_AT_MOST):
            case = candidate.build()
            trains(case)
    except Exception as problem:
        return Outcome.UNTRAINABLE, first_line(problem), 0.0
    start = time.perf_counter()
    try:
        with limit(SECONDS_AT_MOST):
            sequence = trace(case.model, case.sample)
            seconds = time.perf_counter() - start
            whole = run(sequence, case)
            unlike = [cuts for cuts in some_cuts(sequence)[:2] if not same_bits(run(sequence, case, cuts), whole)]
            if unlike:
                return Outcome.WRONG, f"differs when cut at {unlike[0]}", seconds
            outcome, detail = compared(sequence, case, candidate)
        return outcome, detail, seconds
    except NotTraceableError as problem:
        outcome = Outcome.REFUSED if says_where_and_what_to_do(str(problem)) else Outcome.WRONG
        return outcome, without_folders(first_line(problem)), time.perf_counter() - start
    except Exception as problem:
        return Outcome.WRONG, f"{type(problem).__name__}: {first_line(problem)}", 0.0


def compared(sequence: LayerSequence, case: Case, candidate: Candidate) -> tuple[Outcome, str]:
    """Whether the layers compute what the model itself does, and how far they are apart."""
    apart = apart_from_eager(sequence, case)
    if max(apart.values()) > CLOSE:
        case = in_float64(candidate)
        sequence = trace(case.model, case.sample)
        apart = apart_from_eager(sequence, case)
        if max(apart.values()) > (CLOSE if computes_in_float32(sequence) else CLOSE_IN_FLOAT64):
            unlike = [size for size, value in apart.items() if value > CLOSE_IN_FLOAT64]
            if not all(slopes(sequence, case, size) for size in unlike):
                return Outcome.WRONG, f"{text(apart)} in float64"
            return Outcome.FAITHFUL, f"{sequence.sample.front_end}, {text(apart)}: {EAGER_IS_WRONG}"
    return Outcome.FAITHFUL, f"{sequence.sample.front_end}, {text(apart)}"


def text(apart: Mapping[int, float]) -> str:
    """Differences from the eager model by batch size."""
    return "apart " + ", ".join(f"{value:.0e} at {size}" if value else f"0 at {size}" for size, value in apart.items())


def trains(case: Case) -> None:
    """One forward and backward pass of the model as it is.

    Raises:
        ValueError: no finite loss comes of it.
    """
    args, kwargs = call_arguments(case.sample)
    loss = loss_of(case.model(*args, **kwargs), case.target, case.loss_fn)
    loss.backward()
    case.model.zero_grad()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")


def apart_from_eager(sequence: LayerSequence, case: Case) -> dict[int, float]:
    """How far the layers are from the model itself, by batch size: the sample's and, if they run at any, 1."""
    apart = {sequence.sample.batch_size: eager_difference(sequence, case)}
    if sequence.sample.only_micro_batch_size is None:
        one = first_sample(case, sequence.sample)
        with contextlib.suppress(ValueError):  # batch normalization refuses a single value
            trains(one)
            apart[1] = eager_difference(sequence, one)
    return apart


def computes_in_float32(sequence: LayerSequence) -> bool:
    """Whether a model in float64 converts values on its way, and so rounds all the same."""
    return any(
        kind in operation
        for layer in sequence.layers
        for operation in layer.operations
        for kind in ("aten.to.", "_to_copy", "autocast")
    )


def slopes(sequence: LayerSequence, case: Case, size: int) -> bool:
    """Whether the layers' gradients are right where the model's own are not, by finite differences of the model's loss.

    Kernels of torch go wrong for some memory layouts of a gradient; which one they meet is not the same in layers.
    """
    sized = case if size == sequence.sample.batch_size else first_sample(case, sequence.sample)
    torch.manual_seed(1)
    expected = eager(sequence, sized).gradients
    torch.manual_seed(1)
    found = run(sequence, sized, seeded=False).gradients
    named = {name: parameter for name, parameter in sequence.parameters.items() if name in found}
    worst = max(named, key=lambda name: float((found[name] - expected[name]).abs().max()))
    direction = found[worst] - expected[worst]
    direction = direction / direction.norm()
    losses = [_loss_beside(sequence, sized, named[worst], step * direction) for step in (STRIDE, -STRIDE)]
    true = (losses[0] - losses[1]) / (2 * STRIDE)
    ours, theirs = (float((gradients[worst] * direction).sum()) for gradients in (found, expected))
    return abs(ours - true) <= STEEP * abs(true) < abs(theirs - true)


def _loss_beside(sequence: LayerSequence, case: Case, parameter: torch.nn.Parameter, step: torch.Tensor) -> float:
    """The model's own loss with a parameter moved by `step`."""
    before = parameter.detach().clone()
    torch.manual_seed(1)
    with torch.no_grad():
        parameter.add_(step)
    loss = float(eager(sequence, case).loss)
    with torch.no_grad():
        parameter.copy_(before)
    return loss


def first_sample(case: Case, spec: SampleSpec) -> Case:
    """The same model with a batch of one."""
    leaves, tree = pytree.tree_flatten(call_arguments(case.sample))
    parts = [
        leaf.narrow(described.batch_dim, 0, 1)
        if isinstance(described, TensorLeaf) and described.batch_dim is not None
        else leaf
        for leaf, described in zip(leaves, spec.leaves, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(parts, tree)
    target = None if case.target is None else case.target[:1]
    return replace(case, sample=kwargs or args, target=target)


def in_float64(candidate: Candidate) -> Case:
    """The model and its batch where rounding plays no part."""
    case = candidate.build()
    sample = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, case.sample)
    choose_experts = getattr(case.model, "set_experts_implementation", None)  # of transformers
    if choose_experts is not None:  # torch's grouped product knows no float64
        choose_experts("eager")
    return replace(case, model=case.model.double(), sample=sample)


def says_where_and_what_to_do(message: str) -> bool:
    """Whether an error names a module, a line of source and a next step."""
    return bool(re.search(r"in (module '|the model).*\.py:\d+.*; ", message)) and "\n" not in message


def without_folders(message: str) -> str:
    """The message with the names of files in place of their paths."""
    return re.sub(r"/\S*/(\S+\.py:)", r"\1", message)


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message, or its kind."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """End what takes longer with a `TimeoutError`."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def main(path: Path, names: Sequence[str]) -> None:
    """Try every model, or those whose name or library is among `names`, and print the table of all that are known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = known_rows(path, Outcome)
    for candidate in tqdm(list(candidates()), disable=None):
        wanted = not names or {candidate.library, candidate.name} & set(names)
        if wanted and (candidate.library, candidate.name) not in known:
            row = tried(candidate)
            known[row.library, row.name] = row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(f"`make survey`, {datetime.datetime.now(datetime.UTC).date()}: {machine()};")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {', '.join(versions())}.\n")
    print_sums(known.values())
    print("\n| library | model | outcome | trace | detail |\n|---|---|---|---:|---|")
    for row in known.values():
        print(row)


def versions() -> list[str]:
    """Of the libraries whose models are tried."""
    return [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "timm", "torchvision")]


def print_sums(rows: Iterable[Row]) -> None:
    """One row a library: how many models ended how."""
    counts = Counter((row.library, row.outcome) for row in rows)
    print(f"| library | {' | '.join(Outcome)} | faithful or refused, of those that train |\n|---|{'---:|' * 5}")
    for library in dict.fromkeys(library for library, _ in counts):
        found = [counts[library, outcome] for outcome in Outcome]
        good, trained = found[0] + found[1], sum(found[:3])
        print(f"| {library} | {' | '.join(map(str, found))} | {good / max(trained, 1):.1%} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
