"""The line between two measured sizes, for numbers, arrays and the compiled search."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.kernel import tables
from profiler.between_sizes import on_line, whole_bytes

BYTES = st.integers(0, 2**31)


@given(BYTES, BYTES, st.integers(1, 64), st.data())
def test_whole_bytes_are_never_less_than_the_line_nor_a_byte_more(low, high, distance, data):
    """Exactly rounded up, in whole numbers: a line that meets a whole number is not a byte above it."""
    place = data.draw(st.integers(0, distance))
    found = whole_bytes(on_line(low, high, place / distance))
    assert found == -(-(low * (distance - place) + high * place) // distance)


@given(BYTES, BYTES, st.floats(0, 1))
def test_numbers_arrays_and_compiled_code_agree(low, high, share):
    number = whole_bytes(on_line(float(low), float(high), share))
    assert whole_bytes(on_line(np.array([float(low)]), np.array([float(high)]), share)).tolist() == [number]
    assert tables.whole_bytes(tables.on_line(float(low), float(high), share)) == number
