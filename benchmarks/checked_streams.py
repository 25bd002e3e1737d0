"""Streams whose every token is checked, against a cluster with the fake runner that changes under them.

The fake runner's tokens are a function of the prompt, so a client can tell a token that was lost, doubled or computed
from the wrong prefix. Long streams begin and go on; short ones arrive steadily beside them until told to end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import aiohttp
import msgspec

from replica.fake_runner import expected_output

VOCAB = 49152
EOS = frozenset({2})


class Outcome(msgspec.Struct):
    """Of one stream, as its client saw it."""

    number: int
    error: str = ""
    ended_at: float = 0.0
    #: the longest time between two chunks, and when it ended
    pause_s: float = 0.0
    ttft_s: float = 0.0


def prompt_of(number: int, length: int = 20) -> list[int]:
    """A prompt of its own, so that no other's KV serves it."""
    return [3 + number, 5 + number % 7, *range(100, 98 + length)]


async def stream(
    session: aiohttp.ClientSession, url: str, number: int, num_tokens: int, begun: asyncio.Event | None = None
) -> Outcome:
    """One greedy completion; `begun` is set with its first token. Raises nothing: what goes wrong is in the outcome."""
    outcome = Outcome(number)
    tokens: list[int] = []
    body = {
        "prompt": prompt_of(number), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    last = started = time.monotonic()
    is_over = False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                outcome.error = f"{response.status}: {(await response.text())[:200]}"
                return outcome
            async for line in response.content:
                is_over |= line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    outcome.error = str(chunk["error"])[:200]
                    return outcome
                now = time.monotonic()
                if tokens:
                    outcome.pause_s = max(outcome.pause_s, now - last)
                else:
                    outcome.ttft_s = now - started
                last = now
                tokens += chunk["choices"][0]["token_ids"] if chunk["choices"] else []
                if begun is not None:
                    begun.set()
    except aiohttp.ClientError as error:
        outcome.error = repr(error)
    outcome.ended_at = time.monotonic()
    if not outcome.error:
        outcome.error = _fault(tokens, expected_output(prompt_of(number), num_tokens, vocab_size=VOCAB, eos=EOS))
    if not outcome.error and not is_over:
        outcome.error = "the stream ended without [DONE]"
    return outcome


def _fault(tokens: list[int], reference: list[int]) -> str:
    if tokens == reference:
        return ""
    same = next(
        (k for k, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), min(len(tokens), len(reference))
    )
    return f"{len(tokens)} tokens instead of {len(reference)}; the first {same} are right"


class Load:
    """`num_long` streams of `long_tokens`, and `per_s` short ones a second beside them. An async context manager: it is
    entered when every long stream has begun, and left when all have ended. `url`: or what gives one to each stream.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        *,
        num_long: int = 32,
        long_tokens: int = 600,
        per_s: float = 8.0,
        short_tokens: int = 20,
    ) -> None:
        self._url: Callable[[], str] = (lambda: url) if isinstance(url, str) else url
        self._long_tokens, self._per_s, self._short_tokens = long_tokens, per_s, short_tokens
        self._num_long = num_long
        self._is_over = asyncio.Event()
        self.long: list[Outcome] = []
        self.short: list[Outcome] = []
        self.unhealthy = 0

    async def __aenter__(self) -> Load:
        # a connection a stream, so that each may come to another router
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_read=300),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        begun = [asyncio.Event() for _ in range(self._num_long)]
        self._streams = [
            asyncio.create_task(stream(self._session, self._url(), n, self._long_tokens, begun[n]))
            for n in range(self._num_long)
        ]
        for task, event in zip(self._streams, begun, strict=True):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        self._steady = asyncio.create_task(self._arrive())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_over.set()
        self.short = list(await self._steady)
        self.long = list(await asyncio.gather(*self._streams))
        await self._session.close()

    @property
    def num_open(self) -> int:
        """Long streams that have not ended."""
        return sum(not task.done() for task in self._streams)

    @property
    def errors(self) -> list[str]:
        """After the end."""
        return [f"{o.number}: {o.error}" for o in (*self.long, *self.short) if o.error]

    @property
    def longest_pause_s(self) -> float:
        return max((o.pause_s for o in self.long), default=0.0)

    async def _arrive(self) -> list[Outcome]:
        tasks = []
        number = 1000
        while not self._is_over.is_set() and self._per_s:
            tasks.append(asyncio.create_task(stream(self._session, self._url(), number, self._short_tokens)))
            number += 1
            with_timeout = asyncio.create_task(self._is_over.wait())
            await asyncio.wait([with_timeout], timeout=1 / self._per_s)
            with_timeout.cancel()
        return list(await asyncio.gather(*tasks))
