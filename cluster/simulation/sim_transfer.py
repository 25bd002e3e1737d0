"""PURE. KV on its way from prefill to decode replicas in virtual time: blocks leave as they are computed, one after the
other on the link of their prefill replica, and are written into the decode replica's pool when they arrive.

Stands where the KVConnector stands live (`docs/kv_connector.md`), without tiers: what is lost on the way is computed by
the decode replica when `KVSource.load_within_s` has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from cluster.simulation.event_queue import EventQueue, Rank
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner
from replica.messages import ReplicaId, Seated
from replica.sequence import Sequence, Status

Rows = npt.NDArray[np.uint8]


class _Flow:
    """To one seated sequence."""

    def __init__(
        self, core: EngineCore, runner: FakeModelRunner, sequence: Sequence, seated: Seated, wake: Callable[[], None]
    ) -> None:
        size = core.blocks.block_size
        self.core, self.runner, self.sequence = core, runner, sequence
        self.hand_over = seated.hand_over
        #: somebody there may go on
        self.wake = wake
        #: next block to be sent, and the one behind the last
        self.next = seated.num_cached_tokens // size
        self.end = sequence.num_prompt_tokens // size
        self.table = sequence.block_ids.copy()

    def arrive(self, first: int, rows: Rows) -> bool:
        """False: nobody has this seat any more."""
        sequence, end = self.sequence, first + len(rows)
        remote = sequence.remote
        if sequence.status is not Status.RUNNING or remote is None or remote.source.hand_over != self.hand_over:
            return False
        if sequence.block_ids[: len(self.table)] != self.table:
            return False
        self.runner.pool[self.table[first:end]] = rows
        self.core.scheduler.remote.loaded(sequence, end, end >= self.end)
        return True


class _Leg:
    """A sequence whose blocks somebody waits for."""

    def __init__(self, sequence: Sequence, hand_over: str) -> None:
        self.sequence = sequence
        self.hand_over = hand_over
        self.num_told = 0


class SimTransfers:
    """Of a whole cluster."""

    def __init__(self, events: EventQueue, block_s: float, delay_s: float) -> None:
        """`block_s`: seconds of one block on a link."""
        self._events = events
        self._block_s = block_s
        self._delay_s = delay_s
        self._flows: dict[str, _Flow] = {}
        self._legs: dict[ReplicaId, list[_Leg]] = {}
        self._free_at: dict[ReplicaId, float] = {}
        self.num_blocks = 0

    def seated(self, core: EngineCore, runner: FakeModelRunner, seated: Seated, wake: Callable[[], None]) -> None:
        """A decode replica has reserved blocks."""
        sequence = next((s for s in core.scheduler.running if s.request_id == seated.request_id), None)
        if sequence is not None and seated.is_waiting:
            self._flows[seated.hand_over] = _Flow(core, runner, sequence, seated, wake)

    def leg(self, replica_id: ReplicaId, core: EngineCore, request_id: str, hand_over: str) -> None:
        """A prefill replica was given a prompt."""
        sequence = next((s for s in core.scheduler.living() if s.request_id == request_id), None)
        if sequence is not None:
            self._legs.setdefault(replica_id, []).append(_Leg(sequence, hand_over))

    def step_ended(self, replica_id: ReplicaId, core: EngineCore, runner: FakeModelRunner) -> None:
        """Blocks of a prefill replica may be complete: send them."""
        legs = self._legs.get(replica_id)
        if not legs:
            return
        for leg in legs:
            is_over = leg.sequence.status is Status.FINISHED
            if is_over or leg.sequence.num_blocks_committed > leg.num_told:
                block_ids = core.blocks.find_prefix(leg.sequence)
                if not is_over:
                    block_ids = block_ids[: leg.sequence.num_blocks_committed]
                self._send(replica_id, leg, block_ids, runner)
        self._legs[replica_id] = [leg for leg in legs if leg.sequence.status is not Status.FINISHED]

    def _send(self, replica_id: ReplicaId, leg: _Leg, block_ids: list[int], runner: FakeModelRunner) -> None:
        leg.num_told = max(leg.num_told, len(block_ids))
        flow = self._flows.get(leg.hand_over)
        if flow is None:
            return
        first, end = flow.next, min(len(block_ids), flow.end)
        if end <= first:
            return
        flow.next = end
        self.num_blocks += end - first
        rows = runner.pool[block_ids[first:end]]
        begins = max(self._events.now, self._free_at.get(replica_id, 0.0))
        self._free_at[replica_id] = begins + (end - first) * self._block_s
        if end >= flow.end:
            del self._flows[leg.hand_over]
        self._events.at(
            self._free_at[replica_id] + self._delay_s, Rank.MESSAGE_UP, partial(self._arrive, flow, first, rows)
        )

    def _arrive(self, flow: _Flow, first: int, rows: Rows) -> None:
        if flow.arrive(first, rows):
            flow.wake()
