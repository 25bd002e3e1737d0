"""PURE. All of a scheduler that follows from its configuration, as one object.

The rules look at queues, blocks and running sequences and keep no state of their own, so a change of configuration
makes new ones, and the scheduler puts them in the place of the old ones between two steps: no step is planned half by
old and half by new ones.
"""

from __future__ import annotations

from replica.block_manager import BlockManager
from replica.config import SchedulerConfig
from replica.kv_transfer import KVTransfer
from replica.order import make_policy
from replica.preemption import VictimChoice, take_back_by
from replica.prefill_lanes import PrefillLanes
from replica.progress import SchedulerCounters
from replica.remote_prefill import RemotePrefills
from replica.running_set import RunningSet
from replica.seat_shares import SeatShares
from replica.speculation import Speculation
from replica.step_admission import StepAdmission
from replica.tenant_ledger import TenantLedger
from replica.waiting_queue import WaitingQueue


class StepRules:
    """Who runs in a step by one configuration."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        returning: WaitingQueue,
        queued: WaitingQueue,
        running: RunningSet,
        counters: SchedulerCounters,
        ledger: TenantLedger,
        blocked: WaitingQueue,
        transfer: KVTransfer | None,
        remote: RemotePrefills,
    ) -> None:
        assert config.max_num_batched_tokens is not None, "resolve() the configuration first"
        self.config = config
        self.max_batched = config.max_num_batched_tokens
        self.policy = make_policy(config)
        self.seats = SeatShares(running)
        self.victims = VictimChoice(config, self.policy, blocks)
        self.take_back = take_back_by(config.preemption_mode, blocks, transfer)
        self.admission = StepAdmission(
            config, self.policy, blocks, returning, queued, running, counters, ledger, blocked, transfer, remote
        )
        self.speculation = Speculation(config, blocks, running)

    @property
    def max_chunk(self) -> int | None:
        """Tokens of one prompt in a step, at most; None: all that it has."""
        if not self.config.enable_chunked_prefill:
            return None
        return min(self.max_batched, self.config.long_prefill_token_threshold or self.max_batched)

    @property
    def max_chunk_tokens(self) -> int:
        """The same, with what a step usually has where there is no limit."""
        return self.max_chunk or self.max_batched

    def lanes(self) -> PrefillLanes:
        """The limits on prompts in pieces, for one step."""
        config = self.config
        if not config.enable_chunked_prefill:
            return PrefillLanes(config.long_prefill_token_threshold)
        return PrefillLanes(
            config.long_prefill_token_threshold, config.max_partial_prefills, config.max_long_partial_prefills
        )

    def orders_like(self, other: StepRules) -> bool:
        """Both make the same queue keys."""
        return all(
            getattr(self.config, name) == getattr(other.config, name)
            for name in ("policy", "priority_ageing_s", "sjf_ageing_tokens_per_s")
        )
