"""Under a recipe of mixed precision gradients and master weights have its types, equal for every cut in every bit."""

import copy
import gc
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ArgumentError, ExecutionError, NotTraceableError, Plan
from profiler import LayerSequence, trace
from profiler.precision import RECIPES
from profiler.run import main_gradients
from profiler.run.main_gradients import adding_to
from profiler.tracing.computing_model import computing_model

M, STEPS, MOST_NORM = 4, 3, 0.5
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
ADDS = {"bf16-mixed": torch.float32, "bf16-grads": torch.bfloat16}


class Words(nn.Module):
    """A tied embedding, layer normalization, and a table that no state holds."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 16)
        self.position: Tensor
        self.register_buffer("position", torch.randn(6, 16), persistent=False)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position.to(self.embedding.weight.dtype)
        for linear in self.linears:
            x = torch.tanh(linear(x)) + x
        logits: Tensor = self.head(self.norm(x))
        return logits


IDS = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(4))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sequence(precision: str = "bf16-mixed") -> LayerSequence:
    return trace(Words(), IDS, precision=precision)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(plan: Plan, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
    optimizer = optimizer_of(pipe.parameters())
    return _steps(pipe, optimizer, steps), {name: value.clone() for name, value in pipe.state_dict().items()}


def _steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(IDS, target=IDS).item())
        pipe.clip_grad_norm_(MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_hand(traced: LayerSequence, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The recipe, without ours: a bfloat16 model whose two uses of the tied weight are two parameters."""
    computing = Words(tied=False).bfloat16()
    computing.position = Words().position
    masters = {name: value.detach().clone() for name, value in Words(tied=False).named_parameters()}
    masters["head.weight"] = masters["embedding.weight"]
    stepped = {name: master for name, master in masters.items() if name != "head.weight"}
    optimizer = optimizer_of(stepped.values())
    losses = []
    for _ in range(STEPS):
        with torch.no_grad():
            for name, parameter in computing.named_parameters():
                parameter.copy_(masters[name])
        main, loss = _sums_by_hand(computing, schedule, ADDS[traced.sample.precision or ""])
        losses.append(loss)
        main["embedding.weight"] = main["embedding.weight"] + main.pop("head.weight")
        main = {name: gradient.float() for name, gradient in main.items()}
        names = [name if name in main else "embedding.weight" for name in traced.parameters]  # in the graph's order
        squares = [torch.linalg.vector_norm(main[name], dtype=torch.float64).square() for name in names]
        norm = torch.stack(squares).sum().sqrt()
        for name, master in stepped.items():
            master.grad = main[name].mul(float(MOST_NORM / norm)) if norm > MOST_NORM else main[name]
        optimizer.step()
    return losses, masters


def _sums_by_hand(computing: nn.Module, schedule: str, adds: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """Gradients, added up in that type, and loss of a step."""
    main: dict[str, Tensor] = {}
    batches = IDS.chunk(M)
    whole = 0.0
    for ids in reversed(batches) if schedule == "gpipe" else batches:
        loss = loss_fn(computing(ids).float(), ids)
        (loss * (len(ids) / len(IDS))).backward()
        whole += loss.item() * (len(ids) / len(IDS))
        for name, parameter in computing.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            added = parameter.grad.to(adds)
            main[name] = main[name] + added if name in main else added
            parameter.grad = None
    return main, whole


def assert_equal(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)  # the order of a float64 sum
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[1][name]), name


@pytest.mark.parametrize(("precision", "schedule"), [*product(ADDS, SCHEDULES)])
def test_every_cut_trains_as_the_recipe_by_hand(
    precision: str, schedule: str, plan_for: Callable[..., Plan], traced_once: None
) -> None:
    traced = sequence(precision)
    expected = by_hand(traced, schedule)
    length = len(traced)
    for cuts in ([], [length // 2], [length // 3, length - 2]):
        for recompute in (False, True):
            plan = plan_for(traced, cuts, batch_size=8, micro_batches=M, schedule=schedule, recompute=recompute)
            assert_equal(train(plan), expected)


@pytest.mark.parametrize("precision", ADDS)
def test_processes_and_replicas_add_up_gradients_in_its_type(
    precision: str, plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]
) -> None:
    traced = inherited(sequence, precision)
    settings: dict[str, Any] = {"batch_size": 8, "micro_batches": 2, "schedule": "1f1b", "replicas": 2}
    alone = train(plan_for(traced, [len(traced) // 2], **settings))
    parts = launch(train, plan_for(traced, [len(traced) // 2], **settings))
    assert [part[0] for part in parts] == [alone[0]] * 4
    for part in parts:
        assert all(torch.equal(value, alone[1][name]) for name, value in part[1].items())


def test_what_is_trained_is_the_users_own_float32(plan_for: Callable[..., Plan]) -> None:
    model = Words()
    pipe = Pipeline(model, plan_for(sequence(), [4], batch_size=8, micro_batches=M), loss_fn=loss_fn)
    before = pipe.step(IDS, target=IDS)
    assert {parameter.dtype for parameter in pipe.parameters()} == {torch.float32}
    assert all(held.grad is not None and held.grad.dtype == torch.float32 for held in pipe.parameters())
    optimizer_of(pipe.parameters()).step()
    assert {name: value.data_ptr() for name, value in pipe.state_dict().items()} == {
        name: value.data_ptr() for name, value in model.state_dict().items()
    }
    assert pipe.evaluate(IDS, target=IDS) < before, "a call computes with the master weights as they are"
    assert pipe.predict(IDS).dtype == torch.float32
    assert torch.equal(pipe.predict(IDS), computing_model(model, "bf16-mixed").eval()(IDS))


def test_sums_of_several_calls_go_on_in_the_type_that_adds_up(plan_for: Callable[..., Plan], traced_once: None) -> None:
    """What the optimizer reads is cast, and comes back from the cast without a change: two calls are one of 2 M."""
    traced = sequence("bf16-grads")
    gradients = []
    for calls, micro_batches in ((1, 4), (2, 2)):
        plan = plan_for(traced, [3], batch_size=8 // calls, micro_batches=micro_batches, schedule="1f1b")
        pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
        for ids in IDS.chunk(calls):
            pipe.step(ids, target=ids, accumulate=calls)
        gradients.append({name: held.grad for name, held in pipe.named_parameters() if held.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradient.bfloat16().float())
        if name != "embedding.weight":  # of a tied one each call adds up its own uses first
            assert torch.equal(gradient, gradients[1][name]), name


def test_float16_trains_as_by_hand_with_a_scaler(plan_for: Callable[..., Plan], traced_once: None) -> None:
    """Without one the smallest gradients are 0; the scale is in main gradients until the scaler takes it out."""
    traced = sequence("fp16-mixed")
    found = []
    for cuts in ([], [len(traced) // 2]):
        plan = plan_for(traced, cuts, batch_size=8, micro_batches=M, schedule="1f1b")
        pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
        with pytest.raises(ArgumentError, match="no scaler"):
            pipe.step(IDS, target=IDS)
        optimizer = optimizer_of(pipe.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        pipe.step(IDS, target=IDS, scaler=scaler)
        scaler.unscale_(optimizer)
        found.append({name: held.grad for name, held in pipe.named_parameters() if held.grad is not None})
        scaler.step(optimizer)
        scaler.update()
    computing = Words(tied=False).half()
    computing.position = Words().position
    main: dict[str, Tensor] = {}
    for ids in IDS.chunk(M):
        (loss_fn(computing(ids).float(), ids) * (2.0**10 / M)).backward()
        for name, parameter in computing.named_parameters():
            assert parameter.grad is not None
            main[name] = main.get(name, torch.zeros(())) + parameter.grad.float()
            parameter.grad = None
    main["embedding.weight"] = main["embedding.weight"] + main.pop("head.weight")
    for gradients in found:
        assert gradients.keys() == main.keys()
        assert all(torch.equal(gradient, main[name] / 2.0**10) for name, gradient in gradients.items())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_optimizer_of_what_is_not_trained_is_refused(precision: str, plan_for: Callable[..., Plan]) -> None:
    """Built before the pipeline, of the model's own parameters: it stepped nothing, and the loss never fell."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = Pipeline(
        model, plan_for(trace(model, IDS, precision=precision), [3], batch_size=8, micro_batches=M), loss_fn=loss_fn
    )
    before = pipe.step(IDS, target=IDS)
    if precision == "fp32":  # the model's own are trained
        optimizer.step()
        assert pipe.evaluate(IDS, target=IDS) < before
    else:
        with pytest.raises(ArgumentError, match=r"holds \d+ parameters of the model.*pipe.parameters\(\)"):
            optimizer.step()
        del pipe
        gc.collect()
        optimizer.step()  # of nothing: nobody minds any more


def test_what_is_frozen_no_more_is_refused_though_a_twin_computes(plan_for: Callable[..., Plan]) -> None:
    """The twin's parameter stayed frozen, and the user's was never trained, without a word."""
    model = Norms()
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    plan = plan_for(trace(model, x, precision="bf16-mixed"), [2], batch_size=8, micro_batches=2)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    model.frozen.requires_grad_()
    with pytest.raises(ArgumentError, match=r"frozen when the pipeline was .* such as frozen"):
        pipe.step(x, target=y)


def test_a_failed_step_leaves_the_gradients_that_the_optimizer_reads(plan_for: Callable[..., Plan]) -> None:
    fails = False

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("on purpose")
        return loss_fn(logits, target)

    pipe = Pipeline(Words(), plan_for(sequence("bf16-grads"), [3], batch_size=8, micro_batches=M), loss_fn=loss)
    pipe.step(IDS, target=IDS)
    before = {name: held.grad.clone() for name, held in pipe.named_parameters() if held.grad is not None}
    fails = True
    with pytest.raises(ExecutionError, match="on purpose"):
        pipe.step(IDS, target=IDS)
    for name, held in pipe.named_parameters():
        assert held.grad is not None
        assert torch.equal(held.grad, before[name])
        assert held.grad.dtype == torch.float32


@pytest.mark.parametrize("precision", ADDS)
def test_checkpoints_hold_master_weights_for_any_number_of_stages(
    precision: str, plan_for: Callable[..., Plan], traced_once: None, tmp_path: Path
) -> None:
    traced = sequence(precision)
    plans = [plan_for(traced, cuts, batch_size=8, micro_batches=M) for cuts in ([], [3], [2, len(traced) - 2])]
    begun = Pipeline(Words(), plans[1], loss_fn=loss_fn)
    optimizer = optimizer_of(begun.parameters())
    _steps(begun, optimizer, 2)
    save_checkpoint(tmp_path, begun, optimizer)
    expected = _steps(begun, optimizer, 2)
    for plan in (plans[0], plans[2]):
        pipe = Pipeline(Words(), plan, loss_fn=loss_fn)
        optimizer = optimizer_of(pipe.parameters())
        load_checkpoint(tmp_path, pipe, optimizer)
        assert _steps(pipe, optimizer, 2) == expected
    state = {"model": Words().state_dict()}
    with warnings.catch_warnings(action="ignore"):  # torch warns of how it uses itself
        dcp.load(state, checkpoint_id=tmp_path / "latest", no_dist=True)  # type: ignore[attr-defined]
    plain = Words()
    plain.load_state_dict(state["model"])
    assert all(value.dtype == torch.float32 for value in state["model"].values())


class Norms(nn.Module):
    """Running statistics, a frozen parameter, a mask that a state holds, and a floating-point input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4) / 3, requires_grad=False)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x * self.mask)) * self.frozen)
        return found


def test_normalization_keeps_its_types_and_frozen_parameters_have_no_master(plan_for: Callable[..., Plan]) -> None:
    model = Norms()
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    traced = trace(model, x, precision="bf16-mixed")
    assert {name: tensor.dtype for name, tensor in traced.parameters.items() if "norm" in name} == {
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
    }
    pipe = Pipeline(model, plan_for(traced, [2], batch_size=8, micro_batches=2), loss_fn=functional.mse_loss)
    first = pipe.step(x, target=y)
    optimizer_of(pipe.parameters()).step()
    state = pipe.state_dict()
    kinds = {name: state[name].dtype for name in ("frozen", "mask", "norm.running_mean", "first.weight")}
    assert kinds["frozen"] == kinds["mask"] == torch.bfloat16
    assert kinds["norm.running_mean"] == kinds["first.weight"] == torch.float32
    assert model.norm.running_mean is not None
    assert torch.equal(model.norm.running_mean, state["norm.running_mean"])
    assert bool(model.norm.running_mean.any())
    assert pipe.first_step.startswith("as the model computes it")
    assert bool(first.isfinite())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_type_for_all_has_no_masters(precision: str, plan_for: Callable[..., Plan]) -> None:
    traced = trace(Words(), IDS, precision=precision)
    model = Words()
    pipe = Pipeline(model, plan_for(traced, [3], batch_size=8, micro_batches=M), loss_fn=loss_fn)
    pipe.step(IDS, target=IDS)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert {held.dtype for held in pipe.parameters()} == {dtype}
    assert all(held.grad is not None and held.grad.dtype == dtype for held in pipe.parameters())


def test_a_model_without_values_gets_the_same_from_its_initializers(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    plan = plan_for(trace(bare, x, precision="bf16-mixed"), [2], batch_size=8, micro_batches=2)
    pipe = Pipeline(bare, plan, loss_fn=functional.mse_loss, seed=5)
    whole = Pipeline(bare, plan_for(trace(bare, x), [2], batch_size=8, micro_batches=2), seed=5)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in pipe.state_dict().items())
    pipe.step(x, target=torch.zeros(8, 2))
    assert {held.dtype for held in pipe.parameters()} == {torch.float32}


def test_large_gradients_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast of one piece would take as much memory as the largest main gradient."""
    monkeypatch.setattr(main_gradients, "CAST_ELEMENTS", 5)
    main = torch.zeros(3, 7, requires_grad=True)
    leaf = adding_to(main, torch.zeros(3, 7, dtype=torch.bfloat16))
    gradients = [torch.randn(3, 7).bfloat16() for _ in range(3)]
    for gradient in gradients:
        leaf.backward(gradient)
        assert leaf.grad is None
    expected = (gradients[0].float() + gradients[1].float()) + gradients[2].float()
    assert main.grad is not None
    assert torch.equal(main.grad, expected)


def test_sparse_gradients_are_added_too() -> None:
    main = torch.zeros(9, 2, requires_grad=True)
    leaf = adding_to(main, torch.zeros(9, 2, dtype=torch.bfloat16))
    for ids in (torch.tensor([1, 3, 1]), torch.tensor([3, 8])):
        functional.embedding(ids, leaf, sparse=True).sum().backward()
    assert main.grad is not None
    assert main.grad.dtype == torch.float32
    assert main.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 2, 0, 0, 0, 0, 1]


class Mixes(nn.Module):
    """A buffer that is never cast meets a weight that is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x + self.shift)
        return found


def test_products_of_unlike_types_are_refused_where_they_stand() -> None:
    """The trace has shapes alone, so a plan from data sheets was made of what no kernel computes."""
    with pytest.raises(NotTraceableError, match=r"linear.* bfloat16 and float32, in .*test_precision"):
        trace(Mixes(), torch.ones(2, 4), precision="bf16-mixed")
    assert len(trace(Mixes(), torch.ones(2, 4)))


class Uncopied(nn.Linear):
    """What cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Uncopied":
        raise TypeError("a lock")


@pytest.mark.parametrize(
    ("precision", "autocast", "said"),
    [
        ("fp16", None, "scaler"),
        ("int8", None, "choose one of fp32, bf16, bf16-mixed, bf16-grads, fp16-mixed"),
        ("bf16-mixed", torch.bfloat16, "exclude each other"),
        ("bf16-mixed", None, "a lock"),
    ],
)
def test_what_no_recipe_does_is_refused(precision: str, autocast: torch.dtype | None, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        trace(Uncopied(4, 4), torch.ones(2, 4), precision=precision, autocast=autocast)


def test_a_twin_shares_what_it_need_not_cast() -> None:
    model = Words()
    twin = computing_model(model, "bf16-mixed")
    assert isinstance(twin, Words)
    assert twin.position is model.position
    assert twin.head.weight is twin.embedding.weight
    assert computing_model(twin, "bf16-mixed") is twin
    assert computing_model(model, None) is model
    assert [name for name, _ in copy.deepcopy(model).named_parameters()] == [n for n, _ in twin.named_parameters()]


RECIPES_WITHOUT_SCALER = [None, *(name for name, recipe in RECIPES.items() if not recipe.needs_scaler)]


class Drawn(nn.Module):
    """Blocks of drawn kinds over a row of numbers."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kinds = kinds
        made: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(6, 6),
            "residual": lambda: nn.Linear(6, 6, bias=False),
            "norm": lambda: nn.LayerNorm(6),
            "statistics": lambda: nn.BatchNorm1d(6),
            "dropout": lambda: nn.Dropout(0.3),
            "tied": lambda: nn.Linear(6, 6),
            "frozen": lambda: nn.Linear(6, 6).requires_grad_(requires_grad=False),
        }
        self.blocks = nn.ModuleList(made[kind]() for kind in kinds)
        tied = [block for block, kind in zip(self.blocks, kinds, strict=True) if kind == "tied"]
        for block in tied[1:]:
            block.weight = tied[0].weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block, kind in zip(self.blocks, self.kinds, strict=True):
            x = block(x) + x if kind == "residual" else torch.tanh(block(x))
        found: Tensor = self.last(x)
        return found


def _drawn_training(kinds: tuple[str, ...], plan: Plan, calls: int) -> tuple[list[float], dict[str, Tensor]]:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
    pipe = Pipeline(Drawn(kinds), plan, loss_fn=functional.mse_loss)
    optimizer = optimizer_of(pipe.parameters())
    losses = []
    for _ in range(2):
        losses += [pipe.step(x, target=y, accumulate=calls).item() for _ in range(calls)]
        losses.append(pipe.clip_grad_norm_(MOST_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in pipe.state_dict().items()}


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_models_train_alike_for_every_cut_under_every_recipe(
    plan_for: Callable[..., Plan], traced_once: None, data: Any
) -> None:
    kinds = ("linear", "residual", "norm", "statistics", "dropout", "tied", "frozen")
    drawn = tuple(data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5)))
    traced = trace(Drawn(drawn), torch.zeros(12, 6), precision=data.draw(st.sampled_from(RECIPES_WITHOUT_SCALER)))
    replicas = data.draw(st.sampled_from((1, 2, 3)))
    asked: dict[str, Any] = {
        "batch_size": 12,
        "micro_batches": data.draw(st.integers(2, 6 // replicas)),  # a batch normalization needs two samples
        "schedule": data.draw(st.sampled_from(SCHEDULES)),
        "replicas": replicas,
    }
    calls = data.draw(st.integers(1, 2))
    expected = _drawn_training(drawn, plan_for(traced, [], **asked), calls)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(traced) - 1), min_size=1, max_size=3)))
    again = [data.draw(st.booleans()) for _ in range(len(cuts) + 1)]
    losses, state = _drawn_training(drawn, plan_for(traced, cuts, **asked, recompute=again), calls)
    assert losses == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in state.items())
