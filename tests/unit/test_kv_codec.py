"""Compressed KV is near what it was, by known bounds, and each rank's part is a part of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from replica.kv_codec import KVCodec, KVShape

SHAPE = KVShape(3, 4, 16, 64, True)


def keys_and_values(shape: KVShape) -> np.ndarray:
    """Normal values, with channels of keys that are 20 times as large, as models have them."""
    values = np.random.default_rng(5).normal(size=(shape.kv_heads, shape.layers, 2, shape.block_size, shape.head_dim))
    values[:, :, 0, :, 5:64:16] *= 20
    return values.astype(np.float32)


def as_slab(values: np.ndarray, shape: KVShape) -> np.ndarray:
    if shape.is_bf16:
        return (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.reshape(-1).view(np.uint8)


def floats(slab: np.ndarray, shape: KVShape) -> np.ndarray:
    if shape.is_bf16:
        return (slab.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return slab.view(np.float32)


def there_and_back(slab: np.ndarray, shape: KVShape, bits: int) -> np.ndarray:
    codec = KVCodec(shape, bits)
    coded, back = np.zeros(codec.coded_bytes, np.uint8), np.zeros(shape.slab_bytes, np.uint8)
    codec.encode(slab, coded)
    codec.decode(coded, back)
    return back


@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize(("bits", "size", "error"), [(8, 0.51, 0.02), (4, 0.313, 0.14)])
def test_near_and_small(bits: int, size: float, error: float, is_bf16: bool) -> None:
    shape = KVShape(3, 4, 16, 64, is_bf16)
    slab = as_slab(keys_and_values(shape), shape)
    before, after = floats(slab, shape), floats(there_and_back(slab, shape, bits), shape)
    apart = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert 0 < apart < error
    codec = KVCodec(shape, bits)
    assert codec.coded_bytes / shape.slab_bytes < size / (1 if is_bf16 else 2)
    # each value is within half a step of its group
    grouped = before.reshape(shape.kv_heads, 2 * shape.layers, 16, -1, codec.group)
    reach = np.abs(grouped).max((2, 4)) if bits == 8 else np.ptp(grouped, axis=(2, 4))
    step = (reach / (127 if bits == 8 else 15))[:, :, None, :, None]
    rounding = np.abs(grouped) / 256 if is_bf16 else 1e-5 * np.abs(grouped).max()
    assert (np.abs(after.reshape(grouped.shape) - grouped) <= 0.5001 * step + rounding).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_numbers_stay(bits: int) -> None:
    for number in (0.0, 1.5, -3.0):
        slab = as_slab(np.full((3, 4, 2, 16, 64), number, np.float32), SHAPE)
        assert there_and_back(slab, SHAPE, bits).tolist() == slab.tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rank_codes_its_part_alone(bits: int) -> None:
    slab = as_slab(keys_and_values(SHAPE), SHAPE)
    whole, one = KVCodec(SHAPE, bits), KVCodec(KVShape(1, 4, 16, 64, True), bits)
    coded = np.zeros(whole.coded_bytes, np.uint8)
    whole.encode(slab, coded)
    for rank in range(3):
        part = np.zeros(one.coded_bytes, np.uint8)
        one.encode(slab.reshape(3, -1)[rank], part)
        assert part.tolist() == coded.reshape(3, -1)[rank].tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_spoils_nothing_else(bits: int) -> None:
    values = keys_and_values(SHAPE)
    values[1, 2, 0, 3, 4] = np.nan
    values[1, 2, 1, 3, 4] = np.inf
    back = floats(there_and_back(as_slab(values, SHAPE), SHAPE, bits), SHAPE)
    assert np.isfinite(back).all()


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="allowed are 4 and 8"):
        KVCodec(SHAPE, 2)
    with pytest.raises(ValueError, match="head_dim 72 is no multiple of 16"):
        KVCodec(KVShape(1, 1, 16, 72, True), 8)
