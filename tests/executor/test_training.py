"""What training has in addition to `step`: optimizers, schedulers, accumulation, scalers, shapes, meta models."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from executor import Pipeline, launch
from planner import ArgumentError, Plan
from profiler import trace
from tests.torch_here import needs_lstm_in_bfloat16

pytestmark = pytest.mark.usefixtures("traced_once")

X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
Y = torch.arange(8) % 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def pipe_of(plan_for: Callable[..., Plan], model: nn.Module, x: Any = X, *, cut: int = 2, **settings: Any) -> Pipeline:
    sequence = trace(model, x)
    return Pipeline(
        model,
        plan_for(sequence, [cut], batch_size=8, micro_batches=4, **settings),
        loss_fn=functional.cross_entropy,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_with_a_scheduler_trains_as_the_plain_model(name: str, plan_for: Callable[..., Plan]) -> None:
    plain, model = small(), small()
    pipe = pipe_of(plan_for, model)
    ours, theirs = OPTIMIZERS[name](pipe.parameters()), OPTIMIZERS[name](plain.parameters())
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=20) for each in (ours, theirs)]
    for _ in range(20):
        pipe.step(X, target=Y)
        for part, target in reversed([*zip(X.split(2), Y.split(2), strict=True)]):
            (functional.cross_entropy(plain(part), target) / 4).backward()
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_add_up_over_steps(replicas: int, plan_for: Callable[..., Plan]) -> None:
    model = small()
    sequence = trace(model, X)
    plan = plan_for(sequence, [2], batch_size=8, micro_batches=2, replicas=replicas)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    single = []
    for samples in (8, 6):
        pipe.step(X[:samples], target=Y[:samples])
        single.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for samples in (8, 6):
        pipe.step(X[:samples], target=Y[:samples])
    for parameter, first, second in zip(model.parameters(), *single, strict=True):
        assert first is not None
        assert second is not None
        torch.testing.assert_close(parameter.grad, first + second)


def steep(output: Tensor, target: Tensor) -> Tensor:
    return 100 * functional.cross_entropy(output, target)


def scaled(plan: Plan) -> list[float]:
    model = small()
    pipe = Pipeline(model, plan, loss_fn=steep)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    kind = ShardedGradScaler if dist.is_initialized() else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**127, growth_interval=100)
    scales = []
    for _ in range(12):
        loss = pipe.step(X, target=Y, scaler=scaler)
        assert loss.isfinite()
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert all(parameter.isfinite().all() for parameter in pipe.parameters())
    return scales


def test_a_scaler_scales_back_in_all_processes_alike(plan_for: Callable[..., Plan]) -> None:
    """Gradients overflow at first; those of one stage only in some steps."""
    model = small()
    plan = plan_for(trace(model, X), [2], batch_size=8, micro_batches=4)
    first, second = launch(scaled, plan)
    assert first == second
    assert first[-1] < 2.0**127
    assert first == scaled(plan_for(trace(model, X), batch_size=8, micro_batches=4))


def test_scaled_gradients_are_the_gradients_times_the_scale(plan_for: Callable[..., Plan]) -> None:
    gradients = []
    for scale in (None, 1024.0):
        model = small()
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        loss = pipe_of(plan_for, model).step(X, target=Y, scaler=scaler)
        gradients.append((loss.item(), [parameter.grad for parameter in model.parameters()]))
    assert gradients[0][0] == gradients[1][0]
    for plain, times in zip(gradients[0][1], gradients[1][1], strict=True):
        assert plain is not None
        assert times is not None
        assert torch.equal(plain * 1024, times)


class Attention(nn.Module):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.project = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.project(x).chunk(3, dim=-1)
        x = self.norm(x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(functional.dropout(x, 0.1, self.training).mean(1))


def lengths(plan: Plan) -> list[float]:
    torch.manual_seed(0)
    pipe = Pipeline(Attention(), plan, loss_fn=functional.cross_entropy)
    ids = torch.arange(8 * 12).reshape(8, 12) % 20
    found = [pipe.step(ids[:, :length], target=Y).item() for length in (12, 7, 12, 5, 7)]
    return [*found, pipe.evaluate(ids[:, :9], target=Y).item()]


def test_sequences_of_another_length_than_planned(plan_for: Callable[..., Plan]) -> None:
    ids = torch.zeros(8, 12, dtype=torch.int64)
    sequence = trace(Attention(), ids)
    whole = lengths(plan_for(sequence, batch_size=8, micro_batches=4))
    cut = plan_for(sequence, [len(sequence) // 2], batch_size=8, micro_batches=4, recompute=True)
    assert launch(lengths, cut) == [whole, whole]  # each process traces the other lengths for itself
    torch.manual_seed(0)
    plain = Attention().eval()
    other = torch.arange(8 * 12).reshape(8, 12) % 20
    expected = functional.cross_entropy(plain(other[:, :9]), Y).item()
    assert whole[-1] == pytest.approx(expected, rel=1e-6)


def test_a_length_that_the_model_does_not_take_is_refused(plan_for: Callable[..., Plan]) -> None:
    pipe = pipe_of(plan_for, small())
    with pytest.raises(ArgumentError, match=r"shape \[8, 9\]; the model was traced with \[8, 16\].*with these shapes"):
        pipe.step(X[:, :9], target=Y)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        hidden = torch.tanh(self.trunk(x))
        return {"logits": tuple(head(hidden) for head in self.heads)}


def weighted(output: dict[str, tuple[Tensor, ...]], target: dict[str, Any]) -> Tensor:
    losses = [functional.cross_entropy(logits, target["label"], reduction="none") for logits in output["logits"]]
    return (torch.stack(losses).mean(0) * target["weights"][0]).mean() * target["weights"][1]


def test_outputs_and_targets_of_any_structure(plan_for: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    plain = copy.deepcopy(model)
    target = {"label": Y, "weights": (torch.linspace(0, 1, 8), 3.0)}
    sequence = trace(model, X)
    plan = plan_for(sequence, [2], batch_size=8, micro_batches=3)
    loss = Pipeline(model, plan, loss_fn=weighted).step(X, target=target)
    expected = weighted(plain(X), target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def halved(plan: Plan) -> dict[str, Tensor]:
    """Trains in autocast, with a frozen first layer."""
    model = small()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(X, target=Y)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def test_autocast_and_frozen_parameters(plan_for: Callable[..., Plan]) -> None:
    model = small()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    sequence = trace(model, X, autocast=torch.bfloat16)
    whole = halved(plan_for(sequence, batch_size=8, micro_batches=4))
    cut = halved(plan_for(sequence, [2], batch_size=8, micro_batches=4, recompute=True, schedule="1f1b"))
    assert whole.keys() == {"2.weight", "2.bias", "4.weight", "4.bias"}
    with torch.autocast("cpu", torch.bfloat16):
        functional.cross_entropy(model(X), Y).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(whole[name], cut[name])
            torch.testing.assert_close(whole[name], parameter.grad, rtol=0.05, atol=0.01)


class InARegion(nn.Module):
    """An LSTM that returns bfloat16, and an operation on what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.net = nn.LSTM(16, 16, batch_first=True)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))[:, None].expand(-1, 3, -1)
        with torch.autocast("cpu", torch.bfloat16):
            x, _ = self.net(x)
        x = torch.tanh(x)
        found: Tensor = self.leave(torch.sin(x).float().mean(1))
        return found


def in_a_region(plan: Plan) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    pipe = Pipeline(InARegion(), plan, loss_fn=functional.cross_entropy, compare_first_step=False)
    loss = pipe.step(X, target=Y).item()
    return loss, {name: own.grad for name, own in pipe.named_parameters() if own.grad is not None}


@needs_lstm_in_bfloat16
def test_an_lstm_in_an_autocast_region_is_sent_in_its_type(plan_for: Callable[..., Plan]) -> None:
    """It was traced as float32, for an export switches oneDNN off; K processes rounded elsewhere than one."""
    sequence = trace(InARegion(), X)
    settings: Any = {"batch_size": 8, "micro_batches": 4}
    loss, gradients = in_a_region(plan_for(sequence, **settings))
    after = next(layer.index for layer in sequence.layers if "net" in layer.module_paths) + 1
    if torch.backends.mkldnn.is_available():
        assert {value.dtype for value in sequence.boundaries[after]} == {torch.bfloat16}
    for part, own in launch(in_a_region, plan_for(sequence, [after], **settings)):
        assert part == loss
        assert own
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())


class WithNorms(nn.Module):
    """Parameters, statistics and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.relu(self.norm(self.first(x)))))


def from_meta(plan: Plan) -> tuple[dict[str, Tensor], float]:
    with torch.device("meta"):
        model = WithNorms()
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy, seed=3)
    assert all(parameter.is_meta for parameter in model.parameters())
    begun = {name: value.clone() for name, value in pipe.state_dict().items()}
    return begun, pipe.step(X, target=Y).item()


def test_a_model_on_meta_has_the_same_values_for_every_cut(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        sequence = trace(WithNorms(), X)
    settings = {"batch_size": 8, "micro_batches": 4}
    whole, loss = from_meta(plan_for(sequence, **settings))
    assert whole.keys() == WithNorms().state_dict().keys()
    assert whole["first.weight"].std() > 0.1
    assert not torch.equal(whole["first.bias"], whole["middle.bias"])
    assert torch.equal(whole["norm.running_var"], torch.ones(16))
    parts = launch(from_meta, plan_for(sequence, [len(sequence) - 1], **settings))
    for part, other in parts:
        assert other == loss
        assert len(part) < len(whole)
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_what_nothing_initializes_is_named(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        model = Bare()
        plan = plan_for(trace(model, X), batch_size=8, micro_batches=4)
    with pytest.raises(ArgumentError, match=r"\(Bare\) is on the meta device and has no reset_parameters.*initialize="):
        Pipeline(model, plan, loss_fn=functional.mse_loss)

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(2.0)

    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, initialize=fill)
    expected = copy.deepcopy(X) * 2.0
    assert pipe.evaluate(X, target=expected).item() == 0.0


class Positions(nn.Module):
    """Fills its weight only; `table` needs values, too."""

    table: Tensor

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))
        self.register_buffer("table", torch.arange(16).flip(0), persistent=persistent)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[self.table]


def test_whole_numbers_without_values_are_no_zeros(plan_for: Callable[..., Plan]) -> None:
    """A buffer of integers or booleans that nothing had filled was 0, in silence."""
    with torch.device("meta"):
        model, temporary = Positions(), Positions(persistent=False)
        plan = plan_for(trace(model, X), batch_size=8, micro_batches=4)
    with pytest.raises(ArgumentError, match="'table' of module '' is on the meta device, and the module's initializer"):
        Pipeline(model, plan, loss_fn=functional.mse_loss)
    Pipeline(model, plan, loss_fn=functional.mse_loss, initialize=lambda _: None)  # a checkpoint is to fill it
    with pytest.raises(ArgumentError, match="'table' of module ''"):
        Pipeline(temporary, plan, loss_fn=functional.mse_loss, initialize=lambda _: None)


class Parametrized(nn.Module):
    """Weights of its own and of its children are normalized, where `kind` does so."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 16))
        self.rows = nn.Sequential(nn.Linear(16, 16), kind(nn.Linear(16, 16)))
        self.net = kind(nn.GRU(16, 16, batch_first=True), "weight_hh_l0")
        self.reset_parameters()
        kind(self)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.rows(x))[:, None].expand(-1, 3, -1)
        found: Tensor = self.net(x)[0].mean(1) @ self.weight
        return found


def unchanged(module: nn.Module, name: str = "weight") -> nn.Module:
    return module


def fill_linear(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.5)


@pytest.mark.parametrize("initialize", [None, fill_linear])
def test_a_parametrized_model_on_meta(plan_for: Callable[..., Plan], initialize: Any) -> None:
    """Torch lets nobody copy such a module, and the construction ended with its words about serialization."""
    with torch.device("meta"):
        model, bare = Parametrized(weight_norm), Parametrized(unchanged)
    settings: Any = {"loss_fn": functional.cross_entropy, "initialize": initialize}
    sequence = trace(model, X)
    plain = Pipeline(bare, plan_for(trace(bare, X), batch_size=8, micro_batches=4), **settings).state_dict()
    for cuts in ([], [2]):
        pipe = Pipeline(model, plan_for(sequence, cuts, batch_size=8, micro_batches=4), **settings)
        begun = {name: value.clone() for name, value in pipe.state_dict().items()}
        for module in ("", "rows.1."):
            assert torch.equal(begun[f"{module}parametrizations.weight.original1"], plain[f"{module}weight"])
            norms = plain[f"{module}weight"].norm(dim=1, keepdim=True)
            torch.testing.assert_close(begun[f"{module}parametrizations.weight.original0"], norms)
        eager = Parametrized(weight_norm)
        eager.load_state_dict(begun)
        loss = functional.cross_entropy(eager(X), Y)
        loss.backward()
        torch.testing.assert_close(pipe.step(X, target=Y).float(), loss)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


class Shift(nn.Module):
    """Computes with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(16))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.by)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def right_inverse(self, x: Tensor) -> Tensor:
        return x - self.by


def test_a_parametrization_that_nobody_inverts_on_meta_is_named(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        register_parametrization(model[1], "weight", Shift())
        plan = plan_for(trace(model, X), batch_size=8, micro_batches=4)
    with pytest.raises(ArgumentError, match=r"module '1' is on the meta device.* 'weight' .*\(Shift\).*on the CPU"):
        Pipeline(model, plan, loss_fn=functional.cross_entropy)


class Scaled(nn.Module):
    """Scales its child down, as GPT-2 does with output projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.last.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_modules_around_initialize_too(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        model = Scaled()
        plan = plan_for(trace(model, X), [1], batch_size=8, micro_batches=4)
    state = Pipeline(model, plan, loss_fn=functional.mse_loss).state_dict()
    assert 5e-4 < state["last.weight"].std() < 2e-3
    assert state["first.weight"].std() > 0.1
