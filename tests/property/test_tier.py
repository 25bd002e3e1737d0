"""The engine machine beside a KVConnector that answers late or not at all, evicts, loses leases, dies and comes back,
with copies of any pace; and ranks that are lost.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from replica.config import EngineConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner
from replica.kv_messages import ArenaPlace, FromConnector, ToConnector
from replica.kv_transfer import TransferLimits
from replica.step import Arena, StepPlan
from tests.property.engine_client import BLOCK, ROUTERS, VOCAB
from tests.property.lengths import examples
from tests.property.test_scheduler import EngineMachine
from tests.unit.tier_harness import LEASE_S, FakeConnector

HOLDER = "a"


class TierMachine(EngineMachine):
    windows: ClassVar[list[int | None]] = [None]

    def make_runner(self, num_blocks: int) -> FakeModelRunner:
        self.connectors: list[FakeConnector] = []
        self.down: deque[ToConnector] = deque()
        self.up: deque[FromConnector] = deque()
        self.is_up = False
        self.num_waits = 0
        return FakeModelRunner(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=64,
            vocab_size=VOCAB,
            eos_token_ids=(),
            open_arena=self.open_arena,
        )

    def make_core(self) -> EngineCore:
        mode = ("recompute", "offload", "auto")[self.runner.info.num_blocks % 3]
        self.config = self.with_mode(mode)
        self.has_tier = self.config.cache.enable_prefix_caching
        return EngineCore(
            self.config,
            self.runner.info,
            transfer_limits=TransferLimits(1, 0.15, 0.25) if self.has_tier else None,
        )

    def with_mode(self, mode: str) -> EngineConfig:
        scheduler = self.config.scheduler.model_copy(update={"preemption_mode": mode})
        return self.config.model_copy(update={"scheduler": scheduler})

    def open_arena(self, place: ArenaPlace, member: str) -> Arena:
        (connector,) = [c for c in self.connectors if c.name == place.incarnation]
        return connector.open(place, member)

    @property
    def connector(self) -> FakeConnector:
        return self.connectors[-1]

    @precondition(lambda self: hasattr(self, "core") and self.core.kv is not None and not self.is_up)
    @rule(num_slots=st.integers(1, 40), tells=st.booleans(), is_new=st.booleans())
    def connect(self, num_slots: int = 20, tells: bool = True, is_new: bool = True) -> None:
        assert self.core.kv is not None
        if is_new or not self.connectors or self.connector.quarantine:
            self.connectors.append(FakeConnector(num_slots, 8 * BLOCK, tells, f"c{len(self.connectors)}"))
        self.is_up = True
        self.core.kv.connected(self.connector.place(HOLDER), LEASE_S, self.now)

    @precondition(lambda self: hasattr(self, "core") and self.core.kv is not None)
    @rule(count=st.sampled_from([3, 10, 30]), most=st.sampled_from([None, 1, 3]))
    def runs(self, count: int, most: int | None) -> None:
        """Without it hardly anything comes as far as a load."""
        if not self.is_up:
            self.connect()
        self.runner.copies.most = most
        for _ in range(count):
            self.messages_arrive(9)
            self.events_arrive()
            if self.plan is None:
                self.schedule()
            if self.plan is not None:
                self.finish_step()
            self.core.validate()

    @precondition(lambda self: hasattr(self, "core"))
    @rule(length=st.integers(12, 30), max_tokens=st.integers(1, 12), count=st.integers(1, 3), runs=st.integers(0, 20))
    def submits_what_was_there_before(self, length: int, max_tokens: int, count: int, runs: int) -> None:
        """As if others had taken all that nobody holds in the pool; the tier keeps it."""
        self.core.blocks.clear_cache()
        for _ in range(count):
            self.submit(ROUTERS[0], 1, length, 1, max_tokens, 0, "", False)
        if self.core.kv is not None:
            self.runs(runs, 1)

    @precondition(lambda self: getattr(self, "is_up", False))
    @rule()
    def connection_breaks(self) -> None:
        """What the holder has is kept while one of its processes is there: here the ranks are."""
        assert self.core.kv is not None
        self.is_up = False
        self.down.clear()
        self.up.clear()
        self.core.kv.gone()
        if self.runner.copies.is_busy:
            self.connector.give_up(HOLDER)  # somebody may still write
        else:
            self.connector.leave(HOLDER)

    @precondition(lambda self: getattr(self, "is_up", False))
    @rule(count=st.integers(1, 9))
    def messages_arrive(self, count: int = 9) -> None:
        assert self.core.kv is not None
        self.down += self.core.kv.take_messages()
        for _ in range(count):
            if self.down:
                self.up += self.connector.handle(HOLDER, self.down.popleft())
            if self.up:
                self.core.kv.receive(self.up.popleft(), self.now)

    @precondition(lambda self: getattr(self, "is_up", False))
    @rule()
    def events_arrive(self) -> None:
        self.up += self.connector.events(HOLDER)

    @precondition(lambda self: getattr(self, "is_up", False))
    @rule(count=st.integers(1, 5), voids=st.booleans())
    def slots_go(self, count: int, voids: bool) -> None:
        self.connector.evict(count)
        for _, lease_id in list(self.connector.leases)[: int(voids)]:
            assert self.core.kv is not None
            # told at once: what is told later is for the connector to keep readable until then
            for message in self.connector.void(HOLDER, lease_id):
                self.core.kv.receive(message, self.now)

    @precondition(lambda self: getattr(self, "is_up", False))
    @rule()
    def everything_stands_still(self) -> None:
        """For longer than a lease: the connector gives the replica up, and others write where it reads."""
        self.connector.give_up(HOLDER)
        self.connector.evict(100)
        self.now += LEASE_S + 1
        self.core.end_overdue(self.now)
        self.deliver(self.core.take_ended())

    @precondition(lambda self: hasattr(self, "core"))
    @rule(most=st.sampled_from([None, 0, 1, 3]))
    def copies_go(self, most: int | None) -> None:
        self.runner.copies.most = most

    @precondition(lambda self: hasattr(self, "core") and self.core.kv is not None)
    @rule(reads_plan=st.booleans())
    def ranks_are_lost(self, reads_plan: bool) -> None:
        if self.plan is not None and reads_plan:
            self.runner.execute(self.plan)
        self.plan = None
        self.core.pause()
        self.deliver(self.core.lose_runner(self.now))
        self.compiling.clear()
        assert self.core.blocks.num_free == self.core.blocks.num_blocks
        self.runner.begin_anew()
        self.core.resume()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step_fails_unread(self) -> None:
        """The runner failed before it had read the plan, or the plan never came there."""
        self.plan = None
        self.deliver(self.core.fail_step(self.now))

    def lanes_hold(self, plan: StepPlan) -> None:
        """A load that comes to nothing leaves a prompt longer than the one that its lane was taken for."""
        if self.core.kv is None:
            super().lanes_hold(plan)

    def check_nothing_to_do(self) -> None:
        """Whoever waits, waits for an answer, and not for ever."""
        if self.core.num_unfinished > len(self.core.scheduler.blocked) or self.core.scheduler.has_work:
            assert self.core.kv is not None
            assert self.core.kv.next_deadline is not None, "work, but no step, and nothing to wait for"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.runner.copies.most = None
        while self.compiling:
            self.compiled(True)
        for _ in range(5000):
            if self.is_up:
                self.messages_arrive(9)
                self.events_arrive()
            if self.plan is None:
                self.schedule()
            if self.plan is not None:
                self.finish_step()
            elif self.core.num_unfinished or self.down or self.up:
                self.now += 0.05
                self.core.end_overdue(self.now)
                self.deliver(self.core.take_ended())
            else:
                break
        self.now += 1.0
        self.core.end_overdue(self.now)
        super().teardown()
        if self.is_up:
            for _ in range(5):
                self.messages_arrive(50)
            assert not self.connector.leases, "a lease that nobody releases"
            assert not self.connector.reserved, "a reservation that nobody ends"


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=examples(25), stateful_step_count=50, deadline=None)
