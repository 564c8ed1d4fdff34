"""Profiles of small models; how true their seconds are is in tests/benchmarks."""

from collections.abc import Callable
from itertools import accumulate, count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from profiler import ArgumentError, Cluster, Device, LayerSequence, Link, Profile, ProfileError, profile, trace
from profiler.run.inputs import micro_batch
from profiler.run.layer_runner import Kept, LayerRunner, backward
from profiler.run.parameter_pool import ParameterPool
from profiler.run.sampled_layers import windows
from profiler.timing import sweeps
from profiler.timing.optimizers import check_optimizer, optimizer_cost, optimizer_names
from profiler.workload import Workload
from tests.models.tracked import allocations, run_stages

Case = tuple[nn.Module, Any]
Traced = tuple[nn.Module, Any, LayerSequence]
CPU = Device(name="cpu", kind="cpu/1 thread", memory_bytes=2**30, threads=1)


def _quick(model: nn.Module | LayerSequence, sample: Any, **settings: Any) -> Profile:
    """A profile from as few repeats as can be, on one device."""
    sequence = model if isinstance(model, LayerSequence) else trace(model, sample)
    defaults: dict[str, Any] = {"devices": 1, "sample": sample, "time_budget_s": 0.0, "progress": False}
    return profile(sequence, **{**defaults, **settings})


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def test_every_layer_has_a_cost_at_every_size(traced_case: Callable[[str], Traced]) -> None:
    _, ids, sequence = traced_case("gpt")
    measured = _quick(sequence, ids, loss_fn=_loss, target=ids, micro_batch_sizes=[1, 2])
    assert measured.fingerprint == sequence.fingerprint
    assert measured.sample == sequence.sample
    assert len(measured.costs) == 2 * len(sequence)
    assert {cost.device_kind for cost in measured.costs} == {"cpu/1 thread"}
    assert {parameter.name for parameter in measured.parameters} == sequence.parameters.keys()
    for cost in measured.costs:
        assert cost.forward_s == cost.recompute_s > 0
        behind = sequence.boundaries[cost.layer + 1]
        assert cost.output_bytes == sum(value.size_bytes(cost.micro_batch_size) for value in behind)
    assert measured.costs[-1].output_bytes == 0
    assert measured.to_frame().shape[0] == len(measured.costs)
    assert Profile.parse_json(measured.to_json(), source="", error=ArgumentError) == measured


@pytest.mark.parametrize(
    ("limit", "method", "long_s", "budget_s", "times"),
    [
        # A model whose pass takes seconds took half a minute, with no second given to repeat it.
        ("LONG_SWEEP_S", "run", 0.0, 0.0, 2),
        ("LONG_SWEEP_S", "run", 0.0, 1e-9, 4),
        ("LONG_SWEEP_S", "run", 1e9, 0.0, 4),
        # What calls of long layers cost, run as one stage, was a third of a profile, and adds nothing to them.
        ("LONG_LAYER_S", "_uncut", 0.0, 0.0, 0),
        ("LONG_LAYER_S", "_uncut", 0.0, 1e-9, 4),
        ("LONG_LAYER_S", "_uncut", 1e9, 0.0, sweeps.FEWEST_SWEEPS),
    ],
)
def test_what_takes_long_is_not_repeated_unasked(
    traced_case: Callable[[str], Traced],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    method: str,
    long_s: float,
    budget_s: float,
    times: int,
) -> None:
    _, ids, sequence = traced_case("gpt")
    done: list[int] = []
    run = getattr(sweeps._Sweep, method)

    def counted(*args: Any) -> Any:
        done.append(1)
        return run(*args)

    monkeypatch.setattr(sweeps, limit, long_s)
    monkeypatch.setattr(sweeps._Sweep, method, counted)
    measured = _quick(sequence, ids, loss_fn=_loss, target=ids, micro_batch_sizes=[1], time_budget_s=budget_s)
    assert len(done) == times
    assert all(cost.forward_s > 0 for cost in measured.costs)


def test_equal_layers_share_their_times(traced_case: Callable[[str], Traced]) -> None:
    _, ids, sequence = traced_case("gpt")
    measured = _quick(sequence, ids, loss_fn=_loss, target=ids, micro_batch_sizes=[1])
    times: dict[str, set[float]] = {}
    for layer, cost in zip(measured.layers[:-1], measured.costs[:-1], strict=True):
        times.setdefault(layer.signature, set()).add(cost.forward_s)
    assert len(times) < len(measured.layers) / 2
    assert all(len(found) == 1 for found in times.values())


def test_every_kind_of_model_is_measured(each_traced: Traced) -> None:
    """Each layer has a forward pass, and a backward pass if it has something to train."""
    _, sample, sequence = each_traced
    measured = _quick(sequence, sample, micro_batch_sizes=[2])
    assert [cost.layer for cost in measured.costs] == list(range(len(sequence)))
    assert all(cost.forward_s > 0 for cost in measured.costs)
    trained = [cost for cost, layer in zip(measured.costs, sequence.layers, strict=True) if layer.parameters]
    assert trained
    assert all(cost.backward_s > 0 for cost in trained)


def test_the_model_stays_as_it_is(make_case: Callable[[str], Case]) -> None:
    model, images = make_case("cnn")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    _quick(model, images, micro_batch_sizes=[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_and_a_model_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
            self.first.requires_grad_(False)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.last(torch.relu(self.first(x)))
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    measured = _quick(WithLoss(), {"x": torch.randn(8, 6), "labels": torch.randint(0, 3, (8,))})
    assert {entry.name for entry in measured.parameters if entry.trainable} == {"last.weight", "last.bias"}
    assert all(cost.forward_s > 0 for cost in measured.costs)
    sizes = len(measured.costs) // len(measured.layers)
    frozen = [cost for cost in measured.costs if cost.layer < 2]  # no gradient goes back to them
    assert [cost.output_gradient_bytes for cost in frozen] == [0] * 2 * sizes
    assert [cost.kept_bytes for cost in frozen if cost.layer == 0] == [0] * sizes
    loss = [cost for cost in measured.costs if cost.layer == len(measured.layers) - 1]
    assert all(cost.output_bytes == 0 and cost.kept_bytes > 0 and cost.backward_s > 0 for cost in loss)


def test_a_loss_that_selects_by_a_mask(traced_case: Callable[[str], Traced]) -> None:
    """Fake tensors cannot follow it, since its shapes depend on data: a real run says what it keeps."""
    _, ids, sequence = traced_case("gpt")

    def masked(logits: Tensor, target: Tensor) -> Tensor:
        wanted = target > 3
        return functional.cross_entropy(logits[wanted], target[wanted])

    measured = _quick(sequence, ids, loss_fn=masked, target=ids, micro_batch_sizes=[1, 2])
    for size in (1, 2):
        inputs = micro_batch(sequence, ids, size, torch.device("cpu"))
        ((kept_bytes, _),) = run_stages(sequence, [0, len(sequence)], inputs, masked, ids[:size], has_loss=True)
        assert sum(cost.kept_bytes for cost in measured.costs if cost.micro_batch_size == size) == kept_bytes


@pytest.mark.parametrize("devices", [1, Cluster.of("T4")])
def test_a_loss_that_trains_nothing_is_refused(devices: Any) -> None:
    """Its backward pass takes no time and no memory, and a plan by that would be wrong without a word."""
    model, x, y = nn.Linear(8, 3), torch.randn(4, 8), torch.zeros(4, 3)
    with pytest.raises(ArgumentError, match=r"the loss depends on no trainable parameter.*detach\(\)"):
        _quick(model, x, devices=devices, loss_fn=lambda out, want: functional.mse_loss(out, want).detach(), target=y)


def test_layers_are_measured_under_autocast(traced_case: Callable[[str], Traced]) -> None:
    model, ids, sequence = traced_case("gpt")
    sequences = (sequence, trace(model, ids, autocast=torch.bfloat16))
    whole, half = (_quick(one, ids, micro_batch_sizes=[2]) for one in sequences)
    wide, wide_half = (
        next(cost for cost, layer in zip(found.costs, found.layers, strict=True) if "wide" in layer.name)
        for found in (whole, half)
    )
    assert wide_half.output_bytes < wide.output_bytes


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("devices", [1, Cluster.of("T4")])
def test_a_model_is_measured_as_it_trains_whatever_stands_around(around: Callable[[], Any], devices: Any) -> None:
    model, x, y = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 8), torch.zeros(4, 3)
    settings: dict[str, Any] = {"devices": devices, "loss_fn": functional.mse_loss, "micro_batch_sizes": [2]}
    expected = _quick(model, x, target=y, **settings)
    with around():
        x, y = x * 1, y * 1  # in inference mode autograd cannot keep them
        measured = _quick(model, x, target=y, **settings)
        assert torch.is_grad_enabled() == (around not in (torch.no_grad, torch.inference_mode))
    for cost, like in zip(measured.costs, expected.costs, strict=True):
        assert (cost.kept_bytes, cost.transient_bytes, cost.output_gradient_bytes) == (
            like.kept_bytes,
            like.transient_bytes,
            like.output_gradient_bytes,
        )


def test_backward_passes_run_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []

    def noted(kept: Kept, gradients: Any) -> Callable[[], None]:
        run.append(len(kept.roots))
        return backward(kept, gradients)

    monkeypatch.setattr("profiler.timing.sweeps.backward", noted)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 4)
    with torch.no_grad():
        _quick(model, x, micro_batch_sizes=[2])
    assert run
    assert all(run)


def test_a_default_device_does_not_matter() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)
    sequence = trace(model, x)
    for sample in (None, x):
        with torch.device("meta"):
            measured = profile(sequence, 1, sample=sample, micro_batch_sizes=[2], time_budget_s=0.0, progress=False)
        assert all(cost.forward_s > 0 for cost in measured.costs)


def test_two_devices_have_a_link_and_a_neighbour(make_case: Callable[[str], Case]) -> None:
    model, x = make_case("dropout")
    measured = _quick(model, x, devices=["cpu", "cpu"], micro_batch_sizes=[1])
    assert len(measured.links) == 1
    assert {cost.device_kind for cost in measured.costs} == {"cpu/1 thread"}
    known = Link(latency_s=1.0, bytes_per_s=1.0)
    cluster = Cluster(devices=(CPU,), link=known)
    assert _quick(model, x, devices=cluster, micro_batch_sizes=[1]).links == (known,)


def test_layers_that_do_not_fit_at_once_are_measured_in_windows(traced_case: Callable[[str], Traced]) -> None:
    assert windows(range(4), [(3, 1), (3, 1), (3, 1), (9, 1)], (6, 9)) == [range(2), range(2, 3), range(3, 4)]
    assert windows(range(2), [(1, 5), (1, 5)], (9, 9)) == [range(1), range(1, 2)]
    _, ids, sequence = traced_case("gpt")
    small = CPU.model_copy(update={"memory_bytes": 60_000})
    measured = _quick(sequence, ids, devices=[small], micro_batch_sizes=[2])
    assert all(cost.forward_s > 0 for cost in measured.costs)


def test_a_size_at_which_a_layer_does_not_fit_is_left_out(traced_case: Callable[[str], Traced]) -> None:
    _, ids, sequence = traced_case("gpt")
    small = CPU.model_copy(update={"memory_bytes": 60_000})
    with pytest.warns(UserWarning, match=r"of 4 samples are left out: layer \d+ \(.*\) needs \d+ bytes by itself"):
        measured = _quick(sequence, ids, devices=[small], micro_batch_sizes=[2, 4])
    assert {cost.micro_batch_size for cost in measured.costs} == {2}
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ProfileError, match="no memory for micro-batches of 2 samples"),
    ):
        _quick(sequence, ids, devices=[CPU.model_copy(update={"memory_bytes": 9_000})], micro_batch_sizes=[2, 4])


def test_sparse_gradients_are_measured() -> None:
    model, ids = (
        nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4)),
        torch.ones(4, 3).long(),
    )
    measured = _quick(model, ids, micro_batch_sizes=[2, 4])
    assert {cost.micro_batch_size for cost in measured.costs} == {2, 4}


def test_a_size_that_an_index_of_a_later_sample_spoils_is_left_out() -> None:
    model, ids = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(24, 4)), torch.zeros(4, 3, dtype=torch.long)
    spoilt = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 20]])
    sequence = trace(model, ids)
    about: dict[str, Any] = {"time_budget_s": 0.0, "progress": False, "cache": False, "sample": spoilt}
    with pytest.warns(UserWarning, match="cannot run micro-batches of 4 samples: IndexError: index out of range"):
        measured = profile(sequence, 1, micro_batch_sizes=[1, 2, 4], **about)
    assert {cost.micro_batch_size for cost in measured.costs} == {1, 2}
    with pytest.raises(ProfileError, match="micro-batches of 4 samples: IndexError"), pytest.warns(UserWarning):
        profile(sequence, 1, micro_batch_sizes=[4], **about)


@pytest.mark.usefixtures("nothing_beside")
@pytest.mark.parametrize("order", [1, -1])
def test_of_devices_of_one_kind_the_smallest_counts(traced_case: Callable[[str], Traced], order: int) -> None:
    _, ids, sequence = traced_case("gpt")
    devices = [CPU.model_copy(update={"memory_bytes": 60_000}), CPU]
    with pytest.warns(UserWarning, match=r"of 4 samples are left out: .* device 'cpu' has 60000"):
        measured = _quick(sequence, ids, devices=devices[::order], micro_batch_sizes=[2, 4])
    assert {cost.micro_batch_size for cost in measured.costs} == {2}


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("devices", [1, Cluster.of("T4")])
def test_a_size_at_which_the_model_cannot_run_is_left_out(place: str, devices: Any) -> None:
    """Batch normalization cannot normalize the one value that a channel has at one sample."""
    with torch.device(place):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(8, 4)
    left_out = "cannot run micro-batches of 1 sample: ValueError: batch normalization .* one per channel"
    with pytest.warns(UserWarning, match=left_out):
        measured = _quick(model, x, devices=devices, batch_size=16)
    assert {cost.micro_batch_size for cost in measured.costs} == {2, 4}
    with (
        pytest.warns(UserWarning, match=left_out),
        pytest.raises(ProfileError, match=f"no .* size is left.*{left_out}"),
    ):
        _quick(model, x, devices=devices, micro_batch_sizes=[1])


@pytest.mark.parametrize("says", ["can't allocate memory", "not enough memory"])
def test_memory_that_runs_out_leaves_sizes_out(
    make_case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    model, x = make_case("dropout")
    real, made = Workload.micro_batch, count()

    def micro_batch(self: Workload, size: int, place: torch.device) -> Any:
        if size == 2 and next(made) > 0:  # fake tensors fit, real ones do not
            raise RuntimeError(
                f"[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: {says}: you tried to allocate 1 bytes"
            )
        return real(self, size, place)

    monkeypatch.setattr(Workload, "micro_batch", micro_batch)
    with pytest.warns(UserWarning, match="no memory for micro-batches of 2 samples; they are left out"):
        assert {cost.micro_batch_size for cost in _quick(model, x, micro_batch_sizes=[1, 2]).costs} == {1}
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ProfileError, match="no memory for micro-batches of 2 samples"),
    ):
        _quick(model, x, micro_batch_sizes=[2])


def test_of_many_equal_layers_a_few_are_swept(
    traced_case: Callable[[str], Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values go on after those that are left out, and these take what equal ones take."""
    monkeypatch.setattr("profiler.run.sampled_layers.LEAST_BYTES", 0)
    run: list[int] = []
    forward = LayerRunner.forward

    def noted(self: LayerRunner, index: int, entered: Any, **settings: Any) -> Any:
        if not settings:  # of a whole backward pass
            run.append(index)
        return forward(self, index, entered, **settings)

    _, ids, sequence = traced_case("gpt")
    assert len(sequence) > 2 * len({layer.signature for layer in sequence.layers})
    monkeypatch.setattr("profiler.timing.sweeps.LayerRunner.forward", noted)
    monkeypatch.setattr("profiler.run.sampled_layers.LEAST_COPIES", 1)
    measured = _quick(sequence, ids, loss_fn=_loss, target=ids, micro_batch_sizes=[1, 2])
    swept = run[-run[::-1].index(0) - 1 :]  # the last sweep
    assert len(set(swept)) == len(swept) < len(sequence) / 2
    assert len({sequence.layers[index].signature for index in swept}) == len(
        {layer.signature for layer in sequence.layers}
    )
    assert all(cost.forward_s > 0 for cost in measured.costs)
    times: dict[str, set[float]] = {}
    for layer, cost in zip(measured.layers[:-1], measured.costs[:-1], strict=False):
        times.setdefault(layer.signature, set()).add(cost.forward_s)
    assert all(len(found) == 1 for found in times.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "devices=0, at least 1"),
        ({"batch_size": -2}, "batch_size: -2 is no size"),
        ({"micro_batch_sizes": []}, "holds 0 sizes"),
        ({"loss_fn": _loss}, "loss_fn without target"),
        ({"target": torch.zeros(4)}, "target without loss_fn"),
        ({"optimizer": "AdaWM"}, "optimizer='AdaWM'; choose one of torch.optim: .*AdamW"),
        ({"time_budget_s": -1.0}, "time_budget_s=-1.0"),
        ({"loss_fn": lambda output, _: output, "target": torch.zeros(4)}, "the loss is a tensor of shape"),
        ({"loss_fn": "mse", "target": torch.zeros(4)}, "loss_fn='mse' cannot be called"),
        ({"loss_fn": lambda _: 0, "target": torch.zeros(4)}, r"loss_fn\(output, target\) raised TypeError: .* takes 1"),
        ({"loss_fn": _loss, "target": torch.full((4,), 99)}, "raised IndexError: Target 99 is out of bounds"),
        ({"loss_fn": _loss, "target": torch.zeros(0)}, "a tensor of 0 samples"),
        ({"micro_batch_sizes": 4}, "micro_batch_sizes=4 is not a list"),
        ({"sample": torch.zeros(4, 9)}, r"shape \[4, 9\]; the model was traced with \[4, 8\]"),
    ],
)
def test_arguments_that_mean_nothing(
    traced_case: Callable[[str], Traced], settings: dict[str, Any], message: str
) -> None:
    _, x, sequence = traced_case("dropout")
    with pytest.raises(ArgumentError, match=message):
        profile(sequence, **{"devices": 1, "sample": x, "progress": False, "time_budget_s": 0.0, **settings})


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2)])
def test_a_model_is_traced_before_it_is_measured(given: Any) -> None:
    with pytest.raises(ArgumentError, match=f"the sequence is a {type(given).__name__}; call trace first"):
        profile(given, 1)


def test_data_sheets_need_a_loss_that_looks_at_no_values() -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return output[target > 3].mean()

    def looking(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() if target.sum().item() else output.sum()

    model, x = nn.Linear(4, 2), torch.randn(4, 4)
    for loss_fn in (masked, looking):
        with pytest.raises(ArgumentError, match=r"loss_fn depends on values \(\w+: .*not there .* from data sheets"):
            _quick(model, x, loss_fn=loss_fn, target=torch.arange(4), devices=Cluster.of("T4"))
    _quick(model, x, loss_fn=looking, target=torch.arange(4), micro_batch_sizes=[2, 4])


def test_readers_of_the_prelude_bear_it_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage computes what its layers read: all on the first reader would make the first stage look slow."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = (1 - mask) * -5.0
            for layer in self.layers:
                x = layer(x) + bias
            return x

    model, sample = Masked(), (torch.randn(2, 4), torch.ones(2, 4))
    sequence = trace(model, sample)
    reading = [layer.index for layer in sequence.layers if sequence.prelude_names & set(layer.values)]
    assert len(reading) == 3
    ticks = count()
    monkeypatch.setattr("profiler.machine.stopwatches._OF_THIS_THREAD", None)  # laps go by the clock
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))  # each lap takes a second
    measured = _quick(sequence, sample, micro_batch_sizes=[2])
    forward = [cost.forward_s for cost in measured.costs]
    readers = {forward[index] for index in reading}
    others = set(forward) - readers
    assert len(readers) == len(others) == 1
    assert max(readers) > max(others)


class Wide(nn.Module):
    """Unlike blocks of which each holds much less than all, with an embedding, a buffer and normalization."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.register_buffer("scale", torch.tensor(0.5))
        self.wide = nn.ModuleList(nn.Linear(128, 512 + 16 * block) for block in range(blocks))
        self.narrow = nn.ModuleList(nn.Linear(512 + 16 * block, 128) for block in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + self.scale * narrow(torch.relu(wide(norm(x))))
        return x


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_model_of_four_times_the_memory_is_measured_within_it(place: str) -> None:
    with torch.device(place):
        model = Wide(blocks=10)
        ids = torch.zeros(8, 4, dtype=torch.int64)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    limit = whole // 4
    sequence = trace(model, ids)
    with allocations() as record:
        measured = profile(
            sequence,
            [CPU.model_copy(update={"memory_bytes": limit})],
            sample=ids,
            micro_batch_sizes=[2],
            time_budget_s=0.0,
            progress=False,
        )
    assert max(accumulate(record)) <= limit
    assert {cost.micro_batch_size for cost in measured.costs} == {2}
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in measured.costs)
    assert all(parameter.device.type == place and parameter.grad is None for parameter in model.parameters())


def test_values_of_a_model_without_any_keep_the_scale_of_what_comes_in() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(600, 700), nn.LayerNorm(700), nn.Linear(700, 600))
        x = torch.zeros(4, 600)
    sequence = trace(model, x)
    pool = ParameterPool(sequence, torch.device("cpu"), room_bytes=0)
    value = torch.randn(4, 600)
    for layer in sequence.layers:
        pool.hold(range(layer.index, layer.index + 1))
        assert len(pool._held) == 1
        parameters = [pool[layer.index, name] for name in layer.parameters]
        assert all(parameter.grad is not None for parameter in parameters)
        (value,) = sequence.on(torch.device("cpu")).layers[layer.index].function(*parameters, value)
        assert 0.5 < value.std() < 2
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in optimizer_names() if name != "Muon"])
def test_optimizer_state_is_that_of_a_real_step(name: str) -> None:
    parameters = [torch.ones(30, 20, requires_grad=True), torch.ones(7, requires_grad=True), torch.zeros(9)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = getattr(torch.optim, name)(parameters[:2])
    optimizer.step()
    held = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor) and leaf.dim()]
    found = optimizer_cost(name, parameters, CPU, budget_s=0.0)
    assert found.state_bytes_per_byte == pytest.approx(sum(leaf.nbytes for leaf in held) / (4 * 607))
    assert found.seconds_per_byte > 0


def test_optimizer_state_is_of_whole_parameters() -> None:
    """Adafactor holds a row and a column of each; of what the device can hold, a part of the rows would say more."""
    parameter = torch.zeros(4096, 64, requires_grad=True)
    found = optimizer_cost("Adafactor", [parameter], CPU.model_copy(update={"memory_bytes": 2**17}), budget_s=0.0)
    assert found.state_bytes_per_byte == (4096 + 64) / (4096 * 64)


def test_optimizers() -> None:
    assert {"AdamW", "SGD", "Adafactor"} <= set(optimizer_names())
    for name in ("LBFGS", "Optimizer", "adamw"):
        with pytest.raises(ArgumentError, match=f"optimizer='{name}'; choose one of"):
            check_optimizer(name)
    nothing = optimizer_cost("AdamW", [torch.zeros(3)], CPU)
    assert (nothing.seconds_per_byte, nothing.state_bytes_per_byte) == (0.0, 0.0)
    with pytest.raises(ArgumentError, match="optimizer='Muon' cannot train this model"):
        optimizer_cost("Muon", [torch.zeros(3, requires_grad=True)], CPU)
