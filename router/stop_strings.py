"""PURE. Stop strings over a stream of text pieces: cut at the first completed match, hold back only what could still
become one.

A match may begin and end anywhere, across tokens and steps. The match that is completed first wins; of several
completed by the same character, the one named first in the list. Text is held back only while it is a proper prefix
of a stop string.
"""

from __future__ import annotations


class StopStringFilter:
    """Passes text on until a stop string is complete. One per sequence; `stops` are non-empty strings."""

    __slots__ = ("_first_chars", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        #: the stop string that was found, or None
        self.matched: str | None = None

    @property
    def num_held_chars(self) -> int:
        return len(self._held)

    def push(self, piece: str, may_match: bool = True) -> str:
        """Take new text, return what may be shown now. After a match (`matched` is set) push nothing more.

        With `may_match` False (before `min_tokens`) a match completed inside `piece` is passed over and stays text.
        """
        if not piece:
            return ""
        text = self._held + piece
        if may_match:
            end, stop = self._find(text, len(self._held))
            if stop is not None:
                self.matched = stop
                self._held = ""
                return text[:end] if self._include else text[: end - len(stop)]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The sequence ended without a match: give back what was held."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str | None]:
        """(end, stop) of the match that ends first among those that end after `num_old` characters."""
        best_end, best = len(text) + 1, None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        return best_end, best

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string without completing it."""
        first_chars = self._first_chars
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in first_chars:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
