"""PURE. Which grammars the runner is known to have compiled, and who waits for the others."""

from __future__ import annotations

from collections.abc import Iterable

from replica.sequence import Sequence, Status

#: grammars that the runner is known to have compiled; it keeps at least as many (`replica/grammar.py`)
MAX_KNOWN_GRAMMARS = 64


class GrammarGate:
    """Each wanted grammar is asked for once, however many sequences wait for it. Compiles nothing."""

    def __init__(self) -> None:
        self._waiting_for: dict[str, list[Sequence]] = {}
        #: least recently used first
        self._compiled: dict[str, None] = {}
        self._wanted: list[str] = []

    def must_wait(self, sequence: Sequence) -> bool:
        """True: its grammar is not there yet, and is asked for."""
        grammar = sequence.sampling.grammar
        if not grammar:
            return False
        if grammar in self._compiled:
            del self._compiled[grammar]
            self._compiled[grammar] = None  # the most recently used now
            return False
        if grammar not in self._waiting_for:
            self._waiting_for[grammar] = []
            self._wanted.append(grammar)
        self._waiting_for[grammar].append(sequence)
        return True

    def take_wanted(self) -> list[str]:
        """Grammars that somebody has begun to wait for."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def compiled(self, grammar: str, works: bool) -> list[Sequence]:
        """Who waited for it and is still there."""
        if works:
            self._compiled[grammar] = None
            if len(self._compiled) > MAX_KNOWN_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
        return [s for s in self._waiting_for.pop(grammar, []) if s.status is not Status.FINISHED]

    def drop(self, sequence: Sequence) -> None:
        """It has ended, and waits for nothing any more."""
        waiting = self._waiting_for.get(sequence.sampling.grammar, [])
        if sequence in waiting:
            waiting.remove(sequence)

    def validate(self, blocked: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        waiting = {s.seq_id for sequences in self._waiting_for.values() for s in sequences}
        assert waiting >= {s.seq_id for s in blocked}, "a blocked sequence waits for nothing"
