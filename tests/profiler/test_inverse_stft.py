"""The inverse of a short-time Fourier transform, in a model and by itself."""

import pytest
import torch
from torch import Tensor, nn

from profiler import trace
from profiler.tracing.inverse_stft import inverse_stft
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.model_list import Case

SETTINGS = [
    {"hop_length": 4, "window": torch.hann_window(16)},
    {"window": torch.hann_window(16), "normalized": True},
    {"hop_length": 4, "win_length": 12, "window": torch.hann_window(12), "length": 40},
    {"hop_length": 4, "window": torch.ones(16), "center": False},
    {"window": torch.ones(16), "return_complex": True, "onesided": False},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(2, 9, 11), (9, 11)])
def test_as_torch_has_it(settings: dict[str, object], shape: tuple[int, ...]) -> None:
    """In every bit, and so are its gradients."""
    frequencies = 16 if settings.get("return_complex") else 9
    shape = (*shape[:-2], frequencies, shape[-1])
    spectrum = torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found, expected = (function(spectrum, 16, **settings) for function in (inverse_stft, torch.istft))  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(value.abs().square().sum(), spectrum)[0] for value in (found, expected)]
    assert torch.equal(*gradients)


class Masked(nn.Module):
    """A mask over the spectrum of a sound."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.last = nn.Linear(9, 9), nn.Linear(40, 4)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        masked = spectrum * self.mask(spectrum.abs().transpose(1, 2)).transpose(1, 2).sigmoid()
        return self.last(torch.istft(masked, 16, 4, window=self.window, length=40))


def test_a_model_with_one_is_traced() -> None:
    """`istft` looks at values, which tensors without data do not have: demucs' HTDemucs was refused."""
    torch.manual_seed(0)
    case = Case(Masked(), torch.randn(4, 40), nn.functional.mse_loss, torch.zeros(4, 4))
    sequence = trace(case.model, case.sample)
    assert not sequence.sample.called_as_is
    assert difference(run(sequence, case), eager(sequence, case)) <= 1e-6
