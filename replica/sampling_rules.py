"""PURE. What changes a sequence's logits before a token is chosen, and what is told about them: bias, penalties, masks,
grammars, logprobs.

Sequences without any of it never come here: a step of such is one call into the kernels. Rules are functions of the
sequence's own tokens (and its grammar's state is, too), so batch, preemption and resume change nothing. Order, as in
vLLM: logprobs of the untouched logits; bias; penalties (repetition, frequency, presence); masks (allowed ids, bad
words, stop tokens before `min_tokens`, grammar). Temperature, min_p, top_k and top_p follow in the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replica.errors import InvalidRequestError
from replica.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from replica.messages import SamplingParams, TokenLogprobs

#: logits whose maximum is taken at once
_PIECE = 128

Row = NDArray[np.float32]
Ids = NDArray[np.int32]


class LogprobReader:
    """The distribution of one row [vocab] before anything touched it."""

    def __init__(self, row: Row, num_top: int) -> None:
        self._row = row
        shifted = row - row.max()
        self._log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64))) + float(row.max())
        self._top = _top_ids(row, num_top)

    def read(self, token_id: int) -> TokenLogprobs:
        """Of `token_id`."""
        logit = float(self._row[token_id])
        rank = int(np.count_nonzero(self._row > logit)) + 1
        top = [float(self._row[i]) - self._log_total for i in self._top]
        return TokenLogprobs(logit - self._log_total, rank, list(self._top), top)


def _top_ids(row: Row, count: int) -> list[int]:
    """Ids of the `count` largest, largest first; of equal ones the lower id first, as the greedy choice has it."""
    count = min(count, len(row))
    if not count:
        return []
    # The count-th largest maximum of pieces is a lower bound of what is wanted, and leaves few to sort: 40 us for
    # 49,152 tokens instead of 250 for a partition of the row.
    num_pieces = len(row) // _PIECE
    if num_pieces > count:
        maxima = row[: num_pieces * _PIECE].reshape(num_pieces, _PIECE).max(axis=1)
        least = np.partition(maxima, num_pieces - count)[num_pieces - count]
    else:
        least = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= least)
    return [int(i) for i in ids[np.lexsort((ids, -row[ids]))][:count]]


def penalise(row: Row, prompt: Ids, output: Ids, sampling: SamplingParams) -> None:
    """Change `row` [vocab] in place by the three penalties."""
    ids, counts = np.unique(output, return_counts=True)
    if sampling.repetition_penalty != 1:
        seen = np.union1d(prompt, ids)
        logits = row[seen]
        factor = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(logits > 0, logits / factor, logits * factor)
    if len(ids) and (sampling.frequency_penalty or sampling.presence_penalty):
        off = np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        row[ids] -= off + np.float32(sampling.presence_penalty)


class SequenceRules:
    """The rules of one sequence. `apply` before each choice, `chosen` after it."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
        eos: tuple[int, ...],
        grammars: GrammarCompiler | None,
    ) -> None:
        """Raises InvalidRequestError or GrammarError for a grammar that does not work here."""
        self._sampling = sampling
        self._prompt = np.unique(np.asarray(prompt, np.int32)) if sampling.repetition_penalty != 1 else _NO_IDS
        penalties = (sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty)
        self._penalises = any(penalties)
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int32, len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias))
        self._allowed: NDArray[np.bool_] | None = None
        if sampling.allowed_token_ids:
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[list(sampling.allowed_token_ids)] = True
        # under a grammar eos ends the sequence even where it is to be ignored, so it is held back there too
        ends = eos if sampling.grammar or not sampling.ignore_eos else ()
        held_back = {*sampling.stop_token_ids, *ends} if sampling.min_tokens else ()
        self._held_back = np.asarray(sorted(t for t in held_back if 0 <= t < vocab_size), np.intp)
        self._matcher: GrammarMatcher | None = None
        if sampling.grammar:
            if grammars is None:
                raise InvalidRequestError("this model runner has no structured output")
            self._matcher = grammars.matcher(sampling.grammar)
            self._matcher.consume(list(output))
        self._vocab_size = vocab_size
        self._reader: LogprobReader | None = None
        #: at every position, where `min_tokens` is over after some
        self._always_changes = bool(
            self._penalises
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.grammar
            or sampling.bad_words
        )

    def is_active(self, num_output: int) -> bool:
        """False once nothing is left to do: `min_tokens` alone is over after that many tokens."""
        sampling = self._sampling
        return self._always_changes or sampling.num_logprobs is not None or num_output < sampling.min_tokens

    def apply(self, row: Row, output: Ids) -> None:
        """Change the logits `row` [vocab] in place. Raises GrammarError when no token is left."""
        sampling = self._sampling
        if sampling.num_logprobs is not None:
            raw = row.copy() if self._always_changes or len(self._held_back) else row
            self._reader = LogprobReader(raw, sampling.num_logprobs)
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if self._penalises:
            penalise(row, self._prompt, output, sampling)
        mask = self._mask(output)
        if mask is not None:
            np.copyto(row, -np.inf, where=~mask)

    def chosen(self, token_id: int) -> TokenLogprobs | None:
        """Take note of the choice made after `apply`; its logprobs where asked for. Raises GrammarError."""
        if self._matcher is not None:
            self._matcher.consume([token_id])
        if self._reader is None:
            return None
        logprobs, self._reader = self._reader.read(token_id), None
        return logprobs

    def _mask(self, output: Ids) -> NDArray[np.bool_] | None:
        """True where a token may be chosen; None: anywhere."""
        mask = None if self._allowed is None else self._allowed.copy()
        if self._matcher is not None:
            allowed = self._matcher.allowed()
            mask = allowed if mask is None else mask & allowed
        banned = self._banned(output)
        if banned:
            mask = np.ones(self._vocab_size, np.bool_) if mask is None else mask
            mask[banned] = False
        if mask is not None and not mask.any():
            raise GrammarError("allowed_token_ids, bad_words and the grammar together leave no token")
        if len(output) < self._sampling.min_tokens and len(self._held_back):
            longer = np.ones(self._vocab_size, np.bool_) if mask is None else mask.copy()
            longer[self._held_back] = False
            if longer.any():  # else nothing but the end is possible: the grammar is complete, and min_tokens yields
                mask = longer
        return mask

    def _banned(self, output: Ids) -> list[int]:
        """Last tokens of the bad words whose other tokens the output ends in."""
        banned = []
        for word in self._sampling.bad_words:
            num_before = len(word) - 1
            if num_before <= len(output) and tuple(output[len(output) - num_before :].tolist()) == word[:-1]:
                banned.append(word[-1])
        return banned


_NO_IDS = np.zeros(0, np.int32)


def prompt_logprobs(logits: NDArray[np.float32], next_ids: Ids, num_top: int) -> list[TokenLogprobs]:
    """Logprobs of the prompt tokens that follow the rows of `logits` [rows, vocab]."""
    return [LogprobReader(row, num_top).read(token_id) for row, token_id in zip(logits, next_ids.tolist(), strict=True)]
