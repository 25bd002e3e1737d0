"""PURE. Choosing tokens from logits, counter based: output position i of a seed always meets the same random number.

The native kernels hold the same rules in C++ (`native/sampling.h`); `sample_row` here is what the torch fallback uses
and what the tests compare against. Knows nothing of batches: a row never sees its neighbours.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: what the kernels' exp() cannot tell from nothing: a token this much less likely than the likeliest is never chosen
_LEAST_WEIGHT = 1e-37
#: in place of a token: the row's largest logit is NaN or infinite
NOT_FINITE = -1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(seeds: NDArray[np.uint64], output_positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, output position), a pure function of the pair.

    The seed is mixed before the position is added, so that seeds 0, 1, 2 do not give shifted copies of one stream.
    """
    counter = output_positions.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds + _GOLDEN) + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_row(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, u: float, min_p: float = 0.0
) -> int:
    """Token id for one row [vocab]: argmax at temperature 0, else inverse CDF at `u` over what min-p, then top-k, then
    top-p leave. min-p keeps tokens at least that share as likely as the likeliest. NOT_FINITE for a row with a NaN, or
    whose largest logit is infinite.

    Unfiltered, the CDF runs in id order; filtered, from the likeliest down (equal ones: lower id first).
    """
    likeliest = int(np.argmax(logits))  # the first NaN, if there is one
    if not math.isfinite(logits[likeliest]):
        return NOT_FINITE
    if temperature <= 0:
        return likeliest
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled)
    weights[weights < max(min_p, _LEAST_WEIGHT)] = 0.0
    by_count = 0 < top_k < len(weights)
    if not by_count and top_p >= 1:
        return _invert(weights, u)
    order = np.argsort(-weights, kind="stable")
    if by_count:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    return int(order[_invert(weights[order], u)])


def _invert(weights: NDArray[np.float64], u: float) -> int:
    """First index at which the running sum passes `u` of the total; never one of weight zero."""
    mass = np.cumsum(weights)
    index = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


def sample(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int32]:
    """One token per row of `logits` [rows, vocab], NOT_FINITE for a row without one; the other arrays are [rows]."""
    tokens: NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
    tokens[~np.isfinite(logits[np.arange(len(tokens)), tokens])] = NOT_FINITE
    for row in np.flatnonzero((temperature > 0) & (tokens != NOT_FINITE)):
        tokens[row] = sample_row(
            logits[row], float(temperature[row]), int(top_k[row]), float(top_p[row]), uniforms[row], float(min_p[row])
        )
    return tokens
