"""Which way to a graph serves, why the earlier ones did not, and that each is faithful."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from executor import Pipeline
from planner import autoplan
from profiler import ArgumentError, LayerSequence, NotTraceableError, profile, trace
from profiler.sample_spec import FRONT_ENDS, FrontEnd, SampleSpec
from profiler.tracing.export import Asking
from profiler.tracing.front_ends import Traced, exported
from tests.coverage.fidelity import by_one, difference, eager, run, same_bits, some_cuts
from tests.coverage.model_list import Case

CLOSE = 1e-5


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def faithful(sequence: LayerSequence, of: Case) -> bool:
    found = run(sequence, of)
    close = difference(found, eager(sequence, of)) <= CLOSE
    return close and all(same_bits(run(sequence, of, cuts), found) for cuts in some_cuts(sequence))


def labelled(model: nn.Module, rows: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(model, torch.randn(rows, 8), functional.cross_entropy, torch.randint(3, (rows,)))


class BatchSizeInPython(nn.Module):
    """Its batch extent becomes a Python number, so a graph has it as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.tanh(x) / int(x.shape[0]))


def test_static_shapes_serve_for_one_micro_batch_size() -> None:
    of = labelled(BatchSizeInPython())
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "static export"
    assert list(sequence.refusals) == ["export"]
    assert "int(x.shape[0])" in sequence.refusals["export"]
    assert sequence.sample.only_micro_batch_size == 4
    assert "static export for micro-batches of 4" in repr(sequence)
    assert faithful(sequence, of)
    with pytest.raises(ArgumentError, match=r"batch of 10 cannot .* multiple of 4"):
        profile(sequence, 1, batch_size=10)
    with pytest.raises(ArgumentError, match=r"micro-batches of 4 samples, and micro_batch_sizes holds 2"):
        profile(sequence, 1, batch_size=16, micro_batch_sizes=[2])


def test_a_plan_for_static_shapes_uses_that_size() -> None:
    of = labelled(BatchSizeInPython(), rows=2)
    plan = autoplan(
        of.model, of.sample, 1, batch_size=8, loss_fn=of.loss_fn, target=of.target, time_budget_s=0, progress=False
    )
    assert plan.micro_batch_sizes == (2, 2, 2, 2)
    pipe = Pipeline(of.model, plan, loss_fn=of.loss_fn)
    whole = labelled(of.model, rows=8)
    parts = [(whole.sample[i : i + 2], whole.target[i : i + 2]) for i in range(0, 8, 2)]  # type: ignore[index]
    expected = torch.stack([functional.cross_entropy(of.model(x), y) for x, y in parts]).mean()
    assert torch.allclose(pipe.step(whole.sample, target=whole.target).float(), expected)
    assert pipe.plan == plan
    with pytest.raises(ArgumentError, match=r"batch has 5 samples, .* micro-batches of 2; pass a multiple of 2"):
        pipe.step(whole.sample[:5], target=whole.target[:5])  # type: ignore[index]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_branch_on_the_batch_size_is_for_that_size(rows: int) -> None:
    class BranchOnBatch(BatchSizeInPython):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x * 2 if x.shape[0] > 2 else x.tanh())

    of = labelled(BranchOnBatch(), rows)
    sequence = trace(of.model, of.sample)
    assert sequence.sample.only_micro_batch_size == rows
    assert "make it independent of the batch size" in sequence.refusals["export"] or rows > 1
    assert faithful(sequence, of)


@fx.wrap
def halved(x: Tensor) -> Tensor:
    return x / 2 if x.sum() > 0 else x


class Wrapped(nn.Module):
    """What symbolic_trace does not look into: a wrapped function and a module of torch.nn that branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4])

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.first(x))
        x = x.view(x.shape[0], 2, -1).flatten(1)
        return {"loss": self.loss(self.last(halved(x)), y).loss}


def test_symbolic_trace_calls_what_it_does_not_look_into() -> None:
    torch.manual_seed(0)
    of = Case(Wrapped(), {"x": torch.randn(6, 8), "y": torch.randint(12, (6,))})
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "symbolic_trace"
    assert list(sequence.refusals) == ["export", "static export"]
    assert set(sequence.sample.called_as_is) == {"halved", "loss"}
    assert {"first.weight", "norm.weight", "loss.head.weight"} <= sequence.parameters.keys()
    assert [entry.running_mean for layer in sequence.layers for entry in layer.statistics] == ["norm.running_mean"]
    assert faithful(sequence, of)
    again = trace(of.model, sequence.sample)
    assert again.fingerprint == sequence.fingerprint


class WithOptions(Wrapped):
    def forward(self, x: Tensor, y: Tensor, *, mask: Tensor | None = None, doubled: bool = False) -> dict[str, Tensor]:
        found = super().forward(x if mask is None else x * mask, y)
        return {"loss": found["loss"] * (2 if doubled else 1)}


def test_constants_by_keyword_are_no_other_names() -> None:
    """They get numbers in the graph of symbolic_trace: the model was said not to be called with the sample."""
    torch.manual_seed(0)
    sample = {"x": torch.randn(6, 8), "y": torch.randint(12, (6,)), "mask": None, "doubled": True}
    of = Case(WithOptions(), sample)
    assert faithful(trace(of.model, of.sample), of)


class WithoutGradient(Wrapped):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            x = self.first(x)
        return {"loss": self.loss(halved(x), y).loss}


class FrozenNoise(Wrapped):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(halved(self.first(x) + torch.randn(8)), y).loss}


class WrittenConstant(Wrapped):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        sums = torch.zeros(8)
        sums += halved(self.first(x)).mean(0)
        return {"loss": self.loss(x + sums, y).loss}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutGradient, "would lose a region without gradient"),
        (FrozenNoise, "would freeze random numbers"),
        (WrittenConstant, "the forward pass (writes|changes) "),
    ],
)
def test_what_symbolic_trace_would_lose_is_refused(kind: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(NotTraceableError, match=message):
        trace(kind(), by_one("symbolic_trace", {"x": torch.randn(6, 8), "y": torch.randint(12, (6,))}))


class Called(nn.Sequential):
    """Has something after it that its class does when it is called, and something that it holds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.gain = nn.Parameter(torch.full((3,), 2.0))

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = super().__call__(x)
        return logits * 3


def of_its_graph() -> nn.Module:
    return fx.symbolic_trace(Called())


def after(model: nn.Module, gives: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    model.register_forward_hook(lambda called, _, logits: gives(called, logits))
    return model


def before(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    return model


def with_gain(model: Called) -> nn.Module:
    """Its hook knows the model from elsewhere, and reads what its forward pass does not."""
    return after(model, lambda _, logits: logits * model.gain)


@pytest.mark.parametrize("front_end", ["export", "symbolic_trace"])
@pytest.mark.parametrize(
    "kind",
    [
        Called,
        lambda: before(Called()),
        lambda: after(Called(), lambda called, logits: logits * called.gain.abs()),
        lambda: with_gain(Called()),
        lambda: before(of_its_graph()),
        lambda: after(of_its_graph(), lambda _, logits: logits * 3),
    ],
)
def test_a_model_is_called_as_torch_calls_it(front_end: str, kind: Callable[[], nn.Module]) -> None:
    """`symbolic_trace` follows the forward of the class alone, and export ran a model's graph without its hooks."""
    of = labelled(kind())
    sequence = trace(of.model, by_one(front_end, of.sample))
    assert difference(run(sequence, of), eager(sequence, of)) <= CLOSE
    assert "forward" not in vars(of.model)
    assert isinstance(of.model, fx.GraphModule | Called)


def test_symbolic_trace_declines_a_forward_of_the_models_own() -> None:
    model = nn.Linear(8, 3)
    vars(model)["forward"] = lambda x: nn.Linear.forward(model, x) * 3
    with pytest.raises(NotTraceableError, match="lose the forward that was set on the model itself"):
        trace(model, by_one("symbolic_trace", torch.randn(4, 8)))


def test_children_of_a_sequential_are_called_as_they_are() -> None:
    of = labelled(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), Gate()), nn.Linear(8, 3)))
    with pytest.raises(NotTraceableError, match="control flow"):
        trace(of.model, by_one("symbolic_trace", of.sample))
    sequence = trace(of.model, by_one("children", of.sample))
    assert sequence.sample.front_end == "children"
    assert sequence.sample.called_as_is == ("1.1",)
    assert faithful(sequence, of)


def test_export_serves_where_it_can() -> None:
    sequence = trace(nn.Linear(8, 3), torch.randn(4, 8))
    assert (sequence.sample.front_end, dict(sequence.refusals)) == ("export", {})


class BranchOnOne(BatchSizeInPython):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * 2 if x.shape[0] == 1 else x.tanh())


class NoBranchInEffect(BatchSizeInPython):
    """Expands to an extent that one sample has already."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(8, device=x.device).unsqueeze(0)
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        return self.last(self.first(x) + places)


def test_a_branch_on_a_single_sample_is_noticed() -> None:
    """`torch.export` takes for granted that an extent is not 1, and says nothing."""
    of = labelled(BranchOnOne())
    sequence = trace(of.model, of.sample)
    line = BranchOnOne.forward.__code__.co_firstlineno + 2
    assert f"test_front_ends.py:{line}" in sequence.refusals["export"]
    assert "another path for a batch of one sample" in sequence.refusals["export"]
    assert sequence.sample.only_micro_batch_size == 4
    assert faithful(sequence, of)


def test_a_branch_that_changes_nothing_is_none() -> None:
    of = labelled(NoBranchInEffect())
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "export"
    one = Case(of.model, of.sample[:1], of.loss_fn, of.target[:1])  # type: ignore[index]
    assert difference(run(sequence, one), eager(sequence, one)) <= CLOSE


class Counts(BatchSizeInPython):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x) / self.calls)


class Caches(BatchSizeInPython):
    """Remembers what every call makes anew and the same."""

    length = 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = max(self.length, x.shape[1])
        return self.last(self.first(x))


def test_a_python_counter_is_refused() -> None:
    model = Counts()
    with pytest.raises(NotTraceableError, match=r"Python attribute 'calls'.*register_buffer\('calls'"):
        trace(model, torch.randn(4, 8))
    assert model.calls == 0


def test_a_python_cache_is_harmless() -> None:
    assert trace(Caches(), torch.randn(4, 8)).sample.front_end == "export"


class Recurrent(BatchSizeInPython):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x).unsqueeze(1))[0][:, 0])


def test_a_recurrent_model_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM keeps a list of its parameters, which export replaces: that is no attribute that the model changes."""
    export = mock.Mock(wraps=torch.export.export)
    monkeypatch.setattr(torch.export, "export", export)
    of = labelled(Recurrent())
    sequence = trace(of.model, of.sample)
    assert export.call_count == 1
    assert faithful(sequence, of)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.linspace(1, 2, 5).unsqueeze(-1)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        return self.last(self.encoder(x, mask=mask)[:, -1] * scale)


def test_an_encoder_with_a_mask_has_a_dynamic_batch() -> None:
    torch.manual_seed(0)
    sample = {"x": torch.randn(4, 8), "scale": torch.randn(4, 1)}
    of = Case(Encoder(), sample, functional.cross_entropy, torch.randint(3, (4,)))
    sequence = trace(of.model, sample)
    assert (sequence.sample.front_end, dict(sequence.refusals)) == ("export", {})
    assert difference(run(sequence, of), eager(sequence, of)) <= CLOSE


class ForwardToTrace(nn.Linear):
    """Branches on its values, and says how it would be without."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.detach().numpy().sum() > 0 else 1)

    def without_branch(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def traced_without_branch(model: nn.Module, spec: SampleSpec, training: bool, ask: Asking) -> Traced:
    with mock.patch.object(ForwardToTrace, "forward", ForwardToTrace.without_branch):
        return exported(model, spec, training, ())


def test_a_new_front_end_is_a_function_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    others = list(FRONT_ENDS)
    monkeypatch.setitem(FRONT_ENDS, "own", FrontEnd(__name__, "traced_without_branch", any_size=False))
    sequence = trace(ForwardToTrace(8, 8), torch.randn(4, 8))
    assert list(sequence.refusals) == others
    assert (sequence.sample.front_end, sequence.sample.only_micro_batch_size) == ("own", 4)
    assert trace(ForwardToTrace(8, 8), sequence.sample).fingerprint == sequence.fingerprint


class OwnGenerator(BatchSizeInPython):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + torch.rand(4, 8, generator=self.generator))


def test_a_generator_of_its_own_is_refused() -> None:
    with pytest.raises(NotTraceableError, match=r"test_front_ends\.py:\d+ .*torch\.Generator of the model's own"):
        trace(OwnGenerator(), torch.randn(4, 8))
    model = nn.Sequential(OwnGenerator(), nn.Linear(3, 3))
    if torch.__version__.startswith("2.11"):  # which cannot have it in a graph, so the module is called as it is
        sequence = trace(model, torch.randn(4, 8), keep_together=["0"])
        assert sequence.layers[0].operations[0].startswith("called_as_is")
        return
    with pytest.raises(NotTraceableError):
        trace(model, torch.randn(4, 8), keep_together=["0"])


class AnyKeyword(BatchSizeInPython):
    def forward(self, x: Tensor, **more: Tensor | bool) -> Tensor:
        x = self.first(x) * more["scale"]
        return self.last(x.tanh() if more.get("bent") else x)


def test_arguments_that_forward_does_not_name_have_a_dynamic_batch() -> None:
    sample = {"x": torch.randn(4, 8), "scale": torch.randn(4, 1), "bent": True}
    of = Case(AnyKeyword(), sample, functional.cross_entropy, torch.randint(3, (4,)))
    sequence = trace(of.model, sample)
    assert (sequence.sample.front_end, dict(sequence.refusals)) == ("export", {})
    assert "forward" not in of.model.__dict__
    assert faithful(sequence, of)


class LargeBatches(BatchSizeInPython):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * 2 if x.shape[0] > 3 else x.tanh())


def test_a_limit_on_the_batch_names_the_line() -> None:
    sequence = trace(LargeBatches(), torch.randn(4, 8))
    line = LargeBatches.forward.__code__.co_firstlineno + 2
    assert f"test_front_ends.py:{line}" in sequence.refusals["export"]


class HoldsPart(nn.Module):
    """Calls a part that it is given."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("around", "keep_together", "named"),
    [
        (lambda part: nn.Sequential(nn.Linear(4, 4), part), (), "module '1' is scripted"),
        (HoldsPart, ("part",), "module 'part' is scripted"),
        (lambda part: part, (), "it is scripted"),
    ],
)
def test_a_scripted_module_that_cannot_be_followed_is_named(
    around: Callable[[nn.Module], nn.Module], keep_together: tuple[str, ...], named: str
) -> None:
    part: nn.Module = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(NotTraceableError, match=named) as caught:
        trace(around(part), torch.randn(4, 4), keep_together=keep_together)
    assert "plan and train with the module that was scripted" in str(caught.value)


class Casts(BatchSizeInPython):
    """Casts a submodule to the dtype that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first.to(torch.float32)(x))


def test_a_cast_that_changes_nothing_is_none() -> None:
    of = labelled(Casts())
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "export"
    assert faithful(sequence, of)


class FourRows(BatchSizeInPython):
    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.rows)


def test_an_operation_that_fixes_the_batch_is_named_by_line() -> None:
    sequence = trace(FourRows(), torch.randn(4, 8))
    line = FourRows.forward.__code__.co_firstlineno + 1
    assert f"test_front_ends.py:{line}" in sequence.refusals["export"]
    assert "fixes the batch extent" in sequence.refusals["export"]


class Conditional(BatchSizeInPython):
    """Which of its two branches is taken depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cond(x.sum() > 0, lambda y: self.middle(y).sin(), lambda y: y.cos(), (x,))
        return self.last(x)


# Of torch.cond itself, when the model is called.
LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"


@pytest.mark.filterwarnings(LEAF)
def test_a_condition_in_the_graph_is_traced_with_both_branches() -> None:
    of = labelled(Conditional())
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "export"
    assert sum(layer.flops for layer in sequence.layers) == 2 * 4 * 8 * (8 + 8 + 3)
    assert faithful(sequence, of)
    negative = Case(of.model, -of.sample, of.loss_fn, of.target)
    assert faithful(sequence, negative)


@pytest.mark.filterwarnings(LEAF)
def test_a_model_with_a_condition_is_planned_and_trained() -> None:
    of = labelled(Conditional(), rows=8)
    plan = autoplan(
        of.model, of.sample, 1, loss_fn=of.loss_fn, target=of.target, micro_batches=4, time_budget_s=0, progress=False
    )
    pipe = Pipeline(of.model, plan, loss_fn=of.loss_fn)
    parts = [(of.sample[i : i + 2], of.target[i : i + 2]) for i in range(0, 8, 2)]  # type: ignore[index]
    expected = torch.stack([functional.cross_entropy(of.model(x), y) for x, y in parts]).mean()
    assert torch.allclose(pipe.step(of.sample, target=of.target).float(), expected)
