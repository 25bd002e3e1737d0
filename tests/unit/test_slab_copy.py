"""Copies of slabs, native and plain: the right bytes at any address and length, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from replica import slab_copy


@pytest.mark.parametrize("copy", [slab_copy._copier(), slab_copy._copy_plain], ids=["best", "plain"])
def test_the_right_bytes_and_no_others(copy: object) -> None:
    random = np.random.default_rng(3)
    source = random.integers(0, 256, 20_000, np.uint8)
    for length in (0, 1, 63, 64, 255, 256, 257, 1000, 4096):
        for shift in (0, 1, 16, 63):
            target = np.full(20_000, 7, np.uint8)
            expected = target.copy()
            to, start = [shift + 200, 9_000 + shift, 14_001], [5, 4_100, 9_064 - shift]
            for one, other in zip(to, start, strict=True):
                expected[one : one + length] = source[other : other + length]
            addresses = np.array(to) + target.ctypes.data, np.array(start) + source.ctypes.data
            copy(3, addresses[0], addresses[1], length)  # type: ignore[operator]
            assert (target == expected).all(), (length, shift)
