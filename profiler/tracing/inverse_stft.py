"""`torch.istft` without its look at values: it makes sure that no sum of windows is zero, which says nothing of data.

Tensors without data cannot answer. The rest is the same operations in the same order, so results are equal in every bit
(aten/src/ATen/native/SpectralOps.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional


def put_inverse_stft_into(graph: fx.Graph) -> None:
    """Let a graph call `inverse_stft` where it calls the operation."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.istft.default:
            node.target = inverse_stft


def inverse_stft(
    self: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """What `torch.istft` returns of a spectrum, of shape (batch, frequencies, frames) or without the first."""
    hop = n_fft // 4 if hop_length is None else hop_length
    spectrum = self if self.dim() == 3 else self.unsqueeze(0)
    frames = spectrum.shape[2]
    total = n_fft + hop * (frames - 1)
    weights = _window(self, n_fft, n_fft if win_length is None else win_length, window)
    norm = "ortho" if normalized else "backward"
    spectrum = spectrum.transpose(1, 2)
    if return_complex:
        pieces = torch.fft.ifft(spectrum, n_fft, dim=2, norm=norm)
    else:
        is_half = spectrum.shape[2] != n_fft if onesided is None else onesided
        half = spectrum if is_half else spectrum[:, :, : n_fft // 2 + 1]
        pieces = torch.fft.irfft(half, n_fft, dim=2, norm=norm)
    added = torch.ops.aten.unfold_backward(pieces * weights.view(1, 1, n_fft), [pieces.shape[0], total], 1, n_fft, hop)
    squares = weights.pow(2).expand(1, frames, n_fft)
    envelope = torch.ops.aten.unfold_backward(squares, [1, total], 1, n_fft, hop)
    start = n_fft // 2 if center else 0
    stop = start + length if length is not None else total - n_fft // 2 if center else total
    result: Tensor = added[:, start:stop] / envelope[:, start:stop]
    if stop > total:
        result = functional.pad(result, (0, stop - total))
    return result if self.dim() == 3 else result.squeeze(0)


def _window(like: Tensor, n_fft: int, win_length: int, window: Tensor | None) -> Tensor:
    """The window in the middle of `n_fft` values."""
    if window is None:
        window = torch.ones(win_length, dtype=like.real.dtype, device=like.device)
    left = (n_fft - win_length) // 2
    return window if win_length == n_fft else functional.pad(window, (left, n_fft - win_length - left))
