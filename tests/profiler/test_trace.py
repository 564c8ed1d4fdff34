"""Tracing, and running what was traced."""

import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler import LayerSequence, NotTraceableError, trace
from profiler.errors import ArgumentError
from profiler.opaque.keeping_nothing import keeping_nothing
from profiler.precision import autocast_named
from profiler.run.loss import model_output
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
from profiler.sample_spec import SampleSpec
from profiler.tracing.sample import DTYPES, call_arguments, tensor_leaves
from tests.coverage.fidelity import ByNumber, by_one

Case = tuple[nn.Module, Any]
Traced = tuple[nn.Module, Any, LayerSequence]


def _run(sequence: LayerSequence, sample: Any, cuts: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Output leaves and gradients with the sequence cut at these layers; the loss is the sum of squares."""
    aliases = {
        (layer.index, name): sequence.parameters[name].detach().requires_grad_(sequence.parameters[name].requires_grad)
        for layer in sequence.layers
        for name in layer.parameters
    }
    inputs = dict(zip(sequence.inputs, tensor_leaves(sample, sequence.sample), strict=True))
    stages = [StageFunction(sequence, *bounds, aliases) for bounds in pairwise([0, *cuts, len(sequence)])]
    values: Mapping[str, Tensor] = {}
    kept = []
    for stage in stages:
        leaves = leaves_of(values, stage.entering)
        values = stage.forward(leaves, inputs, sequence.buffers, seed=ByNumber()).values
        kept.append(KeptPass(leaves, roots_of(values)))
    gradients: Mapping[str, Tensor | None] = {name: 2 * value.detach() for name, value in values.items()}
    for passed in reversed(kept):
        gradients = run_backward(passed, {name: g for name, g in gradients.items() if g is not None})
    summed: dict[str, Tensor] = {}
    for (_, name), alias in sorted(aliases.items()):
        if alias.grad is not None:
            summed[name] = summed[name] + alias.grad if name in summed else alias.grad
    return [leaf.detach() for leaf in pytree.tree_leaves(model_output(sequence, values))], summed


def _eager(model: nn.Module, sample: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    args, kwargs = call_arguments(sample)
    outputs = pytree.tree_leaves(model(*args, **kwargs))
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [output.detach() for output in outputs], gradients


def _close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp(min=1e-3)
    return bool((found - expected).abs().max() <= 1e-5 * scale)


def test_layers_compute_what_the_model_computes(traced_case: Callable[[str], Traced], case_name: str) -> None:
    model, sample, sequence = traced_case(case_name)
    outputs, gradients = _run(sequence, sample, [])
    expected, expected_gradients = _eager(model, sample)
    assert len(outputs) == len(expected)
    assert all(_close(*pair) for pair in zip(outputs, expected, strict=True))
    gradients = {sequence.aliases[name][0]: gradient for name, gradient in gradients.items()}
    assert gradients.keys() == expected_gradients.keys()
    assert all(_close(gradients[name], expected_gradients[name]) for name in gradients)


@pytest.fixture(params=["gpt", "cnn", "lstm", "masked", "keywords"])
def case_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cuts_change_no_bit(each_traced: Traced, data: st.DataObject) -> None:
    _, sample, sequence = each_traced
    positions = st.integers(1, len(sequence) - 1)
    cuts = sorted(data.draw(st.sets(positions, min_size=1, max_size=4)))
    outputs, gradients = _run(sequence, sample, cuts)
    expected, expected_gradients = _run(sequence, sample, [])
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    assert gradients.keys() == expected_gradients.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], expected_gradients[name])] == []


def test_other_batches_run_on_the_same_layers(traced_case: Callable[[str], Traced], case_name: str) -> None:
    model, sample, sequence = traced_case(case_name)
    for size in (1, 3, 7) if case_name != "cnn" else (2, 3, 7):
        other = pytree.tree_map(lambda leaf, n=size: leaf[torch.arange(n) % leaf.shape[0]], sample)
        outputs, _ = _run(sequence, other, [len(sequence) // 2])
        expected, _ = _eager(model, other)
        assert all(_close(*pair) for pair in zip(outputs, expected, strict=True))


def test_a_sample_of_one_gives_the_same_layers(traced_case: Callable[[str], Traced]) -> None:
    model, ids, sequence = traced_case("gpt")
    assert trace(model, ids[:1]).fingerprint == sequence.fingerprint
    assert sequence.sample.batch_size == 4


def test_tracing_and_running_leave_the_model_alone(make_case: Callable[[str], Case]) -> None:
    model, images = make_case("cnn")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sequence = trace(model, images)
    _run(sequence, images, [2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


class _Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count.add_(1)
        return self.last(x * self.count)


def test_a_written_buffer_is_returned_not_written() -> None:
    model, x = _Counting(), torch.randn(3, 4)
    sequence = trace(model, x)
    aliases: dict[tuple[int, str], Tensor] = {
        (layer.index, name): sequence.parameters[name] for layer in sequence.layers for name in layer.parameters
    }
    stage = StageFunction(sequence, 0, len(sequence), aliases)
    results = stage.forward({}, {sequence.inputs[0]: x}, sequence.buffers)
    assert model.count == 0
    assert {name: float(value) for name, value in results.buffers.items()} == {"count": 1.0}


class _CountingByAssignment(_Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.count *= 2
        self.count += 1
        return self.last(self.first(x).relu())


def test_a_counter_that_is_assigned_to_leaves_the_cuts_after_it() -> None:
    """Export ended the graph with a copy of the counter onto itself: the whole model was one layer."""
    model, x = _CountingByAssignment(), torch.randn(3, 4)
    sequence = trace(model, x)
    assert len(sequence) == 3
    assert [layer.buffers for layer in sequence.layers] == [("count",), (), ()]
    stage = StageFunction(
        sequence, 0, 1, {(0, name): sequence.parameters[name] for name in sequence.layers[0].parameters}
    )
    results = stage.forward({}, {sequence.inputs[0]: x}, {"count": torch.full((), 3.0)})
    assert {name: float(value) for name, value in results.buffers.items()} == {"count": 7.0}


def test_statistics_are_those_of_the_micro_batch(traced_case: Callable[[str], Traced]) -> None:
    model, images, sequence = traced_case("cnn")
    stage = StageFunction(
        sequence,
        0,
        len(sequence),
        {(layer.index, name): sequence.parameters[name] for layer in sequence.layers for name in layer.parameters},
    )
    statistics = stage.forward({}, {sequence.inputs[0]: images}, sequence.buffers).statistics
    assert [entry.running_mean for entry, *_ in statistics] == [f"norms.{index}.running_mean" for index in range(3)]
    convolved = model.get_submodule("first")(images)
    assert torch.allclose(statistics[0][1], convolved.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(statistics[0][2], convolved.var((0, 2, 3)), atol=1e-6)
    assert int(statistics[0][3]) == convolved.numel() // 8


def test_equal_blocks_have_equal_signatures(traced_case: Callable[[str], Traced]) -> None:
    model, ids, sequence = traced_case("gpt")

    def signatures(block: int) -> list[str]:
        paths = f"blocks.{block}"
        return [layer.signature for layer in sequence.layers if all(paths in path for path in layer.module_paths)]

    assert signatures(0)
    assert signatures(0) == signatures(1) == signatures(2)
    other = trace(type(model)(width=32), ids)
    assert not {layer.signature for layer in other.layers} & {layer.signature for layer in sequence.layers}


def test_layers_share_a_function_where_they_do_the_same() -> None:
    slopes = (0.1, 0.2, 0.1)
    model = nn.Sequential(*(part for slope in slopes for part in (nn.Linear(4, 4), nn.LeakyReLU(slope))))
    sequence = trace(model, torch.randn(2, 4))
    functions = [layer.function for layer in sequence.layers]
    linear, leaky = functions[::2], functions[1::2]
    assert linear[0] == linear[1] == linear[2]
    assert leaky[0] == leaky[2] != leaky[1]


def test_a_tied_parameter_is_one_parameter_of_two_layers(traced_case: Callable[[str], Traced]) -> None:
    sequence = traced_case("gpt")[2]
    ((name, users),) = sequence.tied.items()
    assert set(sequence.aliases[name]) == {"embedding.weight", "head.weight"}
    assert users == (0, len(sequence) - 1)


def test_forward_that_keeps_nothing_computes_the_same(traced_case: Callable[[str], Traced], case_name: str) -> None:
    _, sample, sequence = traced_case(case_name)
    aliases: dict[tuple[int, str], Tensor] = {
        (layer.index, name): sequence.parameters[name] for layer in sequence.layers for name in layer.parameters
    }
    stage = StageFunction(sequence, 0, len(sequence), aliases)
    inputs = dict(zip(sequence.inputs, tensor_leaves(sample, sequence.sample), strict=True))
    expected = stage.forward({}, inputs, sequence.buffers).values
    with keeping_nothing():
        found = stage.forward({}, inputs, sequence.buffers).values
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_frozen_parameter_belongs_to_a_layer() -> None:
    """Its product with an input carries no gradient, and yet it must not be computed on every stage."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    model[0].requires_grad_(False)
    sequence = trace(model, x)
    assert [name for layer in sequence.layers for name in layer.parameters] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    outputs, _ = _run(sequence, x, [1])
    assert torch.equal(outputs[0], model(x).detach())


class _Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_a_branch_on_data_names_module_and_line() -> None:
    model = _Outer()
    with pytest.raises(NotTraceableError) as caught:
        trace(model, by_one("export", torch.randn(2, 4)))
    message = str(caught.value)
    line = _Inner.forward.__code__.co_firstlineno + 1
    assert "module 'last.1'" in message
    assert f"{__file__}:{line}" in message
    assert "if x.sum() > 0:" in message
    assert "torch.where" in message


def test_a_model_made_in_inference_mode_is_said_to_be_one() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(NotTraceableError, match=r"'0\.weight' was made within torch\.inference_mode\(\)"):
        trace(model, torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("model", "sample", "message"),
    [
        ("model", torch.zeros(2), "the model is a str"),
        (nn.Linear(2, 2), 7, "no tensor with a batch dimension"),
        (nn.Linear(2, 2), torch.zeros(0, 2), "extent 0"),
        (nn.Linear(2, 2), (torch.zeros(2, 2), object()), "holds a object"),
    ],
)
def test_what_cannot_be_traced(model: Any, sample: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        trace(model, sample)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Trying(nn.Module):
    """Finds out by trying which of its modules take lengths, as speechbrain's do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x, lengths=None)
            except TypeError:
                x = block(x)
        return x


def test_a_call_that_fails_and_is_caught_leaves_no_trace() -> None:
    """torch kept the module on the stack of those that are called: `Unexpected key _export_root.blocks.0`."""
    sequence = trace(Trying(), torch.randn(4, 4))
    assert sequence.sample.front_end == "export"
    assert [layer.name.split(".")[1] for layer in sequence.layers] == list("001122")


def test_autocast_takes_the_types_that_torch_casts_to_and_files_hold() -> None:
    """Of others a plan was made, saved and trained by, in the model's own types, and could not be loaded."""
    model, sample = nn.Linear(2, 2), torch.ones(2, 2)
    for dtype in set(DTYPES.values()):
        try:
            with warnings.catch_warnings(action="error"), torch.autocast("cpu", dtype):
                casts = model(sample).dtype == dtype
        except UserWarning:
            casts = False
        if casts:
            assert (
                SampleSpec(batch_size=1, tree="", leaves=(), autocast=autocast_named(dtype)).autocast == str(dtype)[6:]
            )
        else:
            with pytest.raises(ArgumentError, match=f"autocast is {dtype}; give torch.bfloat16 or torch.float16"):
                trace(model, sample, autocast=dtype)
