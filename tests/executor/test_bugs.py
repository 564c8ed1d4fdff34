"""One test for each bug that somebody met, with its story."""

import copy
import json
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from executor.run.micro_batch import sizes_for
from planner import ArgumentError, ExecutionError, ForeignPlanError, NotTraceableError, Plan, PlanFileError
from profiler import trace

X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
Y = torch.arange(8) % 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def two_stages(plan_for: Callable[..., Plan], model: nn.Module, *samples: Tensor, cut: int = 1) -> Plan:
    return plan_for(trace(model, samples or X), [cut], batch_size=8, micro_batches=4)


def test_a_plan_without_its_last_stage_is_refused(plan_for: Callable[..., Plan]) -> None:
    """It used to run the first stages, return a loss of 0 and train nothing."""
    model = Small()
    plan = two_stages(plan_for, model)
    shorter = plan.model_copy(update={"stages": plan.stages[:1]})
    with pytest.raises(ForeignPlanError, match="stages hold 1 layer, the model has"):
        Pipeline(model, shorter, loss_fn=functional.cross_entropy)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("sample", "tree"), "garbage"), (("sample", "leaves"), []), (("stages", 0, "devices", 0, "name"), "zzz")],
)
def test_a_plan_with_senseless_values_is_refused(
    plan_for: Callable[..., Plan], tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    """They passed the schema and ended in errors of json and torch."""
    model = Small()
    written = json.loads(two_stages(plan_for, model).to_json())
    place = written
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(written))
    with pytest.raises(PlanFileError, match="plan again"):
        Pipeline(model, Plan.load(tmp_path / "plan.json"), loss_fn=functional.cross_entropy)


def test_our_errors_keep_their_class_across_processes(plan_for: Callable[..., Plan]) -> None:
    """`autoplan run` with a plan for another model exited with 1 and a traceback, not with 5 and one line."""
    plan = two_stages(plan_for, Small())

    def train(plan: Plan) -> None:
        Pipeline(nn.Linear(16, 4), plan, loss_fn=functional.cross_entropy)

    with pytest.raises(ForeignPlanError, match=r"^rank \d of 2 failed: the plan was made for a model") as caught:
        launch(train, plan)
    assert "Traceback" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_an_error_of_the_users_loss_shows_no_frame_of_ours(plan_for: Callable[..., Plan]) -> None:
    """It came with forty lines of our sources, and the user's line in the middle of them."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError(f"of {tuple(output.shape)}")

    def train(plan: Plan) -> None:
        Pipeline(Small(), plan, loss_fn=loss).step(X, target=Y)

    with pytest.raises(ExecutionError, match=r"stage 1, micro-batch 0, .*ZeroDivisionError: of") as caught:
        launch(train, two_stages(plan_for, Small()))
    files = re.findall(r'File "(.*)", line \d+, in (\w+)', str(caught.value))
    assert files == [(__file__, "train"), (__file__, "loss")]


class UnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.other = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = torch.tanh(self.trunk[0](x))
        late = torch.tanh(self.trunk[2](torch.tanh(self.trunk[1](early))))
        return self.head(late), self.other(early)


def first_output_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[0], target)


def test_no_gradient_is_not_a_gradient_of_zeros(plan_for: Callable[..., Plan]) -> None:
    """Zeros came back across a cut for an output that the loss does not use, and AdamW decayed its weights."""
    sequence = trace(UnusedHead(), X)
    for cut in range(1, len(sequence)):
        model = UnusedHead()
        plan = plan_for(sequence, [cut], batch_size=8, micro_batches=4)
        Pipeline(model, plan, loss_fn=first_output_loss).step(X, target=Y)
        assert model.other.weight.grad is None, cut
        assert model.head.weight.grad is not None


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def test_clipping_sees_all_stages(plan_for: Callable[..., Plan]) -> None:
    """torch's own clipped each rank by its own norm, and the copies of a tied weight drifted apart."""
    ids = torch.arange(8) % 16
    sequence = trace(TiedHead(), ids)

    def train(plan: Plan) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        pipe = Pipeline(TiedHead(), plan, loss_fn=functional.cross_entropy)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.step(ids, target=ids)
            norm = pipe.clip_grad_norm_(0.1).item()
            optimizer.step()
        return norm, {name: parameter.detach() for name, parameter in pipe.named_parameters()}

    norm, whole = train(plan_for(sequence, batch_size=8, micro_batches=4))
    plan = plan_for(sequence, [len(sequence) - 1], batch_size=8, micro_batches=4)
    for other, part in launch(train, plan):
        assert other == norm
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
        assert "embedding.weight" in part  # the model's own first name, not that of the head
    torch.manual_seed(0)
    model = TiedHead()
    functional.cross_entropy(model(ids), ids).backward()
    first = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    again = TiedHead()
    again.load_state_dict(model.state_dict())
    pipe = Pipeline(again, plan_for(sequence, batch_size=8, micro_batches=4), loss_fn=functional.cross_entropy)
    pipe.step(ids, target=ids)
    assert pipe.clip_grad_norm_(0.1).item() == pytest.approx(first, rel=1e-5)


class ResidualBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.input_norm = nn.BatchNorm2d(3, affine=False)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.dropout(self.input_norm(x)))
        for conv in self.convs:
            y = self.norm(conv(x))
            y += x
            x = torch.relu(y)
        return self.head(x.mean((2, 3)))


@pytest.mark.usefixtures("traced_once")
def test_evaluation_follows_the_layers_of_training(plan_for: Callable[..., Plan]) -> None:
    """Other values than counters of batches have other names there, and what draws nothing there went into the prelude.

    The batch normalization is used twice in a forward pass: its counter moves by 2 a step, for every M.
    """
    images = torch.randn(8, 3, 5, 5)
    sequence = trace(ResidualBlocks(), images)
    torch.manual_seed(0)
    model = ResidualBlocks()
    expected = functional.cross_entropy(copy.deepcopy(model).eval()(images), Y).item()
    for cut in range(1, len(sequence)):
        plan = plan_for(sequence, [cut], batch_size=8, micro_batches=4)
        pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
        assert pipe.evaluate(images, target=Y).item() == pytest.approx(expected, rel=1e-5)
    pipe.step(images, target=Y)
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 2


class HoldsMore(nn.Module):
    """Has what its forward pass does not read, and returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(16, 4)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("version", torch.tensor([7.0]))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.used(x)), self.log_scale


def scaled_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[0] * output[1].exp(), target)


def test_state_holds_what_no_layer_reads_and_outputs_may_be_parameters(
    plan_for: Callable[..., Plan], tmp_path: Path
) -> None:
    """The plain model could not load the checkpoint; a parameter among the outputs ended in a KeyError."""
    model = HoldsMore()
    pipe = Pipeline(model, plan_for(trace(model, X), batch_size=8, micro_batches=4), loss_fn=scaled_loss)
    pipe.step(X, target=Y)
    assert model.log_scale.grad is not None
    HoldsMore().load_state_dict(pipe.state_dict())
    save_checkpoint(tmp_path / "c", pipe)
    assert pipe.state_dict().keys() == model.state_dict().keys()


def test_the_loss_draws_keyed_random_numbers(plan_for: Callable[..., Plan]) -> None:
    """It drew with whatever state the last random layer had left, which depends on the cut."""

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.dropout(output, 0.5), target)

    sequence = trace(Small(), X)
    losses = set()
    for cuts, recompute in (([], False), ([1], True)):
        torch.manual_seed(0)
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=4, recompute=recompute)
        losses.add(Pipeline(Small(), plan, loss_fn=noisy).step(X, target=Y).item())
    assert len(losses) == 1


def test_a_loss_without_gradient_is_refused_and_no_grad_does_not_stop_training(plan_for: Callable[..., Plan]) -> None:
    """Both trained nothing without a word."""
    model = Small()
    plan = two_stages(plan_for, model)
    with pytest.raises(ArgumentError, match="the loss depends on no trainable parameter"):
        Pipeline(model, plan, loss_fn=lambda o, t: functional.cross_entropy(o.detach(), t)).step(X, target=Y)
    with torch.no_grad():
        Pipeline(model, plan, loss_fn=functional.cross_entropy).step(X, target=Y)
    assert model.first.weight.grad is not None


def test_instance_norm_that_tracks_statistics_is_refused() -> None:
    """It moved them once per micro-batch, and again when recomputed."""
    with pytest.raises(NotTraceableError, match="track_running_stats=False"):
        trace(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)), torch.randn(4, 3, 8, 8)
        )


def test_keywords_come_in_any_order(plan_for: Callable[..., Plan]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.linear(x), labels)

    model = Two()
    plan = plan_for(trace(model, {"x": X, "labels": Y}), batch_size=8, micro_batches=4)
    pipe = Pipeline(model, plan)
    assert pipe.step(labels=Y, x=X).item() == pipe.step(x=X, labels=Y).item()


def test_what_cannot_be_a_sample_or_a_plan_is_our_error(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """These ended in errors of torch, pydantic and Python."""
    pair = namedtuple("pair", "a b")
    model = Small()
    with pytest.raises(ArgumentError, match="the named tuple pair is not to be found as pair in"):
        trace(model, pair(X, X))
    with pytest.raises(ArgumentError, match="constants must be finite"):
        trace(model, (X, float("-inf")))
    with pytest.raises(ArgumentError, match="negative dimensions"):
        trace(model, X, batch_dims={0: -1})
    plan = two_stages(plan_for, model)
    with pytest.raises(ArgumentError, match="the batch holds 0 samples"):
        Pipeline(model, plan, loss_fn=functional.cross_entropy).step(X[:0], target=Y[:0])
    with pytest.raises(ArgumentError, match=r"Plan\.load"):
        Pipeline(model, "plan.json")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cannot write"):
        plan.save(tmp_path)
    assert list(tmp_path.parent.glob(f".{tmp_path.name}.draft")) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_step_that_failed_leaves_nothing_to_the_next(plan_for: Callable[..., Plan]) -> None:
    """A tied parameter's gradients of the micro-batches before the failure were added to the next step's."""
    model = Tied()
    plan = plan_for(trace(model, X), [1], batch_size=8, micro_batches=4, schedule="1f1b")
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, check_finite=True)
    pipe.step(X, target=X)
    expected = gradients_of(model)
    bad = X.clone()
    bad[-1] = torch.nan
    model.zero_grad()
    with pytest.raises(ExecutionError, match="micro-batch 3, action 1F3: the loss"):
        pipe.step(X, target=bad)
    model.zero_grad()
    pipe.step(X, target=X)
    assert all(map(torch.equal, gradients_of(model), expected))


def test_an_autocast_region_of_the_callers_is_refused(plan_for: Callable[..., Plan]) -> None:
    """Between processes messages then held bfloat16 where float32 was expected: losses were NaN or anything."""
    model = Small()
    pipe = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy)
    for call in (pipe.step, pipe.evaluate):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ArgumentError, match=r"region of torch.bfloat16, the plan was made for none; .*autocast="),
        ):
            call(X, target=Y)
    with torch.inference_mode():
        pipe.step(X, target=Y)
    assert model.first.weight.grad is not None
    plan = plan_for(trace(model, X, autocast=torch.bfloat16), [1], batch_size=8, micro_batches=4)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    expected = pipe.step(X, target=Y)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pipe.step(X, target=Y), expected)


def moved(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("compare", [True, False])
def test_parameters_that_are_replaced_are_no_fault_of_the_trace(
    plan_for: Callable[..., Plan], *, compare: bool
) -> None:
    """The comparison blamed the trace, and without it the pipeline went on with parameters that nobody saw."""
    model = Small()
    plan = two_stages(plan_for, model)
    said = r"replaced by others, as load_state_dict\(..., assign=True\) does, .*load before constructing it, or without"
    for steps in (0, 1):
        pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy, compare_first_step=compare)
        for _ in range(steps):
            model.load_state_dict(pipe.state_dict(), assign=True)  # what it trains itself
            model.load_state_dict(moved(model))
            pipe.step(X, target=Y)
        model.load_state_dict(moved(model), assign=True)
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(ArgumentError, match=said):
                call(X, target=Y)
        with pytest.raises(ArgumentError, match=said):
            pipe.predict(X)
    frozen = model.first.requires_grad_(requires_grad=False)
    pipe = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy, compare_first_step=compare)
    frozen.load_state_dict(moved(frozen), assign=True)
    with pytest.raises(ArgumentError, match=rf"first\.\w+, were {said}"):
        pipe.step(X, target=Y)


def test_a_module_that_is_replaced_is_noticed_after_the_first_step(plan_for: Callable[..., Plan]) -> None:
    """The pipeline went on with the weights of the one before, and the new one's got no gradients."""
    model = Small()
    pipe = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy)
    pipe.step(X, target=Y)
    before, model.first = model.first, nn.Linear(model.first.in_features, model.first.out_features)
    with pytest.raises(
        ArgumentError, match=r"such as first\.weight, were replaced by others, .* another module in its"
    ):
        pipe.step(X, target=Y)
    model.first = before
    pipe.step(X, target=Y)


def test_parameters_of_a_model_on_meta_are_loaded_before(plan_for: Callable[..., Plan]) -> None:
    """After the first step, which compares with them, a model may be given what was trained."""
    with torch.device("meta"):
        model = Small()
        plan = two_stages(plan_for, model)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(X, target=Y)
    model.load_state_dict({name: value.clone() for name, value in pipe.state_dict().items()}, assign=True)
    pipe.step(X, target=Y)
    with torch.device("meta"):
        model = Small()
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    model.load_state_dict(Small().state_dict(), assign=True)
    with pytest.raises(ArgumentError, match=r"such as first\.weight, were replaced by others"):
        pipe.step(X, target=Y)


def test_a_parameter_that_thaws_is_not_left_out_in_silence(plan_for: Callable[..., Plan]) -> None:
    """Its gradient stayed None; and an optimizer over what trains got an empty list where a stage has nothing."""
    model = Small()
    model.first.requires_grad_(requires_grad=False)
    pipe = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy)
    pipe.step(X, target=Y)
    model.first.requires_grad_()
    with pytest.raises(ArgumentError, match=r"that were frozen .*, 2 are not any more, such as first.weight"):
        pipe.step(X, target=Y)
    model.requires_grad_(requires_grad=False)
    assert any(parameter.requires_grad for parameter in pipe.parameters())


class Extra(Small):
    """Has extra state, and a module that no layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(3, 3)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 7}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_checkpoint_is_whole(plan_for: Callable[..., Plan], tmp_path: Path, device: str) -> None:
    """Extra state was an AttributeError; of a model on meta what no layer reads was left out."""
    with torch.device(device):
        model = Extra()
    pipe = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy)
    save_checkpoint(tmp_path, pipe)
    plain = Extra()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "latest", no_dist=True)  # type: ignore[attr-defined]
    plain.load_state_dict(state["model"])
    assert torch.equal(plain.unread.weight, pipe.state_dict()["unread.weight"])
    load_checkpoint(tmp_path, Pipeline(Extra(), pipe.plan, loss_fn=functional.cross_entropy))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).abs()


def test_complex_gradients_are_clipped(plan_for: Callable[..., Plan]) -> None:
    """It was a RuntimeError of torch's."""
    model = Complex()
    pipe = Pipeline(model, plan_for(trace(model, X), batch_size=8, micro_batches=4), loss_fn=functional.mse_loss)
    pipe.step(X, target=X)
    assert model.weight.grad is not None
    expected = model.weight.grad.abs().square().sum().sqrt()
    torch.testing.assert_close(pipe.clip_grad_norm_(1e-3).float(), expected)
    torch.testing.assert_close(model.weight.grad.abs().square().sum().sqrt().item(), 1e-3)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)
        self.own = nn.Embedding(16, 8, sparse=True)
        self.last = nn.Linear(8, 8)
        self.again = nn.Embedding(16, 8, sparse=True)
        self.again.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(ids) + self.own(ids))) + self.again(ids)


def sparse_steps(plan: Plan) -> list[float]:
    torch.manual_seed(0)
    model = Sparse()
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(torch.arange(8), target=torch.ones(8, 8)).item())
        losses.append(pipe.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients_are_shared(plan_for: Callable[..., Plan], replicas: int) -> None:
    """Between processes those of tied parameters and of replicas were errors of torch's, and so was their norm."""
    sequence = trace(Sparse(), torch.arange(8))
    cuts = [len(sequence) - 1] if replicas == 1 else []
    plan = plan_for(sequence, cuts, batch_size=8, micro_batches=2, replicas=replicas)
    expected = sparse_steps(plan)
    assert launch(sparse_steps, plan) == [expected, expected]


@pytest.mark.parametrize("senseless", [{"seed": "7"}, {"seed": 2**63}, {"timeout_s": 0}])
def test_senseless_settings_are_refused_at_once(plan_for: Callable[..., Plan], senseless: dict[str, Any]) -> None:
    """A seed that is no number was an error at the first random number only, in the middle of a step."""
    model = Small()
    with pytest.raises(ArgumentError, match=f"{next(iter(senseless)).replace('_s', '')}.* is .*; (pass|give)"):
        Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy, **senseless)


def gradients_of_a_step(plan: Plan) -> list[Tensor]:
    torch.manual_seed(0)
    model = Small()
    x = torch.linspace(-1, 1, plan.batch_size * 16).reshape(-1, 16)
    Pipeline(model, plan, loss_fn=functional.mse_loss).step(x, target=torch.zeros(plan.batch_size, 4))
    return gradients_of(model)


def test_more_micro_batches_than_tags(plan_for: Callable[..., Plan]) -> None:
    """Receives of 1025 micro-batches and more were posted with the tags of others: a KeyError, or no end of waiting."""
    sequence = trace(Small(), X)
    settings = {"batch_size": 1100, "micro_batches": 1100}
    expected = gradients_of_a_step(plan_for(sequence, **settings))
    parts = launch(gradients_of_a_step, plan_for(sequence, [1], **settings), timeout_s=10)
    assert all(map(torch.equal, [gradient for part in parts for gradient in part], expected))


class Normalized(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_a_small_last_batch_leaves_no_sample_alone(plan_for: Callable[..., Plan]) -> None:
    """A batch of 5 in 4 micro-batches gave batch normalization a single sample, which it refuses."""
    model = Normalized()
    pipe = Pipeline(model, plan_for(trace(model, X), [1], batch_size=8, micro_batches=4), loss_fn=functional.mse_loss)
    for samples in (5, 3, 2):
        pipe.step(X[:samples], target=torch.zeros(samples, 4))
    assert sizes_for(5, (2, 2, 2, 2)) == (2, 1, 1, 1)
    assert sizes_for(5, (2, 2, 2, 2), at_least=2) == (3, 2)
    assert sizes_for(1, (2, 2, 2, 2), at_least=2) == (1,)


class WrittenView(nn.Module):
    """A view that outlives writes to its base and to a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        base = self.first(x)
        view = base.view(-1, 2, 8)
        other = torch.relu(base) + 1
        base.mul_(2)
        view[:, 0] += other.view(-1, 2, 8)[:, 1]
        return self.last(view.reshape(-1, 16))


def test_a_view_whose_base_was_written_trains(plan_for: Callable[..., Plan]) -> None:
    """torch ended the process with a segmentation fault: `Tensor.register_hook` of such a view."""
    model = WrittenView()
    plain = copy.deepcopy(model)
    loss = Pipeline(model, two_stages(plan_for, model), loss_fn=functional.cross_entropy).step(X, target=Y)
    expected = functional.cross_entropy(plain(X), Y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class WrittenLater(nn.Module):
    """One layer makes a view of what it receives, and a later one writes the view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.gate = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        view = self.first(x).view(-1, 2, 8)
        gate = self.gate(x)
        view.mul_(2)
        return self.last(view.reshape(-1, 16) * gate)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_view_of_a_received_value_is_written_by_a_later_layer(
    plan_for: Callable[..., Plan], *, recompute: bool
) -> None:
    """A stage copied what a layer that reads it writes, not what another one writes through a view: a RuntimeError."""
    model = WrittenLater()
    plain = copy.deepcopy(model)
    sequence = trace(model, X)
    views = next(layer for layer in sequence.layers if layer.views)
    assert not views.in_place
    plan = plan_for(sequence, [views.index], batch_size=8, micro_batches=4, recompute=recompute)
    Pipeline(model, plan, loss_fn=functional.cross_entropy).step(X, target=Y)
    functional.cross_entropy(plain(X), Y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class CopyOrView(nn.Module):
    """`contiguous` copies, but of one sample it gives a view: what is written then is the layer's input too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(-1, 4, 4))
        turned = hidden.transpose(0, 1).contiguous()
        gate = self.gate(x.view(-1, 4, 4))
        turned.mul_(2)
        return self.last(turned.transpose(0, 1) * gate + hidden).sum(1)


@pytest.mark.usefixtures("traced_once")
def test_what_is_a_copy_for_some_samples_is_one_for_a_single_sample(plan_for: Callable[..., Plan]) -> None:
    """With micro-batches of one, `mul_` changed `hidden` too, or not, as the model was cut: wrong gradients."""
    model = CopyOrView()
    plain = copy.deepcopy(model)
    functional.cross_entropy(plain(X), Y).backward()
    sequence = trace(model, X)
    for cuts in ([], *([cut] for cut in range(1, len(sequence)))):
        model.zero_grad()
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=8)
        Pipeline(model, plan, loss_fn=functional.cross_entropy).step(X, target=Y)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


class ViewWrittenLater(nn.Module):
    """What a linear layer returns for three dimensions is a view of a product; it is read, and then written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(-1, 4, 4))
        middle = torch.tanh(hidden) + hidden
        before = torch.sin(middle) + hidden * 3
        hidden[:, :2] = hidden[:, 1:3] * 0.7
        return self.last(middle + before).sum(1) + hidden.sum(1)


@pytest.mark.usefixtures("traced_once")
def test_a_view_written_by_a_later_layer_gives_the_bits_of_one_stage(plan_for: Callable[..., Plan]) -> None:
    """A stage writes a copy; uncut, the write went into the history of the view's base: sums in another order."""
    model = ViewWrittenLater().double()
    inputs = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sequence = trace(model, inputs)
    found = []
    for cuts in ([], *([cut] for cut in range(1, len(sequence)))):
        model.zero_grad()
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=8)
        Pipeline(model, plan, loss_fn=functional.cross_entropy).step(inputs, target=Y)
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(found) > 3
    assert all(torch.equal(*pair) for gradients in found for pair in zip(gradients, found[0], strict=True))


class ContiguousSlice(nn.Module):
    """`contiguous` copies a slice, but not one that a boundary has copied already."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.gate = nn.Linear(16, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        part = self.first(x)[:, ::2]
        gate = self.gate(x)
        own = part.contiguous()
        own.mul_(2)
        return self.last(own * gate + part)


@pytest.mark.usefixtures("traced_once")
def test_a_copy_of_a_slice_stays_a_copy_behind_a_boundary(plan_for: Callable[..., Plan]) -> None:
    """The slice left its layer without gaps, so `contiguous` gave the slice itself, and `mul_` changed both."""
    model = ContiguousSlice()
    plain = copy.deepcopy(model)
    functional.cross_entropy(plain(X), Y).backward()
    sequence = trace(model, X)
    for cuts in ([], *([cut] for cut in range(1, len(sequence)))):
        model.zero_grad()
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=4)
        Pipeline(model, plan, loss_fn=functional.cross_entropy).step(X, target=Y)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


class TakesTarget(nn.Module):
    """As forecasting models of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, context: Tensor, target: Tensor) -> Tensor:
        return (self.last(self.first(context).tanh()) - target).square().mean()


def test_a_model_may_take_an_argument_named_target(plan_for: Callable[..., Plan]) -> None:
    """`step` took it for the loss function's, and said that the model was called with other arguments than traced."""
    torch.manual_seed(0)
    model = TakesTarget()
    batch: dict[str, Any] = {"context": torch.randn(8, 4), "target": torch.randn(8, 1)}
    expected = model(**batch)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plan = plan_for(trace(model, batch), [1], batch_size=8, micro_batches=2)
    pipe = Pipeline(model, plan)
    for loss in (pipe.step(**batch), pipe.evaluate(**batch)):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(ArgumentError, match="takes an argument 'target' by keyword, and step takes what the loss"):
        Pipeline(model, plan, loss_fn=functional.mse_loss)
