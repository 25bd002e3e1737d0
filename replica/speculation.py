"""PURE. Speculation by prompt lookup: what followed the last few tokens when they stood here before is a guess of what
follows now (Saxena, "Prompt Lookup Decoding", 2023).

Guesses (drafts) cost nothing but their place in a step: the model computes them beside the last known token, and a
token is chosen at each of these positions by the ordinary rule, from its own logits and its own random number. A draft
is accepted if it is what was chosen anyway. So the output is that of an undisturbed run, greedy or seeded, and a wrong
guess costs time only.

Sequences with rules over their logits (`replica/sampling_rules.py`) do not speculate: their rules look at output that
is not known yet.
"""

from __future__ import annotations

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.progress import SchedulerCounters
from replica.running_set import Decodes, RunningSet
from replica.sequence import Sequence
from replica.step_budget import StepBudget

#: tokens of history that are indexed in one step at most (0.15 us each): a long prompt is taken in over several steps
_CATCH_UP_TOKENS = 1024
#: longest pause between two guesses, in steps
_MAX_PAUSE = 64


class Drafter:
    """Guesses for one sequence. Their length doubles while all are accepted and falls to what was accepted otherwise;
    after a guess without any success it pauses, twice as long each time, so that text without repetition soon costs
    nothing.
    """

    __slots__ = ("_at", "_length", "_num_indexed", "_num_misses", "_pause")

    def __init__(self) -> None:
        #: n-gram -> index of the token behind its latest occurrence
        self._at: dict[tuple[int, ...], int] = {}
        #: tokens up to here are in `_at`
        self._num_indexed = 0
        self._length = 2
        self._num_misses = 0
        self._pause = 0

    def propose(self, token_ids: list[int], ngram: int, most: int) -> list[int]:
        """At most `most` guesses of what follows `token_ids`: what followed its last `ngram` tokens when they stood
        here last. `token_ids` only ever grows from call to call, and `ngram` stays.
        """
        self._index(token_ids, ngram)
        if self._pause:
            self._pause -= 1
            return []
        if self._num_indexed < len(token_ids) or (start := self._at.get(tuple(token_ids[-ngram:]))) is None:
            return []
        length = min(self._length, most)
        guess = token_ids[start : start + length]
        while len(guess) < length:  # what stood there runs into the end of the text: it goes on as it began
            guess += guess[: length - len(guess)]
        return guess

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """What became of the last guess."""
        self._length = 2 * self._length if num_accepted == num_drafted else max(1, num_accepted)
        if num_accepted:
            self._num_misses = 0
        else:
            self._num_misses += 1
            self._pause = min(_MAX_PAUSE, 1 << self._num_misses)

    def _index(self, token_ids: list[int], ngram: int) -> None:
        """An n-gram is entered once a token follows it, so that nothing finds itself."""
        end = min(len(token_ids), self._num_indexed + _CATCH_UP_TOKENS)
        start = max(0, self._num_indexed - ngram)
        self._num_indexed = end
        if end < ngram:
            return  # a prompt of one token and its first answer; ends of slices would be negative
        # the list and its copies shifted by 1, 2, ... give all n-grams at once
        columns = [token_ids[start + shift : end - ngram + shift] for shift in range(ngram)]
        self._at.update(zip(zip(*columns, strict=True), range(start + ngram, end), strict=True))


class Speculation:
    """Puts drafts beside the decodes of a step, from the tokens that decodes and prompts leave; they preempt nobody."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, running: RunningSet, counters: SchedulerCounters
    ) -> None:
        self._most = config.num_speculative_tokens
        self._ngram = config.speculative_ngram
        self._max_step_tokens = config.speculative_max_step_tokens
        self._blocks = blocks
        self._running = running
        self._counters = counters

    def draft(self, decodes: Decodes, budget: StepBudget, keep_free: int) -> None:
        """Guess for those of `decodes`, already in `budget`, that may. At least `keep_free` blocks stay free."""
        if not self._most:
            return
        room = budget.tokens_left
        if self._max_step_tokens is not None:
            room = min(room, self._max_step_tokens - budget.num_tokens)
        for position, row in enumerate(decodes.rows.tolist()):
            if room < 1:
                return
            sequence = self._running.owner(row)
            # one token more than was guessed may come of it
            most = min(self._most, room, sequence.max_total_tokens - sequence.num_tokens - 1)
            if most < 1 or sequence.sampling.has_rules or sequence.first_token_at is None:
                continue
            if sequence.drafter is None:
                sequence.drafter = Drafter()
            if drafts := sequence.drafter.propose(sequence.token_ids, self._ngram, most):
                room -= self._plan(sequence, position, drafts, budget, keep_free)

    def judge(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What the runner made of the drafts of `sequence`."""
        assert sequence.drafter is not None
        sequence.drafter.judge(num_drafted, num_accepted)
        self._counters.drafted_tokens += num_drafted
        self._counters.accepted_tokens += num_accepted

    def _plan(self, sequence: Sequence, position: int, drafts: list[int], budget: StepBudget, keep_free: int) -> int:
        """As many of `drafts` as have a block; returns how many."""
        blocks = self._blocks
        room = (len(sequence.block_ids) + max(0, blocks.num_free - keep_free)) * blocks.block_size
        drafts = drafts[: room - sequence.num_tokens]
        if not drafts:
            return 0
        new_blocks = blocks.grow(sequence, sequence.num_tokens + len(drafts))
        assert new_blocks is not None
        if new_blocks:
            self._running.cover(sequence)
        budget.spend_drafts(position, drafts, new_blocks)
        return len(drafts)
