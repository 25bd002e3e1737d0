"""ASYNC. Steps that wait for a reader who is behind, held few and small: several steps of a sequence become one event.

A reader that keeps up sees each step as it came; the first step that waits costs one look. What waits is token ids, and
logprobs where they were asked for: at most `max_tokens` of them a sequence, 8 bytes a token.
"""

from __future__ import annotations

from collections import deque

from router.backend import TokenEvent

#: how much is joined into one list, which becomes one write: tokens and their alternatives, 100 KB of chunks at most
MAX_JOINED = 1024


def join(first: TokenEvent, then: TokenEvent) -> TokenEvent:
    """Two events of one sequence as one."""
    return TokenEvent(
        first.index,
        first.token_ids + then.token_ids,
        then.finish_reason,
        then.stop_reason,
        first.num_cached_tokens,
        first.logprobs + then.logprobs,
        first.prompt_logprobs or then.prompt_logprobs,
        then.stages or first.stages,
    )


def _size(events: list[TokenEvent]) -> int:
    return sum(len(event.token_ids) + sum([len(entry.top_token_ids) for entry in event.logprobs]) for event in events)


class EventBuffer:
    """First in, first out; what is read may stand for several steps."""

    __slots__ = ("_joined", "_size", "_steps")

    def __init__(self) -> None:
        self._steps: deque[list[TokenEvent]] = deque()
        #: the last of `_steps` by sequence, once something was joined to it
        self._joined: dict[int, TokenEvent] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, events: list[TokenEvent]) -> None:
        """Events of one step, at most one a sequence."""
        if not self._steps or not self._join_last(events):
            self._steps.append(events)
            self._joined = {}

    def pop(self) -> list[TokenEvent]:
        """The oldest list. Raises `IndexError` when there is none."""
        return self._steps.popleft()

    def _join_last(self, events: list[TokenEvent]) -> bool:
        joined = self._joined
        if not joined:
            joined = self._joined = {event.index: event for event in self._steps[-1]}
            self._size = _size(self._steps[-1])
        if self._size >= MAX_JOINED:
            return False
        self._size += _size(events)
        for event in events:
            first = joined.get(event.index)
            joined[event.index] = event if first is None else join(first, event)
        self._steps[-1] = list(joined.values())
        return True
