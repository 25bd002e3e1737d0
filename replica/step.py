"""PURE. What the scheduler asks of a model runner, and what it gets back.

A runner keeps a copy of each sequence it knows (tokens, block table, sampling), so a plan carries only what changed.
That makes a plan a few hundred bytes in steady decode: it can go to another process or to tensor-parallel ranks as is.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from replica.kv_messages import ArenaPlace
from replica.messages import SamplingParams, TokenLogprobs

#: a plan that waits for copies is answered by then, so that a request that comes meanwhile does not wait long
COPY_WAIT_S = 0.005


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence the runner does not know (fresh, or back after a preemption)."""

    seq_id: int
    #: prompt and, after a preemption or a resume, the output so far
    token_ids: list[int]
    num_prompt_tokens: int
    #: with a window, NULL_BLOCK (-1) for the leading ones that nothing sees
    block_ids: list[int]
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. The three `seq_ids / num_computed / num_scheduled` lists run in parallel, one entry a sequence.

    The runner computes tokens `[num_computed, num_computed + num_scheduled)` of each, and samples one token for
    exactly those sequences whose interval ends at their last known token. It appends that token to its own copy.
    Order of work: `dropped` first, then `new`, then `new_block_ids`, then the computation.

    A sequence with drafts is at its last known token; its interval goes on over the drafts as if they were known. A
    token is sampled behind each position, and taken as long as all before it equal their drafts: at least one, at most
    one more than there are drafts. Whatever KV the rejected ones left is computed again by later steps.
    """

    step: int
    seq_ids: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    new: list[NewSequence] = []
    #: seq_id -> block ids to append to its block table; of sequences that are known, in the step or not
    new_block_ids: dict[int, list[int]] = {}
    #: sequences to forget: finished, aborted or preempted since the last plan
    dropped: list[int] = []
    #: seq_id -> guesses of what follows its last known token (`replica/speculation.py`); counted in `num_scheduled`
    drafts: dict[int, list[int]] = {}
    #: copies between the pool and the arena of the node (`docs/kv_connector.md`), carried out in order beside this and
    #: later steps: first these, (slot, block id), then `stores`, (block id, slot)
    loads: list[tuple[int, int]] = []
    stores: list[tuple[int, int]] = []
    #: number of the first of them; they count on from there. Those that were told before are not carried out again
    first_copy: int = 0
    #: without sequences: come back when all copies are done, or after `COPY_WAIT_S`
    waits_for_copies: bool = False
    #: the arena of these and all later copies, when it is another one
    arena: ArenaPlace | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampled tokens, in plan order: `token_ids[i]` belongs to `seq_ids[i]`; sequences that did not sample are
    absent.
    """

    step: int
    seq_ids: list[int]
    token_ids: list[int]
    #: seconds the runner worked on this step
    duration_s: float = 0.0
    #: seq_id -> of the sampled token, where asked for
    logprobs: dict[int, TokenLogprobs] = {}
    #: seq_id -> of the prompt tokens that follow the tokens computed in this step: the first entry belongs to prompt
    #: position `num_computed + 1`
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    #: seq_id -> why it cannot go on, though nothing is wrong with the device; it is then not in `seq_ids`
    failed: dict[int, str] = {}
    #: seq_id -> the tokens after its first one, as many as drafts were accepted
    more: dict[int, list[int]] = {}
    #: sequences for which the model computed NaN or infinity, so that there is no token to choose; not in `seq_ids`
    not_finite: list[int] = []
    #: copies below this number are over, on all ranks; their progress is told with every step
    copied: int = 0
    #: some of the copies below this number failed (the arena could not be mapped): those that were not told as over
    #: before count as failed
    failed_below: int = 0
    #: seconds spent in copies since the last result
    copy_s: float = 0.0


class RunnerInfo(msgspec.Struct, frozen=True):
    """Facts about a loaded model that the scheduler and the router need."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    #: hex digest of model, revision, dtype, RoPE setting: part of every block hash
    model_fingerprint: str
    #: one human-readable line on device, dtype, kernels, threads and the invariance self-test
    description: str = ""
    #: if all layers have a window, the largest: a query sees so many last positions, its own included, and nothing of a
    #: sequence before them is ever read; None: it is, or no sequence gets so long
    window: int | None = None
    #: bytes of one block over all ranks, as a slot has it; 0: its KV cannot be copied from or to an arena
    block_bytes: int = 0
    #: 1: each KV head is held by one rank, and a block's bytes are in the same order whatever the number of ranks; else
    #: that number
    kv_degree: int = 1


class Arena(Protocol):
    """Memory of a KVConnector, mapped."""

    #: [num_slots, bytes of a slot]
    array: npt.NDArray[np.uint8]

    def close(self) -> None:
        """Unmap; `array` is gone. Idempotent."""
        ...


class OpenArena(Protocol):
    def __call__(self, place: ArenaPlace, member: str) -> Arena:
        """Raises OSError or EngineError if it is not there, or is another one."""
        ...


class ModelRunner(Protocol):
    """Runs the forward pass and samples. Called from one thread only (but for `prepare_grammar`); knows nothing of
    queues or blocks' owners.
    """

    @property
    def info(self) -> RunnerInfo: ...

    def prepare_grammar(self, grammar: str) -> None:
        """Compile `grammar`, so that a later sequence with it does not hold up a step. From any thread, at any time;
        may take a while. Raises InvalidRequestError if it cannot be compiled here.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out `plan`. Raises whatever the device raises; the engine then fails the sequences of the step."""
        ...

    def close(self) -> None:
        """Free the device. Idempotent."""
        ...
