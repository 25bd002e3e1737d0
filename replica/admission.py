"""PURE. What a replica takes and what it refuses: the rules of `submit`, without its effects."""

from __future__ import annotations

import struct
from collections.abc import Collection

import numpy as np

from replica.attention_window import Window
from replica.block_hash import pack_tokens
from replica.messages import GenerateRequest, RefusalReason, SequenceInput
from replica.step import RunnerInfo


class Refused(Exception):
    """A request is not taken."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def longest_sequence(info: RunnerInfo) -> tuple[int, str]:
    """Tokens that one sequence may have, prompt and output, and what holds so many. With a window it need not fit the
    pool: only what a token sees has to.
    """
    in_pool = info.num_blocks * info.block_size
    is_sliding = info.window is not None and Window(info.window, info.block_size).span(1) <= info.num_blocks
    if is_sliding or in_pool >= info.max_model_len:
        return info.max_model_len, "the model's context"
    return in_pool, "the KV cache of a replica"


class Admission:
    """Knows the limits of the replica; who is queued it is told."""

    def __init__(self, info: RunnerInfo, cap: int) -> None:
        self.cap = cap
        self.is_draining = False
        #: though it drains, it takes back what it had to give away when its runner was lost
        self.takes_returning = False
        #: False while the runner is being mended
        self.is_ready = True
        self._vocab_size = info.vocab_size
        #: prompt and output of one sequence may not exceed this: the context or the whole pool
        self.max_tokens, self._max_of = longest_sequence(info)

    def check(self, request: GenerateRequest, is_known: bool, now: float) -> list[bytes]:
        """Raises Refused. Returns the tokens of each sequence, packed to be hashed. `is_known`: the id is in use.

        Whether there is room in the queue is another matter (`replica/shedding.py`).
        """
        if self.is_draining and not (self.takes_returning and request.is_returning):
            raise Refused(RefusalReason.DRAINING, "the replica is draining")
        if not self.is_ready:
            raise Refused(RefusalReason.NOT_READY, "the replica lost a rank and is starting it again")
        if is_known:
            raise Refused(RefusalReason.DUPLICATE, f"request id {request.request_id!r} is already in use")
        if not request.sequences:
            raise Refused(RefusalReason.INVALID, "the request has no sequences")
        packed = [self._check_sequence(sequence) for sequence in request.sequences]
        wanted = len(request.sequences)
        if request.is_returning:
            return packed
        if wanted > self.cap:
            raise Refused(
                RefusalReason.TOO_MANY_SEQUENCES,
                f"{wanted} sequences (prompts x n) in one request; allowed: {self.cap}, the queue of a replica",
            )
        if request.deadline_s is not None and request.deadline_s <= now:
            raise Refused(
                RefusalReason.DEADLINE, f"the deadline passed {now - request.deadline_s:.3f} s before the request came"
            )
        return packed

    def _check_sequence(self, sequence: SequenceInput) -> bytes:
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        if not sequence.prompt_token_ids:
            raise Refused(RefusalReason.INVALID, "the prompt has no tokens")
        if sequence.sampling.max_tokens < 1:
            raise Refused(RefusalReason.INVALID, f"max_tokens is {sequence.sampling.max_tokens}, it must be at least 1")
        if num_tokens >= self.max_tokens:
            raise Refused(
                RefusalReason.NEVER_FITS,
                f"the prompt has {num_tokens} tokens, but {self._max_of} holds {self.max_tokens} "
                "with at least one of output",
            )
        try:
            # numpy finds the largest of 32,768 in 10 us where max() takes 400, and packing refuses what is negative
            packed = pack_tokens(sequence.prompt_token_ids) + pack_tokens(sequence.output_token_ids)
            is_known = int(np.frombuffer(packed, "<u4").max()) < self._vocab_size
        except struct.error:
            is_known = False
        if not is_known:
            raise Refused(RefusalReason.INVALID, f"token ids must lie in [0, {self._vocab_size})")
        sampling = sequence.sampling
        self._check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids([token_id for word in sampling.bad_words for token_id in word], "bad_words")
        return packed

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        """The runner indexes with them. A router that knows a larger vocabulary must not stop a step of others."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            raise Refused(RefusalReason.INVALID, f"token ids of {param} must lie in [0, {self._vocab_size})")
