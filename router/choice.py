"""PURE. One choice of an answer while it is being made: tokens in, visible text out, stop strings and counts kept."""

from __future__ import annotations

from replica.messages import FinishReason
from router.detokenizer import Detokenizer
from router.stop_strings import StopStringFilter


class Choice:
    """Text state of one sequence.

    A stop token (eos or a stop token id) counts as an output token but gives no text, unless `include_stop` is set. A
    stop string ends the choice at the token that completes it; tokens of the same step after that one are dropped.
    """

    __slots__ = (
        "_detokenizer",
        "_filter",
        "_include_stop",
        "_min_tokens",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_tokens",
        "stop_reason",
        "stopped_here",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._filter = StopStringFilter(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        #: output tokens so far, the one that ended the choice included
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        #: the stop string or stop token id that ended the choice; None for eos and length
        self.stop_reason: str | int | None = None
        #: True when it was ended here (a stop string): the replica does not know and must be told
        self.stopped_here = False

    @property
    def num_held_chars(self) -> int:
        """Characters that wait because they may become a stop string."""
        return self._filter.num_held_chars if self._filter is not None else 0

    def end_without_output(self, finish_reason: FinishReason | None) -> None:
        """The choice was only about its prompt: what was generated with it is dropped (max_tokens 0)."""
        self.finish_reason = FinishReason.LENGTH
        self.stopped_here = finish_reason is None

    def push(self, token_ids: list[int], finish_reason: FinishReason | None, stop_reason: int | None) -> str:
        """Take one step's tokens, return the text that may be shown now."""
        if self._filter is not None:
            text = self._push_with_stops(token_ids, finish_reason, self._filter)
            if self.stopped_here:
                return text
        else:
            self.num_tokens += len(token_ids)
            text = self._detokenizer.extend(self._shown(token_ids, finish_reason))
        if finish_reason is not None:
            text += self._end(self._filter)
            if not self.stopped_here:
                self.finish_reason = finish_reason
                self.stop_reason = stop_reason
        return text

    def _shown(self, token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
        if finish_reason is FinishReason.STOP and not self._include_stop:
            return token_ids[:-1]
        return token_ids

    def _push_with_stops(
        self, token_ids: list[int], finish_reason: FinishReason | None, stops: StopStringFilter
    ) -> str:
        shown = self._shown(token_ids, finish_reason)
        text = ""
        for token_id in shown:
            self.num_tokens += 1
            text += stops.push(self._detokenizer.push(token_id), self.num_tokens > self._min_tokens)
            if stops.matched is not None:
                self._stop(stops.matched)
                return text
        self.num_tokens += len(token_ids) - len(shown)
        return text

    def _end(self, stops: StopStringFilter | None) -> str:
        """What was held back: half a character, the beginning of a stop string that did not come."""
        rest = self._detokenizer.flush()
        if stops is None:
            return rest
        text = stops.push(rest, self.num_tokens > self._min_tokens)
        if stops.matched is not None:
            self._stop(stops.matched)
            return text
        return text + stops.flush()

    def _stop(self, matched: str) -> None:
        self.finish_reason = FinishReason.STOP
        self.stop_reason = matched
        self.stopped_here = True
