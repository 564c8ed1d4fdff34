"""What kernels may allocate and free inside themselves, for devices that are not here.

Where layers are run, `profiler.observe.allocator_record` reads it from the allocator. This table holds shares of the
bytes that an operation reads and writes, from that record of each operation in GPTs, CNNs and LSTMs on CPU, rounded up.
oneDNN copies what a convolution reads and writes into blocked layouts of 16 channels; with one sample and one thread it
may not be asked, and the convolution that unfolds its input needs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from torch import Tensor

CONVOLUTIONS = frozenset({"aten::convolution", "aten::convolution_backward"})
CHANNELS_IN_BLOCK = 16  # of dimension 1; with padding up to it, convolutions need a share of 1 at most
WORKSPACE_SHARES: Mapping[str, float] = {  # [measured, torch 2.13]; the largest seen stands after each
    "aten::convolution": 1.0,  # 1.0
    "aten::convolution_backward": 1.0,  # 0.9
    "aten::mkldnn_rnn_layer": 1.0,  # 0.63
    "aten::mkldnn_rnn_layer_backward": 1.0,  # 0.68
    "aten::embedding_dense_backward": 1.0,  # 0.51
    "aten::native_batch_norm_backward": 0.5,  # 0.33
    "aten::_safe_softmax": 0.2,  # 0.13
    "aten::_scaled_dot_product_flash_attention_for_cpu": 0.1,  # 0.08
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 0.1,  # 0.05
}
CASTING = "aten::add_"  # in place: what has another type is cast as a whole, on CPU
SMALL_BYTES = 8192  # wrapped numbers, partial sums, tiles


def workspace_bytes(operation: str, touched: Iterable[Tensor]) -> int:
    """Bytes that an operation may need inside itself.

    Args:
        operation: `"aten::convolution"`.
        touched: its tensor arguments and results.
    """
    if operation == CASTING:
        return _cast_bytes([*touched]) + SMALL_BYTES
    share = WORKSPACE_SHARES.get(operation, 0.0)
    if not share:
        return SMALL_BYTES
    size = _blocked_bytes if operation in CONVOLUTIONS else _plain_bytes
    return int(share * sum(map(size, touched))) + SMALL_BYTES


def _cast_bytes(touched: Sequence[Tensor]) -> int:
    """Of what is added in another type than that of the first."""
    to = touched[0]
    return max((tensor.numel() * to.element_size() for tensor in touched if tensor.dtype != to.dtype), default=0)


def _plain_bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _blocked_bytes(tensor: Tensor) -> int:
    shape = list(tensor.shape)
    if len(shape) > 1:
        shape[1] = -(-shape[1] // CHANNELS_IN_BLOCK) * CHANNELS_IN_BLOCK
    return prod(shape) * tensor.element_size()
