"""What replicas sum at a time: all elements in their order, in no more bytes than are asked for, alike everywhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.state.pieces import Buffers, fill, pieces, places

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6)


def made(shapes: list[list[int]], doubles: list[bool]) -> list[Tensor]:
    """Numbered from 0 on."""
    begin, found = 0, []
    for shape, double in zip(shapes, doubles, strict=True):
        count = int(torch.Size(shape).numel())
        values = torch.arange(begin, begin + count, dtype=torch.float64 if double else torch.float32)
        found.append(values.reshape(shape))
        begin += count
    return found


@given(shapes=SHAPES, most_bytes=st.integers(8, 400), data=st.data())
def test_pieces_are_all_elements_in_their_order_and_small(
    shapes: list[list[int]], most_bytes: int, data: st.DataObject
) -> None:
    tensors = made(shapes, data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))))
    found = list(pieces(tensors, most_bytes))
    flat = [value for piece in found for part in piece for value in part.flatten().tolist()]
    assert flat == [value for tensor in tensors for value in tensor.flatten().tolist()]
    assert all(sum(part.nbytes for part in piece) <= most_bytes for piece in found)
    assert all(len({part.dtype for part in piece}) == 1 for piece in found)
    assert all(part.numel() for piece in found for part in piece), "nothing is exchanged for what has no elements"
    turned = [tensor.permute([*reversed(range(tensor.dim()))]).contiguous() for tensor in tensors]
    lying_otherwise = [tensor.permute([*reversed(range(tensor.dim()))]) for tensor in turned]
    others = list(pieces(lying_otherwise, most_bytes))
    assert [[part.shape for part in piece] for piece in others] == [[part.shape for part in piece] for piece in found]


@given(shapes=SHAPES, most_bytes=st.integers(8, 400))
def test_pieces_are_parts_of_the_tensors_themselves(shapes: list[list[int]], most_bytes: int) -> None:
    tensors = made(shapes, [False] * len(shapes))
    for piece in pieces(tensors, most_bytes):
        for part in piece:
            part.zero_()
    assert all(not tensor.any() for tensor in tensors)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float64, torch.bfloat16, torch.complex64]))),
    most_bytes=st.integers(16, 100),
)
def test_pieces_of_all_types_take_turns_in_one_memory(sizes: list[tuple[int, torch.dtype]], most_bytes: int) -> None:
    tensors, buffers = [torch.randn(size).to(dtype) for size, dtype in sizes], Buffers()
    largest = 0
    for piece in pieces(tensors, most_bytes):
        elements, needed = sum(part.numel() for part in piece), sum(part.nbytes for part in piece)
        going, coming = buffers.going(elements, piece[0]), buffers.coming(elements, piece[0])
        fill(going, piece)
        coming.copy_(going).mul_(2)
        assert all(torch.equal(place, 2 * part) for place, part in zip(places(coming, piece), piece, strict=True))
        assert all(torch.equal(place, part) for place, part in zip(places(going, piece), piece, strict=True))
        largest = max(largest, needed)
        assert going.untyped_storage().nbytes() == largest, "new memory is for a larger piece alone"
