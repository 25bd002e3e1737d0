"""PURE. A sequence: one token stream inside the engine (request x n samples).

There is no prefill state and no decode state: `num_computed_tokens` catches up with `num_tokens`, that is all.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from replica.block_hash import chain_hashes
from replica.messages import FinishReason, OrderKey, RequestId, RouterId, SamplingParams, TokenLogprobs
from replica.sequence_record import SequenceRecord

if TYPE_CHECKING:
    from replica.hand_over_messages import KVSink
    from replica.kv_loads import Load
    from replica.remote_prefill import Remote
    from replica.running_set import RunningSet
    from replica.speculation import Drafter


class Status(enum.Enum):
    """Where a sequence is. QUEUED counts against the cap; RETURNING was scheduled before and does not."""

    QUEUED = "queued"
    RETURNING = "returning"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Plain state. Only the scheduler and the block manager change it.

    `block_ids` is the block table, in which those that a window has passed are NULL_BLOCK; `block_hashes` covers the
    leading full blocks of `token_ids` and grows with them.
    While it runs, what changes with every step is kept in its row of the running set.
    """

    __slots__ = (
        "_num_computed",
        "_running",
        "abort_reason",
        "block_hashes",
        "block_ids",
        "drafter",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "index",
        "known_to_runner",
        "load",
        "max_total_tokens",
        "num_blocks_committed",
        "num_cached_tokens",
        "num_charged_outputs",
        "num_clears_before",
        "num_passed_blocks",
        "num_passes",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_at_preemption",
        "order_key",
        "prompt_logprobs",
        "queue_key",
        "record",
        "remote",
        "request_id",
        "root",
        "router_id",
        "row",
        "sampling",
        "seq_id",
        "sink",
        "status",
        "stop_reason",
        "submitted_at",
        "tenant",
        "tenant_weight",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: RequestId,
        index: int,
        router_id: RouterId,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        sampling: SamplingParams,
        order_key: OrderKey,
        root: bytes,
        max_total_tokens: int,
        now: float,
        is_returning: bool = False,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.index = index
        self.router_id = router_id
        self.token_ids = prompt_token_ids + output_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.order_key = order_key
        self.tenant = tenant
        self.tenant_weight = tenant_weight
        #: output tokens that its tenant has paid for (`replica/tenant_ledger.py`)
        self.num_charged_outputs = 0
        #: its place among those that wait; the scheduler sets it by policy (`replica/order.py`)
        self.queue_key = (order_key[0], order_key[2], order_key[2], seq_id)
        self.root = root
        #: prompt + output may not exceed this (context, KV pool and max_tokens, whichever is least)
        self.max_total_tokens = max_total_tokens
        self.status = Status.RETURNING if is_returning else Status.QUEUED
        self._num_computed = 0
        self._running: RunningSet | None = None
        #: in the running set; -1 while it does not run
        self.row = -1
        #: of the prompt, tokens found in the prefix cache at first admission
        self.num_cached_tokens = 0
        #: known tokens when last preempted: up to here, computing again is rework
        self.num_tokens_at_preemption = 0
        self.num_preemptions = 0
        #: how many were admitted past it while it did not fit
        self.num_passes = 0
        #: of prompt positions 1, 2, ... as far as computed; until the first output takes them along
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        #: leading entries of the block table that are NULL_BLOCK
        self.num_passed_blocks = 0
        #: how often the prefix cache had been cleared when it was admitted
        self.num_clears_before = 0
        #: leading blocks whose hash is registered (or found) in the prefix cache
        self.num_blocks_committed = 0
        self.known_to_runner = False
        #: what it wants of the KVConnector since it last began to wait; None: it was not asked yet
        self.load: Load | None = None
        #: another replica computes its prompt; None: no, or not any more
        self.remote: Remote | None = None
        #: another replica waits for its blocks
        self.sink: KVSink | None = None
        #: guesses its next tokens; None until the first guess
        self.drafter: Drafter | None = None
        self.abort_reason: FinishReason | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.submitted_at = now
        self.record = SequenceRecord(now)
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache for this sequence."""
        return self._num_computed if self._running is None else int(self._running.num_computed[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        if self._running is None:
            self._num_computed = count
        else:
            self._running.num_computed[self.row] = count

    @property
    def in_step(self) -> bool:
        """Part of the step that the runner works on right now; its blocks may not be freed."""
        return self._running is not None and bool(self._running.in_step[self.row])

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def held_blocks(self) -> list[int]:
        """The block table without those that a window has passed. Not to be changed."""
        return self.block_ids[self.num_passed_blocks :] if self.num_passed_blocks else self.block_ids

    @property
    def standing(self) -> tuple[int, tuple[float, float, float, int]]:
        """How urgent it is, whosever turn it is: a `replica.order.Standing`."""
        return (self.order_key[1], (0.0, *self.queue_key[1:]))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Logits of its prompt are still wanted, so the prompt must be computed: the cache keeps no logits."""
        return self.sampling.num_prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def append(self, token_id: int) -> None:
        """One more known token."""
        self.token_ids.append(token_id)
        if self._running is not None:
            self._running.num_tokens[self.row] += 1

    def enter(self, running: RunningSet, row: int) -> None:
        """`row` of `running` is its own now. For the running set only."""
        self._running, self.row = running, row

    def leave(self) -> int:
        """Take the counts along; gives back the row. For the running set only."""
        row, self._num_computed = self.row, self.num_computed_tokens
        self._running, self.row = None, -1
        return row

    def take_prompt_logprobs(self) -> list[TokenLogprobs]:
        """Give them out, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        if self.sampling.num_prompt_logprobs is not None:
            self.sampling = msgspec.structs.replace(self.sampling, num_prompt_logprobs=None)
        return taken

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to the full blocks of `token_ids`; each block is hashed once in a sequence's life."""
        done, num_full = len(self.block_hashes), len(self.token_ids) // block_size
        if num_full > done:
            parent = self.block_hashes[-1] if done else self.root
            self.block_hashes += chain_hashes(
                parent, self.token_ids[done * block_size : num_full * block_size], block_size
            )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request_id}/{self.index}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens, {len(self.held_blocks)} blocks)"
        )
