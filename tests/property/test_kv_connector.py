"""The core of a KVConnector in a world where anything may happen next (`benchmarks/kv_world.py`): crashes and stops of
holders, late words, jobs out of order, failed and answered twice, flipped slabs, `Clear`, restarts. 100,000 steps are
in `make soak`.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from benchmarks import kv_soak
from benchmarks.kv_events import ACTIONS, WildWorld
from cluster.kv_connector.config import KVCacheConfig

NAMES = {action.__name__: action for action in ACTIONS}


class ConnectorMachine(RuleBasedStateMachine):
    """hypothesis chooses what happens, and shrinks it; the seed says how."""

    world: WildWorld

    @initialize(
        num_slots=st.sampled_from([2, 8, 24]),
        num_disk_slots=st.sampled_from([0, 4, 40]),
        eviction=st.sampled_from(["lru", "cost"]),
        admission=st.sampled_from(["always", "second_use"]),
    )
    def begin(self, num_slots: int, num_disk_slots: int, eviction: Any, admission: Any) -> None:
        config = KVCacheConfig(eviction=eviction, tier_admission=admission)
        self.world = WildWorld(config, num_slots, num_disk_slots)
        self.world.come(random.Random(0))

    @rule(name=st.sampled_from(sorted(NAMES)), seed=st.integers(0, 1 << 16), times=st.integers(1, 3))
    def step(self, name: str, seed: int, times: int) -> None:
        rng = random.Random(seed)
        for _ in range(times):
            NAMES[name](self.world, rng)
            self.world.look()
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestConnector = ConnectorMachine.TestCase
TestConnector.settings = settings(max_examples=6, stateful_step_count=40)


def test_a_slice_of_the_soak() -> None:
    counts = kv_soak.run(6000, 0, every=25)
    assert counts["worlds"] == 3
    for name in (
        "blocks stored",
        "given from host",
        "given from remote",
        "late",
        "evictions",
        "quarantined slots seen",
        "cleared with a peer",
        "not believed",
    ):
        assert counts[name] > 0, f"{name}: {counts}"
