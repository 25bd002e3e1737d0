"""PURE. Requests as public traces record them: when they came, how long they were, which prefixes they share.

Two formats are read, from lines that somebody else opened: Azure's conversation trace of 2023 (CSV, lengths only) and
Mooncake's conversation trace (JSON lines, with the id of each 512-token block of the prompt). Where the files are
absent, `synthetic` draws the same kinds of requests from distributions with the traces' medians and means.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterable

import msgspec

#: tokens of a prompt that one of Mooncake's block ids stands for
PREFIX_BLOCK_TOKENS = 512
#: numbers of rows and span of both traces, for `synthetic`
AZURE_ROWS, MOONCAKE_ROWS, SPAN_S = 19366, 12031, 3540.0


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One row. `prefix_ids`: one for each (begun) 512 tokens of the prompt; equal ids are equal text after equal text.
    Empty: shares nothing.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()


def read_azure(lines: Iterable[str]) -> list[TraceRequest]:
    """Of `TIMESTAMP,ContextTokens,GeneratedTokens` with a head line. Raises ValueError for another format."""
    rows = iter(lines)
    head = next(rows, "").strip()
    if head != "TIMESTAMP,ContextTokens,GeneratedTokens":
        raise ValueError(f"the head line is {head!r}, expected 'TIMESTAMP,ContextTokens,GeneratedTokens'")
    found: list[TraceRequest] = []
    start: float | None = None
    for line in rows:
        if not line.strip():
            continue
        stamp, prompt, output = line.strip().split(",")
        # seven decimals, and Python takes six
        at = datetime.datetime.fromisoformat(stamp[:26]).replace(tzinfo=datetime.UTC).timestamp()
        start = at if start is None else start
        found.append(TraceRequest(at - start, max(1, int(prompt)), max(1, int(output))))
    return found


def read_mooncake(lines: Iterable[str]) -> list[TraceRequest]:
    """Of objects with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""
    return [
        TraceRequest(
            row["timestamp"] / 1000,
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            tuple(row["hash_ids"]),
        )
        for row in map(json.loads, filter(str.strip, lines))
    ]


def synthetic(seed: int, num_requests: int = AZURE_ROWS + MOONCAKE_ROWS) -> list[TraceRequest]:
    """As many of each kind as the traces have in proportion. Prompts are log-normal: Azure's with median 1,020 and mean
    1,155, Mooncake's with 6,909 and 12,035; outputs likewise with 129 and 211, 350 and 400. Of Mooncake's kind, half
    continue one of the last 2,000, and all begin with the same block. Arrivals are Poisson.
    """
    rng = random.Random(seed)
    rate = (AZURE_ROWS + MOONCAKE_ROWS) / SPAN_S
    recent: list[tuple[int, ...]] = []
    found, now, next_id = [], 0.0, 1
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        if rng.random() < AZURE_ROWS / (AZURE_ROWS + MOONCAKE_ROWS):
            found.append(TraceRequest(now, _lognormal(rng, 1020, 0.5, 14050), _lognormal(rng, 129, 0.99, 1000)))
            continue
        num_tokens = _lognormal(rng, 6909, 1.05, 126195)
        num_blocks = -(-num_tokens // PREFIX_BLOCK_TOKENS)
        shared = rng.choice(recent) if recent and rng.random() < 0.5 else (0,)
        shared = shared[:num_blocks]
        prefix_ids = (*shared, *range(next_id, next_id + num_blocks - len(shared)))
        next_id += num_blocks
        recent = [*recent[-1999:], prefix_ids]
        found.append(TraceRequest(now, num_tokens, _lognormal(rng, 350, 0.52, 2000), prefix_ids))
    return found


def shifted(requests: Iterable[TraceRequest], seed: int) -> list[TraceRequest]:
    """The same requests in another hour: each kind is turned round by a shift of its own, so that bursts meet other
    bursts.
    """
    rng = random.Random(seed)
    rows = list(requests)
    span = max((row.arrival_s for row in rows), default=0.0) + 1e-3
    shift_plain, shift_shared = rng.random() * span, rng.random() * span
    turned = [
        msgspec.structs.replace(
            row, arrival_s=(row.arrival_s + (shift_shared if row.prefix_ids else shift_plain)) % span
        )
        for row in rows
    ]
    return sorted(turned, key=lambda row: row.arrival_s)


class PromptText:
    """Token ids for the prompts of one replay. Equal prefix ids give equal tokens; another seed gives other tokens.

    All text is cut out of one table of random tokens: a slice is a hundred times cheaper than drawing.
    """

    _TABLE_TOKENS = 1 << 20

    def __init__(self, seed: int, vocab_size: int, first_id: int = 3) -> None:
        rng = random.Random(seed)
        ids = list(range(first_id, vocab_size))
        self._table = rng.choices(ids, k=self._TABLE_TOKENS)
        self._seed = seed

    def prompt(self, number: int, row: TraceRequest, scale: float) -> list[int]:
        """Of the `number`-th request, all lengths times `scale`: at least one token."""
        num_tokens = max(1, int(row.num_prompt_tokens * scale))
        if not row.prefix_ids:
            return self._cut(2 * number + 1, num_tokens)
        width = max(1, int(PREFIX_BLOCK_TOKENS * scale))
        text: list[int] = []
        for prefix_id in row.prefix_ids:
            text += self._cut(2 * prefix_id, width)
        del text[num_tokens:]
        return text or self._cut(2 * row.prefix_ids[0], 1)

    def _cut(self, key: int, num_tokens: int) -> list[int]:
        room = self._TABLE_TOKENS - num_tokens
        start = ((key + 1) * 0x9E3779B97F4A7C15 + self._seed * 0xBF58476D1CE4E5B9 >> 7) % room
        return self._table[start : start + num_tokens]


def _lognormal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0.0, sigma))))
