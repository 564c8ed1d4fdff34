"""Layers on another device than they were traced on; the meta device stands in for one that this machine lacks."""

import torch
from torch import Tensor, nn

from profiler import trace
from profiler.run.stage_function import StageFunction


class CreatesTensors(nn.Module):
    """Makes positions (a prelude value), a mask beside parameters, and tensors inside a region without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        y = self.linear(x) + positions.unsqueeze(-1)
        with torch.no_grad():
            noise = torch.ones(y.shape, device=y.device)
        return y + noise + torch.zeros((), device=y.device)


def test_layers_run_where_they_are_sent() -> None:
    sequence = trace(CreatesTensors(), torch.randn(3, 5, 4))
    meta = torch.device("meta")
    moved = sequence.on(meta)
    assert moved.fingerprint == sequence.fingerprint
    parameters = {
        (layer.index, name): sequence.parameters[name].detach().to(meta)
        for layer in sequence.layers
        for name in layer.parameters
    }
    buffers = {name: buffer.to(meta) for name, buffer in sequence.buffers.items()}
    stage = StageFunction(moved, 0, len(moved), parameters)
    inputs = {sequence.inputs[0]: torch.randn(3, 5, 4, device=meta)}
    (output,) = stage.forward({}, inputs, buffers).values.values()
    assert output.device == meta
    assert sequence.on(torch.device("cpu")) is sequence
