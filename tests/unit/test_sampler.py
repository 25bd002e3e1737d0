"""Sampling rules, on the numpy reference and on the C++ kernels alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from replica.native import library
from replica.native.builder import NativeUnavailableError
from replica.sampler import NOT_FINITE, sample, sample_row, uniform

SampleRow = Callable[..., int]


def native_row(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, u: float, min_p: float = 0.0
) -> int:
    logits = np.ascontiguousarray(logits, np.float32)
    return library.load().sample(logits.ctypes.data, len(logits), temperature, top_k, top_p, u, min_p)


@pytest.fixture(params=["numpy", "native"])
def row(request: pytest.FixtureRequest) -> SampleRow:
    if request.param == "numpy":
        return sample_row
    try:
        library.load()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    return native_row


def logits_of(probabilities: list[float]) -> NDArray[np.float32]:
    return np.log(np.asarray(probabilities, np.float64)).astype(np.float32)


def chosen(
    row: SampleRow, logits: NDArray[np.float32], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Share of an even grid of random numbers that chooses each token."""
    grid = (np.arange(2000) + 0.5) / 2000
    tokens = [row(logits, 1.0, top_k, top_p, float(u), min_p) for u in grid]
    return {int(t): tokens.count(t) / len(grid) for t in sorted(set(tokens))}


def test_greedy_takes_the_lowest_of_equal_maxima(row: SampleRow) -> None:
    logits = np.zeros(100, np.float32)
    logits[[40, 77, 99]] = 3.0
    assert row(logits, 0.0, 5, 0.5, 0.99) == 40


@pytest.mark.parametrize("at", [0, 15, 16, 99, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_where_there_is_no_number(row: SampleRow, at: int, temperature: float) -> None:
    logits = np.linspace(0, 1, 101, dtype=np.float32)
    logits[at] = -np.inf  # a token that may not be chosen
    assert 0 <= row(logits, temperature, 0, 1.0, 0.5) != at
    for bad in (np.nan, np.inf):
        logits[at] = bad
        for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.5)):
            assert row(logits, temperature, top_k, top_p, 0.5) == NOT_FINITE
    for bad in (np.nan, -np.inf):
        assert row(np.full(101, bad, np.float32), temperature, 0, 1.0, 0.5) == NOT_FINITE


def test_shares_are_the_probabilities(row: SampleRow) -> None:
    shares = chosen(row, logits_of([0.5, 0.125, 0.25, 0.125]))
    assert shares == pytest.approx({0: 0.5, 1: 0.125, 2: 0.25, 3: 0.125}, abs=0.002)


def test_min_p_is_a_share_of_the_likeliest_and_comes_before_top_p(row: SampleRow) -> None:
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    assert chosen(row, logits, min_p=0.4) == pytest.approx({0: 4 / 9, 1: 3 / 9, 2: 2 / 9}, abs=0.002)
    # of what min_p left (0.9), 0.75 is 0.675: the first two
    assert chosen(row, logits, top_p=0.75, min_p=0.4) == pytest.approx({0: 4 / 7, 1: 3 / 7}, abs=0.002)
    assert chosen(row, logits, min_p=1.0) == {0: 1.0}


def test_a_masked_token_is_never_chosen(row: SampleRow) -> None:
    logits = np.full(49, -np.inf, np.float32)
    logits[17] = -300.0
    assert {row(logits, 1.0, k, p, u) for k in (0, 5) for p in (1.0, 0.5) for u in (0.0, 0.5, 1 - 1e-12)} == {17}


def test_top_k_renormalises(row: SampleRow) -> None:
    assert chosen(row, logits_of([0.1, 0.4, 0.2, 0.3]), top_k=2) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.002)


def test_top_p_keeps_the_token_that_crosses(row: SampleRow) -> None:
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert chosen(row, logits, top_p=0.5) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.002)
    assert chosen(row, logits, top_p=0.35) == {1: 1.0}
    assert chosen(row, logits, top_p=1e-9) == {1: 1.0}


def test_top_k_comes_before_top_p(row: SampleRow) -> None:
    """Of the three kept, 0.4 / 0.9 already passes 0.44; of all four, 0.4 does not."""
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert chosen(row, logits, top_k=3, top_p=0.44) == {1: 1.0}
    assert set(chosen(row, logits, top_p=0.44)) == {1, 3}


def test_temperature_sharpens(row: SampleRow) -> None:
    logits = logits_of([0.6, 0.4])
    picks = [row(logits, 0.5, 0, 1.0, u / 1000) for u in range(1000)]
    assert picks.count(0) / 1000 == pytest.approx(0.36 / 0.52, abs=0.002)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_never_a_masked_token(row: SampleRow, u: float) -> None:
    logits = np.full(5000, -np.inf, np.float32)
    logits[[17, 4200]] = [0.0, -1.0]
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)):
        assert row(logits, 1.0, top_k, top_p, u) in (17, 4200)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3000),
    scale=st.floats(0.1, 30),
    temperature=st.floats(0.05, 3),
    top_k=st.integers(0, 100),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_native_agrees_with_numpy(
    seed: int, size: int, scale: float, temperature: float, top_k: int, top_p: float, u: float
) -> None:
    """Where they differ, float32 against float64 sums must explain it: a nudge of `u` makes numpy choose the same."""
    try:
        library.load()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    logits = (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)
    ours = native_row(logits, temperature, top_k, top_p, u)
    near = {
        sample_row(logits, temperature, top_k, p, min(max(u + d, 0.0), 1 - 1e-12))
        for d in (-2e-4, -2e-5, -1e-6, 0.0, 1e-6, 2e-5, 2e-4)
        for p in ({1.0} if top_p == 1.0 else {top_p - 1e-5, top_p, top_p + 1e-5})
    }
    assert ours in near


def test_rows_do_not_see_each_other() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, 500)).astype(np.float32) * 3
    temperature = np.asarray([0, 1, 0.7, 0, 2, 1], np.float32)
    top_k, top_p = np.asarray([0, 5, 0, 9, 0, 40], np.int32), np.asarray([1, 1, 0.8, 1, 1, 0.5], np.float32)
    u = rng.random(6)
    min_p = np.asarray([0, 0, 0.05, 0.5, 0, 0.1], np.float32)
    together = sample(logits, temperature, top_k, top_p, min_p, u)
    for i in range(6):
        one = slice(i, i + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], min_p[one], u[one]) == together[i]


def numbers(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    return uniform(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))


def test_random_numbers_are_a_function_of_seed_and_position() -> None:
    together = numbers([1, 2, 2**64 - 1, 1], [0, 7, 123456, 5])
    assert together[1] == numbers([2], [7])[0]
    assert together[2] == numbers([2**64 - 1], [123456])[0]
    assert len(set(together.tolist())) == 4
    # pinned: a change would alter the tokens of every seeded request
    assert numbers([0, 42], [0, 3]).tolist() == [0.6524484863740322, 0.06735789320333596]


def test_random_numbers_look_uniform_and_uncorrelated() -> None:
    grid = numbers([s for s in range(100) for _ in range(200)], list(range(200)) * 100).reshape(100, 200)
    assert 0 <= grid.min() < 1e-3
    assert 1 - 1e-3 < grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.01
    assert np.histogram(grid, bins=20, range=(0, 1))[0].min() > 850
    assert np.abs(np.corrcoef(grid) - np.eye(100)).max() < 0.35
    assert len(np.unique(grid)) == grid.size
