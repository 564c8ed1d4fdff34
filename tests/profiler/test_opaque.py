"""Modules that cannot be traced, called as they are."""

import random
import re
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from executor import Pipeline
from planner import plan_from_profile
from profiler import Cluster, ExecutionError, LayerSequence, Link, NotTraceableError, profile, trace
from profiler.machine.local import local_devices
from profiler.memory.in_stage import layer_memory
from profiler.observe.random_states import python_and_numpy_states
from profiler.opaque.call import Affine
from profiler.run.inputs import fake_runner, micro_batch, real_runner
from profiler.run.parameter_pool import ParameterPool
from tests.coverage.fidelity import by_one, difference, eager, run, same_bits, some_cuts
from tests.coverage.model_list import Case
from tests.executor.conftest import _plan as plan_for
from tests.torch_here import needs_lstm_in_bfloat16

CLOSE = 1e-5


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


class Gate(nn.Module):
    """Branches on data, draws random numbers, counts in a buffer, has a backward pass of its own."""

    calls: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        if x[0, 0] > 0:
            return x, {"extra": self.dropout(self.linear(x)) * scale}
        return Straight.apply(x) + self.calls, {"extra": self.linear(x.tanh())}


class Gated(nn.Module):
    """Two calls of one gate, whose weight is used once more."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.gate = Gate(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y, extra = self.gate(x)
        z, _ = self.gate(y + extra["extra"], scale=2.0)
        return self.last(functional.linear(z + x, self.gate.linear.weight))


def case(dropout: float = 0.0, rows: int = 8) -> Case:
    torch.manual_seed(0)
    model = Gated(dropout)
    return Case(model, torch.randn(rows, 8), functional.cross_entropy, torch.randint(3, (rows,)))


def traced(of: Case) -> LayerSequence:
    return trace(of.model, of.sample, keep_together=["gate"])


def test_the_error_says_what_to_do() -> None:
    with pytest.raises(NotTraceableError) as caught:
        trace(case().model, by_one("export", case().sample))
    line = Gate.forward.__code__.co_firstlineno + 2
    assert str(caught.value).startswith(
        f"cannot trace the model: in module 'gate', {__file__}:{line} \"if x[0, 0] > 0:"
    )
    assert "keep_together=['gate']" in str(caught.value)


def test_it_is_one_layer_that_computes_what_the_model_does() -> None:
    of = case()
    sequence = traced(of)
    assert sequence.sample.called_as_is == ("gate",)
    assert "called as it is: gate (" in repr(sequence)
    own = [layer for layer in sequence.layers if any("called_as_is" in name for name in layer.operations)]
    assert len(own) == 1
    assert own[0].written_buffers == (("gate.calls", "gate.calls.new"),)
    assert {"gate.linear.weight", "gate.linear.bias"} <= set(own[0].parameters)
    assert own[0].flops == 2 * 2 * 8 * 8 * 8
    for sign in (1, -1):
        of = Case(of.model, sign * of.sample, of.loss_fn, of.target)
        found = run(sequence, of)
        assert difference(found, eager(sequence, of)) <= CLOSE
        assert found.buffers["gate.calls.new" if "gate.calls.new" in found.buffers else "gate.calls"] == 2
        assert all(same_bits(run(sequence, of, cuts), found) for cuts in some_cuts(sequence))
    assert of.model.get_buffer("gate.calls") == 0


def test_a_plan_trains_it_the_same_for_every_number_of_stages() -> None:
    """The plan alone says which modules are called as they are."""
    of = case(dropout=0.3)
    known = Cluster(devices=local_devices(1).devices, link=Link(latency_s=1e-4, bytes_per_s=1e9))
    measured = profile(
        traced(of),
        known,
        sample=of.sample,
        loss_fn=of.loss_fn,
        target=of.target,
        micro_batch_sizes=[1, 2],
        time_budget_s=0,
        progress=False,
    )
    losses, gradients = [], []
    cases: list[tuple[int, Literal["never", "always"]]] = [(1, "never"), (2, "never"), (2, "always")]
    for stages, recompute in cases:
        model = case(dropout=0.3).model
        cluster = local_devices(2)
        asked: Any = {"stages": stages, "micro_batches": 8, "recompute": recompute, "schedule": "gpipe"}
        plan = plan_from_profile(measured, cluster, batch_size=8, **asked)
        pipe = Pipeline(model, plan, loss_fn=of.loss_fn, seed=1)
        losses.append(pipe.step(of.sample, target=of.target))
        gradients.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
        assert model.get_buffer("gate.calls") == 16
    assert losses[0] == losses[1] == losses[2]
    assert len(gradients[0]) == 6
    for other in gradients[1:]:
        assert all(torch.equal(other[name], gradients[0][name]) for name in gradients[0])


def test_memory_is_what_the_module_keeps() -> None:
    """On tensors without data the call keeps the bytes that it keeps on real ones."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            return self.inner(x).exp().tanh().sum(1, keepdim=True) * x

    model, x = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Linear(8, 2)), torch.randn(6, 8)
    sequence = trace(model, x)
    cpu = torch.device("cpu")
    inputs = micro_batch(sequence, x, 6, cpu)
    about: dict[str, Any] = {"loss_fn": None, "target": None, "has_loss": False, "device": cpu}
    with fake_runner(sequence, inputs, **about) as runner:
        imitated = layer_memory(sequence, runner)
    real = layer_memory(sequence, real_runner(sequence, ParameterPool(sequence, cpu), inputs, **about))
    assert [entry.kept_bytes for entry in imitated] == [entry.kept_bytes for entry in real]
    assert all(a.transient_bytes >= b.transient_bytes for a, b in zip(imitated, real, strict=True))
    assert sum(entry.kept_bytes for entry in imitated) >= 2 * 6 * 64 * 4


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), inner
        self.last: nn.Module = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class OwnBackward(Inner):
    """Of another branch for other data, so that it cannot be traced by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.linear(x)) if x.sum() < 1e9 else x


class GradientInside(Inner):
    """Runs a backward pass in the midst of its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.enable_grad():
            leaf = x if x.requires_grad else x.detach().requires_grad_()
            return x + torch.autograd.grad(leaf.tanh().sum(), leaf, create_graph=True)[0]


class Hook(Inner):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: -gradient)
        return x


class DataDependentShape(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[x > 0].sum()


@pytest.mark.parametrize("kind", [OwnBackward, GradientInside, Hook, DataDependentShape])
def test_what_a_graph_would_lose_is_kept(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Around(kind()), torch.randn(5, 8)
    of = Case(model, x, functional.mse_loss, torch.randn(5, 2))
    with pytest.raises(NotTraceableError, match=r"keep_together=\['inner'\]"):
        trace(model, by_one("export", x))
    sequence = trace(model, x, keep_together=["inner"])
    found = run(sequence, of)
    assert difference(found, eager(sequence, of)) <= CLOSE
    assert all(same_bits(run(sequence, of, cuts), found) for cuts in some_cuts(sequence))


class PythonCounter(Inner):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count if x.sum() > 0 else x


class WritesItsInput(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.sum() else x


class FreesItsInput(Inner):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() * len([float(value) for value in x[:, 0].detach()])
        x.untyped_storage().resize_(0)
        return y


class Reentrant(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True) if x.sum() else x


class Normalized(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x.sum() else x


class ShapeOfData(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class ReplacedByAnother(Inner):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * (1 + self.steps)
        self.steps = self.steps + 0.5
        return x


class NeedsWords(Inner):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum():
            raise ValueError("no words")
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PythonCounter, "changes its attribute 'count'"),
        (WritesItsInput, "writes one of its arguments in place"),
        (Reentrant, "use_reentrant=False"),
        (FreesItsInput, "frees the memory of an argument"),
        (Normalized, "its norm normalization moves running statistics in a way of its own"),
        (ShapeOfData, "the shape of what it returns depends on data"),
        (ReplacedByAnother, "torch.float32 in the place of its buffer 'steps', of torch.int64"),
        (NeedsWords, "fails on made-up tensors .ValueError: no words."),
    ],
)
def test_what_no_layer_may_do_is_refused(kind: type[nn.Module], message: str) -> None:
    torch.manual_seed(0)
    model = Around(kind())
    with pytest.raises(NotTraceableError, match=message):
        trace(model, by_one("export", torch.randn(4, 8), keep_together=["inner"]))


def test_a_buffer_that_changes_its_type_is_no_cache() -> None:
    """The proof that a call leaves nothing behind put 0.5 back into whole numbers, and found the same results."""
    with pytest.raises(NotTraceableError, match="puts another tensor in the place of its buffer 'steps'"):
        trace(Around(ReplacedByAnother()), torch.randn(4, 8))


class Packed(nn.Module):
    """Packs by lengths that the model takes as an input."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.batch_first = nn.LSTM(8, 8, batch_first=batch_first), batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        steps = x.shape[1 if self.batch_first else 0]
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=self.batch_first, total_length=steps)
        return x if self.batch_first else x.transpose(0, 1)


class Aligned(nn.Module):
    """A loss of alignments: lengths in it may not exceed the targets."""

    def forward(self, scores: Tensor, lengths: Tensor) -> Tensor:
        targets = torch.ones(len(scores), 2, dtype=torch.int64)
        counts = lengths.clamp(max=2)
        probabilities = scores.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(probabilities, targets, lengths, counts, zero_infinity=True)


class WithLengths(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first, self.packed, self.last = nn.Linear(8, 8), Packed(batch_first), nn.Linear(8, 4)
        self.aligned = Aligned()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.aligned(self.last(self.packed(torch.tanh(self.first(x)), lengths)), lengths)


@pytest.mark.parametrize("batch_first", [True, False])
def test_lengths_are_those_of_whole_sequences(batch_first: bool) -> None:
    """Lengths of 0, which packing refuses, were all that was tried; of 1 the layer would cost a step alone."""
    torch.manual_seed(0)
    model, steps = WithLengths(batch_first), 7
    sample = (torch.randn(5, steps, 8), torch.tensor([7, 3, 7, 1, 5]))
    sequence = trace(model, sample, keep_together=["packed", "aligned"])
    (layer,) = [layer for layer in sequence.layers if layer.name == "packed"]
    assert layer.flops >= 5 * steps * 2 * (8 * 32 + 8 * 32)
    of = Case(model, sample)
    found = run(sequence, of)
    assert difference(found, eager(sequence, of)) <= CLOSE
    assert all(same_bits(run(sequence, of, cuts), found) for cuts in some_cuts(sequence))


class ComplexOut(Inner):
    def forward(self, x: Tensor) -> Tensor:
        assert [float(value) for value in x[:, 0].detach()]
        return torch.complex(self.linear(x), x)


class OfComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), ComplexOut(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)).abs())


def test_complex_numbers_carry_gradients() -> None:
    """Where a stage ended after a module that returns such, those before it had no gradient, without a word."""
    torch.manual_seed(0)
    case = Case(OfComplex(), torch.randn(4, 8), nn.functional.mse_loss, torch.zeros(4, 2))
    sequence = trace(case.model, case.sample)
    assert list(sequence.sample.called_as_is) == ["inner"]
    expected = eager(sequence, case)
    for cuts in some_cuts(sequence):
        assert difference(run(sequence, case, cuts), expected) <= 1e-6, cuts


class Counting(Inner):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count if [float(value) for value in x[:, 0].detach()] else x


@pytest.mark.parametrize("keep_together", [(), ("inner",)])
def test_both_reasons_are_told(keep_together: tuple[str, ...]) -> None:
    """Why a module cannot be traced was not told where it could not be called either; one of them is to be mended."""
    with pytest.raises(NotTraceableError) as caught:
        trace(Around(Counting()), torch.randn(4, 8), keep_together=keep_together)
    message = str(caught.value)
    assert "module 'inner' is to be called as it is, for it cannot be traced, and it changes its attribute" in message
    assert re.search(r"in module 'inner', .*test_opaque\.py:\d+ .*branches on the values of a tensor", message)
    assert message.count("cannot trace the model: ") == 1


class WritesItsParameter(Inner):
    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data, self.scale = through_data, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        shown = [float(value) for value in x[:, 0].detach()]
        with torch.no_grad():
            (self.scale.data if self.through_data else self.scale).mul_(2)
        return self.linear(x) * self.scale + len(shown)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize(
    ("keep_together", "message"), [((), "branches on the values"), (("inner",), "writes its parameter 'scale'")]
)
def test_what_is_refused_is_left_as_it_was(through_data: bool, keep_together: tuple[str, ...], message: str) -> None:
    """The rehearsal ran on the memory of the user's own parameters, which a refusal left as it had written them."""
    model = Around(WritesItsParameter(through_data))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NotTraceableError, match=message):
        trace(model, torch.randn(4, 8), keep_together=keep_together)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_meta_device_has_nothing_to_run() -> None:
    with torch.device("meta"):
        model = Around(DataDependentShape())
    with pytest.raises(NotTraceableError, match="materialize the model first"):
        trace(model, torch.randn(4, 8), keep_together=["inner"])


class LayerDrop(Inner):
    """Its own layer, or none, as one of these generators says."""

    def __init__(self, generator: str) -> None:
        super().__init__()
        self.own: Any = {"own": random.Random(3), "own of numpy": np.random.default_rng(3)}.get(generator)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if self.own is not None:
            chance = self.own.random()
        else:
            chance = random.random() if self.generator == "python" else np.random.random()
        return x if chance < 0.3 else x + chance * self.linear(x).tanh()


@pytest.mark.parametrize("generator", ["python", "numpy", "own", "own of numpy"])
def test_random_numbers_of_python_and_numpy_are_those_of_the_layer(
    generator: str,
) -> None:
    """They were refused: a recomputed pass would have drawn others, and so would another number of stages."""
    torch.manual_seed(0)
    model, x, target = Around(LayerDrop(generator)), torch.randn(12, 8), torch.randn(12, 2)
    sequence = trace(model, x, keep_together=["inner"])
    opaque = next(layer.index for layer in sequence.layers if any("called" in name for name in layer.operations))
    assert sequence.layers[opaque].flops == 2 * 12 * 8 * 8  # not those of a draw that drops it
    before = python_and_numpy_states()
    found = []
    for cuts, again in (((), False), ((opaque,), False), ((opaque,), True), ((opaque, opaque + 1), True)):
        model.zero_grad()
        plan = plan_for(sequence, cuts, batch_size=12, micro_batches=6, recompute=again)
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, seed=1)
        losses = [pipe.step(x, target=target).item() for _ in range(2)]
        found.append((losses, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]))
    assert len(found[0][1]) == 6
    assert found[0][0][0] != found[0][0][1]
    for losses, gradients in found[1:]:
        assert losses == found[0][0]
        assert all(map(torch.equal, gradients, found[0][1]))
    assert python_and_numpy_states() == before


class ShapeOfDraw(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : random.randint(1, 8)] if x.sum() else x


def test_shapes_do_not_depend_on_draws() -> None:
    model = Around(ShapeOfDraw())
    model.last = nn.AdaptiveAvgPool1d(2)  # takes any width, so that the model itself does not fail
    with pytest.raises(NotTraceableError, match="depend on the random numbers that it draws"):
        trace(model, torch.randn(4, 8), keep_together=["inner"])


class DrawsOfLargeNumbers(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() if x.abs().max() > 100 else self.linear(x)


def test_a_draw_that_was_not_seen_is_an_error() -> None:
    model = Around(DrawsOfLargeNumbers())
    sequence = trace(model, torch.randn(4, 8), keep_together=["inner"])
    of = Case(model, 1e4 * torch.ones(4, 8), functional.mse_loss, torch.randn(4, 2))
    with pytest.raises(ExecutionError, match="random generator, and did not when traced"):
        run(sequence, of)


class Surprise(Inner):
    """Does on large numbers what it does not on the made-up ones."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            return x[:, :4]
        return self.linear(x)


def test_a_surprise_is_an_error() -> None:
    class Wide(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) + self.inner(x))

    model = Wide(Surprise())
    sequence = trace(model, torch.randn(4, 8), keep_together=["inner"])
    of = Case(model, 1000 * torch.ones(4, 8), functional.mse_loss, torch.randn(4, 2))
    with pytest.raises(ExecutionError, match=re.escape("returns [4, 4] of torch.float32 for 4 samples")):
        run(sequence, of)


def test_a_write_to_what_may_be_shared_is_refused() -> None:
    class Writes(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.inner(x)
            y = y.add_(1)
            return self.last(x + y)

    with pytest.raises(NotTraceableError, match="may be the same memory"):
        trace(Writes(DataDependentShape()), torch.randn(4, 8), keep_together=["inner"])


def test_lines_go_through_both_points() -> None:
    assert Affine.through((2, 3), (10, 14)).at(7) == 30
    assert Affine.through((4,), (9,)).at(4) == 9
    assert Affine.through((2, 3), (10, 14)).size_for(30) == 7


class Packs(nn.Module):
    """Runs an LSTM on packed sequences, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        found, _ = self.net(pack_padded_sequence(x, lengths, batch_first=True))
        padded: Tensor = pad_packed_sequence(found, batch_first=True)[0]
        return padded


class InARegion(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.inner = inner
        self.leave = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        with torch.autocast("cpu", torch.bfloat16):
            x = self.inner(x)
        found: Tensor = self.leave(torch.tanh(x).float().mean(1))
        return found


@needs_lstm_in_bfloat16
def test_a_rehearsal_may_use_the_libraries_of_training() -> None:
    """An export switches oneDNN off, and an LSTM under autocast returned float32 there and bfloat16 in training."""
    torch.manual_seed(0)
    model, x = InARegion(Packs()), torch.randn(8, 4, 8)
    enabled = torch.backends.mkldnn.enabled
    sequence = trace(model, x[:2], keep_together=["inner"])
    assert torch.backends.mkldnn.enabled == enabled
    returned = next(
        value.dtype
        for values, layer in zip(sequence.boundaries[1:], sequence.layers, strict=True)
        for value in values
        if "inner" in layer.module_paths and value.producer == layer.index
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert returned == model.inner(x).dtype
    whole: list[Tensor] = []
    for cuts in ([], *([cut] for cut in range(1, len(sequence)))):
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=4)
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
        loss = pipe.step(x, target=torch.zeros(8, 8))
        found = [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        whole = whole or found
        assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
        model.zero_grad()


class Widens(nn.Module):
    """Returns another type once it is told so."""

    dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if bool(x.isfinite().all()) else x


def test_a_result_of_another_type_is_named() -> None:
    """It was to "give it results of one shape"."""
    model = nn.Sequential(nn.Linear(8, 8), Widens(), nn.Linear(8, 8))
    x = torch.randn(8, 8)
    pipe = Pipeline(
        model,
        plan_for(trace(model, x, keep_together=["1"]), [1], batch_size=8, micro_batches=4),
        loss_fn=functional.mse_loss,
        compare_first_step=False,
    )
    setattr(model[1], "dtype", torch.float64)  # noqa: B010 - of nn.Module mypy thinks that it holds tensors
    with pytest.raises(ExecutionError, match=r"torch.float64 .* torch.float32; give it results of one dtype$"):
        pipe.step(x, target=x)
