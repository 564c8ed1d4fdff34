"""Devices from data sheets, and costs that are counted instead of measured."""

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from profiler import ArgumentError, Cluster, Device, Link, profile, trace
from profiler.datasheets import DATA_SHEETS, LINK_EFFICIENCY, LINKS
from profiler.machine.local import local_devices
from profiler.record import LayerCost, Profile
from profiler.run import main_gradients
from profiler.run.inputs import fake_runner, micro_batch
from profiler.timing.counted_work import Arithmetic, LayerWork, Operations, work_of_layers
from profiler.timing.rate_fit import fitted_rates
from profiler.timing.roofline import Rates, estimated_optimizer, operation_seconds, seconds_of

CPU = torch.device("cpu")


def mlp(width=64, blocks=3, device="cpu"):
    with torch.device(device):
        layers = [part for _ in range(blocks) for part in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers)


def test_a_cluster_from_its_text():
    cluster = Cluster.of("3xA100-40GB,T4", link="pcie4", devices_per_host=2)
    assert [device.kind for device in cluster.devices] == ["A100-40GB"] * 3 + ["T4-16GB"]
    assert [device.name for device in cluster.devices] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert cluster.devices[0].memory_bytes == int(39.5 * 2**30)
    assert cluster.link is not None
    assert cluster.link.bytes_per_s == LINK_EFFICIENCY * 31.5e9
    assert Cluster.of("H100").link is None


@pytest.mark.parametrize("kind", DATA_SHEETS)
def test_memory_is_that_of_powers_of_two_less_what_the_driver_takes(kind):
    printed_gib = float(kind.rpartition("-")[2].removesuffix("GB"))
    assert 0.9 < DATA_SHEETS[kind].memory_bytes / 2**30 / printed_gib < 1.01, kind


def test_a_cluster_as_people_write_it():
    cluster = Cluster.of("16XRTX4090 : PCIe4")
    assert {device.kind for device in cluster.devices} == {"RTX4090-24GB"}
    assert cluster.link == Link.of("pcie4")
    assert Cluster.of("2xh100") == Cluster.of("2xH100-80GB", link="NVLink4")
    assert Cluster.of("7xA100-80GB,T4").link == Link.of("pcie3")  # the slower of what each of them usually has
    assert local_devices("2xa100-40gb, t4") == Cluster.of("2xA100-40GB,T4-16GB")


@pytest.mark.parametrize(
    ("text", "link", "message"),
    [
        ("8xA100-99GB", "nvlink3", r"no data sheet of a device 'A100-99GB'; did you mean A100-.0GB"),
        ("A100", "nvlink3", r"which A100: A100-40GB or A100-80GB"),
        ("9xT4", None, r"9 devices without a link between them, and a host has 8; name the link between hosts"),
        ("2xT4:pcie4", "pcie3", r"'2xT4:pcie4' names a link, 'pcie4', and link is 'pcie3'"),
        ("2xT4:", None, r"no data sheet of a link ''"),
        ("999999xT4", "pcie3", r"'999999xT4' names more than \d+ devices"),
        ("2xT4", "string", r"no data sheet of a link 'string'; known are nvlink1"),
        ("0xT4", "pcie3", r"'0xT4' is not a count and a kind of device"),
        ("", "pcie3", r"'' is not a count and a kind"),
        (f"{10**20}xT4", "pcie3", r"no data sheet of a device '1000"),
        ("8x A100 40GB", "pcie3", r"is not a count and a kind"),
    ],
)
def test_what_is_no_cluster_is_refused(text, link, message):
    with pytest.raises(ArgumentError, match=message):
        Cluster.of(text, link=link)


def test_every_entry_has_a_source():
    assert all(sheet.source for sheet in DATA_SHEETS.values())
    assert all(sheet.source for sheet in LINKS.values())
    assert {sheet.link for sheet in DATA_SHEETS.values()} <= LINKS.keys()
    assert all(
        sheet.half_flops_per_s >= sheet.tf32_flops_per_s >= sheet.float32_flops_per_s for sheet in DATA_SHEETS.values()
    )


def test_work_is_counted_by_hand():
    model = nn.Linear(16, 32)
    x = torch.randn(4, 16)
    sequence = trace(model, x)
    inputs = micro_batch(sequence, x, 4, CPU)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
        (work,) = work_of_layers(sequence, runner, 4)
    assert work.forward.flops.sum() == 2 * 4 * 16 * 32
    assert work.backward.flops.sum() == 2 * 4 * 16 * 32  # the input needs no gradient
    product = work.forward.names.index("aten::addmm")
    assert work.forward.size_bytes[product] == 4 * (4 * 16 + 16 * 32 + 32 + 4 * 32)


@pytest.mark.parametrize(
    ("model", "shape", "forward", "backward"),
    [
        (nn.BatchNorm2d(8), (4, 8, 4, 4), 3, 5),  # what a channel's sums need is read once more with them
        (nn.GroupNorm(2, 8), (4, 8, 4, 4), 3, 5),
        (nn.LayerNorm(64), (64, 64), 2, 5),  # its sums are of a row, which stays; weight and bias have their own kernel
    ],
)
def test_what_is_read_twice_counts_twice(model: nn.Module, shape: tuple[int, ...], forward: int, backward: int) -> None:
    x = torch.randn(*shape)
    before = nn.Linear(64, 64) if len(shape) == 2 else nn.Conv2d(8, 8, 1)  # it needs a gradient of its output
    sequence = trace(nn.Sequential(before, model), x)
    inputs = micro_batch(sequence, x, shape[0], CPU)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
        *_, work = work_of_layers(sequence, runner, shape[0])
    for operations, times in ((work.forward, forward), (work.backward, backward)):
        norm = next(k for k, name in enumerate(operations.names) if "_norm" in name)
        assert operations.size_bytes[norm] / x.nbytes == pytest.approx(times, abs=0.3)  # and a little for parameters


def test_a_gradient_that_the_host_adds_in_pieces_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(4, 64)

    def names() -> tuple[str, ...]:
        sequence = trace(model, x, precision="bf16-mixed")
        inputs = micro_batch(sequence, x, 4, CPU)
        with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
            work = work_of_layers(sequence, runner, 4)
        return tuple(name for layer in work for name in layer.backward.names)

    whole = names()
    monkeypatch.setattr(main_gradients, "CAST_ELEMENTS", 1024)
    assert names() == whole
    assert whole.count("aten::add_") == 1


def test_an_operation_takes_the_longest_of_arithmetic_memory_and_launch():
    rates = Rates(100.0, 50.0, 200.0, 150.0, 25.0, 10.0, 0.5)
    operations = Operations(
        ("product", "convolution", "sum", "view", "double"),
        np.array([1000.0, 1000.0, 0.0, 0.0, 1000.0]),
        np.array([10.0, 10.0, 70.0, 0.0, 10.0]),
        np.array([0, 1, 0, 0, 4]),
        np.array([True, True, True, True, True]),
    )
    assert operation_seconds(operations, rates).tolist() == [10.0, 20.0, 7.0, 0.5, 40.0]
    slower = replace(operations, aligned=np.array([False, True, False, True, True]))
    assert operation_seconds(slower, replace(rates, unaligned=0.25)).tolist() == [40.0, 20.0, 7.0, 0.5, 40.0]


@pytest.mark.parametrize(
    ("words", "width", "aligned"), [(5_032, 64, True), (5_025, 64, False), (5_032, 60, False), (5_028, 64, False)]
)
def test_rows_that_do_not_begin_where_matrix_units_load_are_slower(words: int, width: int, aligned: bool):
    """As of a vocabulary that nobody rounded up: forward, and both products of the backward pass."""
    model = nn.Sequential(nn.Linear(8, width, bias=False), nn.Linear(width, words, bias=False)).bfloat16()
    x = torch.zeros(8, 8, dtype=torch.bfloat16)
    for operations, count in zip(_both_ways(model, x), (1, 2), strict=True):
        products = operations.flops == operations.flops.max()
        assert products.sum() == count
        assert (operations.aligned[products] == aligned).all()
    assert all(operations.aligned.all() for operations in _both_ways(model.float(), x.float()))


def _both_ways(model: nn.Module, x: torch.Tensor) -> tuple[Operations, Operations]:
    sequence = trace(model, x)
    inputs = micro_batch(sequence, x, len(x), CPU)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
        work = work_of_layers(sequence, runner, len(x))
    return work[-1].forward, work[-1].backward


def test_a_fit_finds_the_rates_that_times_were_made_with():
    generator = np.random.default_rng(0)
    true = Rates(3e10, 1e10, 5e10, 4e10, 2e10, 4e9, 2e-5)

    def some():
        count = int(generator.integers(1, 6))
        return Operations(
            tuple("abcdef"[:count]),
            10 ** generator.uniform(4, 9, count) * (generator.random(count) < 0.6),
            10 ** generator.uniform(3, 7, count),
            generator.integers(0, 3, count),
            np.ones(count, bool),
        )

    layers = [LayerWork(some(), some(), some(), 0) for _ in range(60)]
    costs = []
    for index, layer in enumerate(layers):
        ((forward_s, backward_s, _),) = seconds_of([layer], true)
        costs.append(
            LayerCost(
                layer=index, micro_batch_size=1, device_kind="cpu", forward_s=forward_s, recompute_s=0.0,
                backward_s=backward_s, spread=0.0, kept_bytes=0, transient_bytes=0, output_bytes=0,
                output_gradient_bytes=0,
            )
        )  # fmt: skip
    rates, error = fitted_rates([({1: layers}, costs)], Rates(1e10, 1e10, 1e10, 1e10, 1e10, 1e10, 1e-5))
    assert error < 1e-3
    assert rates.float32_flops_per_s == pytest.approx(true.float32_flops_per_s, rel=1e-2)
    assert rates.memory_bytes_per_s == pytest.approx(true.memory_bytes_per_s, rel=1e-2)


@pytest.mark.parametrize(("name", "state"), [("SGD", 0.0), ("RMSprop", 1.0), ("AdamW", 2.0), ("Adagrad", 1.0)])
def test_optimizer_state_is_the_optimizers_own(name, state):
    cost = estimated_optimizer(name, "T4-16GB", [nn.Parameter(torch.empty(8, 8, device="meta"))], Rates.of("T4"))
    assert cost.state_bytes_per_byte == state
    assert cost.seconds_per_byte == pytest.approx((4 + 2 * state) / Rates.of("T4").memory_bytes_per_s)


def test_a_meta_model_is_profiled_for_devices_that_are_not_here(tmp_path):
    model = mlp(device="meta")
    sample = torch.empty(8, 64, device="meta")
    cluster = Cluster.of("2xA100-40GB,2xV100-16GB", link="nvlink2")

    def profiled(model, sample):
        about = {"loss_fn": functional.mse_loss, "target": sample, "batch_size": 32}
        return profile(trace(model, sample), cluster, sample=sample, progress=False, **about)

    found, real = profiled(model, sample), profiled(mlp(), torch.randn(8, 64))
    assert found.costs == real.costs
    assert {cost.device_kind for cost in found.costs} == {"A100-40GB", "V100-16GB"}
    assert found.links == (cluster.link,)
    assert [estimate.device_kind for estimate in found.estimates] == ["A100-40GB", "V100-16GB"]
    shares = {entry.operation: entry.share_of_bytes for entry in found.estimates[0].without_formula}
    assert "aten::gelu" in shares
    assert "aten::addmm" not in shares
    assert 0 < sum(shares.values()) < 1
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found


def test_sizes_between_two_are_what_they_are_by_themselves():
    """Work and bytes between the smallest and the largest size lie on a line."""
    sequence = trace(mlp(), torch.randn(8, 64))
    cluster = Cluster.of("T4")
    line = profile(sequence, cluster, micro_batch_sizes=[1, 3, 8], progress=False)
    alone = profile(sequence, cluster, micro_batch_sizes=[3], progress=False)
    between = [cost for cost in line.costs if cost.micro_batch_size == 3]
    for one, other in zip(between, alone.costs, strict=True):
        assert one.forward_s == pytest.approx(other.forward_s)
        assert one.backward_s == pytest.approx(other.backward_s)
        assert one.kept_bytes == other.kept_bytes
        assert one.transient_bytes >= other.transient_bytes


def test_half_precision_is_faster_where_the_device_is():
    sample = torch.randn(8, 2048)
    cluster = Cluster.of("A100-40GB")
    single, half = (
        profile(trace(mlp(2048, 1), sample, autocast=autocast), cluster, batch_size=2**15, progress=False)
        for autocast in (None, torch.bfloat16)
    )
    assert sum(cost.forward_s for cost in single.costs) > 2 * sum(cost.forward_s for cost in half.costs)


@pytest.mark.parametrize(("kind", "slower"), [("V100-16GB", 15.7 / 125), ("T4", 8.1 / 65), ("A100-40GB", 1.0)])
def test_bfloat16_needs_matrix_units_that_know_it(kind, slower):
    half, brain = (_forward_s(kind, width=6144, autocast=dtype) for dtype in (torch.float16, torch.bfloat16))
    assert half / brain == pytest.approx(slower, rel=0.2)


def test_float64_has_its_own_rate():
    assert _forward_s("T4") / _forward_s("T4", dtype=torch.float64) == pytest.approx(1 / 32, rel=0.05)
    assert _forward_s("A100-40GB") == pytest.approx(_forward_s("A100-40GB", dtype=torch.float64), rel=0.1)
    with pytest.raises(ArgumentError, match="multiplies in float64"):
        _forward_s("TPUv3", dtype=torch.float64)


def _forward_s(kind, *, width=3072, autocast=None, dtype=torch.float32):
    """Seconds of a matrix product so large that nothing else counts; casts do up to a larger one."""
    with torch.device("meta"):
        model, sample = nn.Linear(width, width, bias=False, dtype=dtype), torch.empty(width, width, dtype=dtype)
    sequence = trace(model, sample, autocast=autocast)
    return sum(
        cost.forward_s for cost in profile(sequence, Cluster.of(kind), micro_batch_sizes=[width], progress=False).costs
    )


def test_listed_and_local_devices_do_not_mix():
    local = Device(name="cpu", kind="cpu/1 thread", memory_bytes=2**30, threads=1)
    cluster = Cluster(devices=(Device.of("T4"), local), link=Link.of("pcie3"))
    with pytest.raises(ArgumentError, match="mixes devices from data sheets with cpu/1 thread"):
        profile(trace(mlp(), torch.randn(8, 64)), cluster, progress=False)


def test_the_loss_belongs_to_the_last_layer():
    sample, target = torch.randn(8, 64), torch.randn(8, 64)
    sequence = trace(mlp(), sample)
    without = profile(sequence, Cluster.of("T4"), progress=False)
    with_loss = profile(sequence, Cluster.of("T4"), loss_fn=functional.mse_loss, target=target, progress=False)
    assert with_loss.costs[-1].forward_s > without.costs[-1].forward_s


class OverwrittenAside(nn.Module):
    """`aside` has no part in the loss, and what its backward pass would need is overwritten."""

    def __init__(self):
        super().__init__()
        self.first, self.aside, self.second, self.third = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        hidden = self.first(x)
        aside = self.aside(hidden)
        hidden.tanh_()
        return self.third(torch.tanh(self.second(x))), aside, hidden


def test_what_has_no_part_in_the_loss_has_no_backward_pass():
    """Each layer was given gradients of all that leaves it: a micro-batch that trains was left out, as untrainable."""
    sample, target = torch.randn(4, 8), torch.randn(4, 8)
    model = OverwrittenAside()
    functional.mse_loss(model(sample)[0], target).backward()  # torch itself has nothing against it
    assert model.first.weight.grad is None
    sequence = trace(model, sample)

    def loss_fn(output, target):
        return functional.mse_loss(output[0], target)

    with warnings.catch_warnings(action="error"):
        found = profile(
            sequence, Cluster.of("T4"), loss_fn=loss_fn, target=target, micro_batch_sizes=[1, 2, 4], progress=False,
            cache=False,
        )  # fmt: skip
    assert {1, 4} <= {cost.micro_batch_size for cost in found.costs}
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for layer in sequence.layers:
        costs = [cost for cost in found.costs if cost.layer == layer.index]
        if layer.parameters and "linear" in " ".join(layer.operations):
            assert all((cost.backward_s > 0) == (not trained.isdisjoint(layer.parameters)) for cost in costs), layer


def test_equal_layers_of_which_one_has_no_part_in_the_loss():
    """They have one signature, and yet not the same work."""

    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.side = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
            self.main = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, x):
            return self.side(x), self.main(x)

    def loss_fn(output, target):
        return functional.mse_loss(output[1], target)

    x = torch.randn(4, 64)
    sequence = trace(Side(), x)
    found = profile(
        sequence, Cluster.of("T4"), loss_fn=loss_fn, target=x, micro_batch_sizes=[4], progress=False, cache=False
    )
    assert len(sequence) > 3
    for layer in sequence.layers:
        side = any(name.startswith("side") for name in layer.parameters)
        main = any(name.startswith("main") for name in layer.parameters)
        assert side != main
        assert (found.costs[layer.index].backward_s > 0) == main, layer.index


class Mixing(nn.Module):
    """Attention that drops a share, and dropout of its own."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.linear(x).unflatten(-1, (2, 16)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(parts, parts, parts, dropout_p=self.share)
        return self.dropout(mixed.transpose(1, 2).flatten(2))


def test_attention_that_drops_is_priced_as_accelerators_run_it() -> None:
    """Fake tensors of the host took it apart, with all shares kept and products in float32: 3 times the step."""
    found = {}
    for share in (0.0, 0.1):
        sequence = trace(Mixing(share), torch.zeros(2, 512, 32), precision="bf16", progress=False)
        listed = profile(sequence, Cluster.of("A100-40GB"), micro_batch_sizes=[2], progress=False)
        found[share] = sum(cost.forward_s for cost in listed.costs), sum(cost.kept_bytes for cost in listed.costs)
        assert all("softmax" not in entry.operation for entry in listed.estimates[0].without_formula)
    (plain_s, plain_bytes), (dropping_s, dropping_bytes) = found[0.0], found[0.1]
    assert plain_s <= dropping_s < 1.5 * plain_s
    assert plain_bytes == dropping_bytes
    elements = 2 * 512 * 32
    assert found[0.1][1] < 2 * 512 * 512  # bytes of the shares alone, where they are kept
    assert found[0.1][1] > elements  # a byte for each that dropout may drop


def _operations(*seconds: float) -> Operations:
    return Operations(
        ("a",) * len(seconds),
        np.zeros(len(seconds)),
        np.array(seconds),
        np.full(len(seconds), Arithmetic.FLOAT32),
        np.ones(len(seconds), bool),
    )


def _layer(*seconds: float) -> LayerWork:
    return LayerWork(_operations(*seconds), _operations(*reversed(seconds)), _operations(), 0)


def _rates(dispatch_s: float) -> Rates:
    return Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, dispatch_s)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_dropout_that_drops_nothing_or_all_has_no_kernel_of_its_own(share: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(share), nn.LayerNorm(8), nn.Dropout(share), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = profile(
            trace(model, torch.zeros(4, 8)), Cluster.of("A100-40GB"), micro_batch_sizes=[1, 2, 4], progress=False
        )
    assert {cost.micro_batch_size for cost in found.costs} == {1, 2, 4}


def test_a_device_waits_to_be_asked_or_has_still_work_when_it_is() -> None:
    small, large = _layer(0.1, 2.0), _layer(10.0)
    assert seconds_of([small], _rates(3.0)) == [(3.0 + 3.0 + 2.0, 3.0 + 3.0 + 0.5, 0.0)]
    assert seconds_of([large], _rates(3.0)) == [(13.0, 13.0, 0.0)]
    assert seconds_of([small, large], _rates(0.0)) == [(2.5, 2.5, 0.0), (10.0, 10.0, 0.0)]
    (_, back_s, _), _ = seconds_of([small, large], _rates(3.0))  # back through the large one first, for 13 s
    assert back_s == pytest.approx(2.0 + 0.5), "the host has asked for both when the large one ends"


@given(seconds=st.lists(st.floats(0.5, 20.0), min_size=1, max_size=12), data=st.data(), dispatch_s=st.floats(0.0, 20.0))
def test_however_finely_it_is_cut_a_pass_takes_what_its_queue_takes(
    seconds: list[float], data: st.DataObject, dispatch_s: float
) -> None:
    """It ends when the operation ends that the device had to be asked for and has worked from on without a pause."""
    waits = ((number + 1) * dispatch_s + sum(seconds[number:]) for number in range(len(seconds)))
    whole_s = max(waits)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(seconds)))) - {len(seconds)})
    parts = [seconds[first:stop] for first, stop in pairwise([0, *cuts, len(seconds)])]
    found = seconds_of([_layer(*part) for part in parts], _rates(dispatch_s))
    assert sum(forward_s for forward_s, _, _ in found) == pytest.approx(whole_s)


def test_equal_layers_take_the_same_wherever_they_are() -> None:
    layer = _layer(0.7, 1.3, 11.1)
    times = [forward_s for forward_s, _, _ in seconds_of([layer] * 40, _rates(3.0))]
    assert len(set(times[1:])) == 1


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.empty_like(x).fill_(2.0)


def test_memory_that_is_only_taken_costs_no_time() -> None:
    sequence = trace(Filling(), torch.zeros(2, 4), progress=False)
    inputs = micro_batch(sequence, None, 2, CPU)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
        names = [name for layer in work_of_layers(sequence, runner, 2) for name in layer.forward.names]
    assert "aten::fill_" in names
    assert not any("empty" in name for name in names)
