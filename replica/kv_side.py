"""PURE. The KVConnector as the engine core sees it: what comes from the link goes to the transfer, and what follows for
waiting sequences to the scheduler.
"""

from __future__ import annotations

from replica.kv_messages import ArenaPlace, FromConnector, TierEvent, TierStats, ToConnector
from replica.kv_transfer import KVTransfer
from replica.scheduler import Scheduler
from replica.tier_feed import TierFeed


class KVSide:
    """Of one replica. After each call there may be messages to send."""

    def __init__(self, transfer: KVTransfer, scheduler: Scheduler) -> None:
        self._transfer = transfer
        self._scheduler = scheduler
        #: ranks that were lost may still write into the arena, as far as anybody knows
        self._is_silent = False
        #: of the connector itself, while this replica is the one that tells
        self._of_tier: dict[str, float] = {}
        #: what routers are told of the tiers
        self.feed = TierFeed()

    @property
    def next_deadline(self) -> float | None:
        return self._transfer.next_deadline

    @property
    def num_wanting(self) -> int:
        """Sequences that wait as blocked for an answer."""
        return self._transfer.num_wanting

    def connected(self, place: ArenaPlace, lease_s: float, now: float) -> None:
        """The connector has welcomed us."""
        self.feed.connected(place.node)
        self._transfer.connected(place, lease_s, now)

    def gone(self) -> None:
        """The connection broke."""
        self._of_tier = {}
        self.feed.gone()
        self._scheduler.answered(self._transfer.gone())

    def receive(self, message: FromConnector, now: float) -> None:
        """A word of the connector, but for Welcome and Unwelcome."""
        if isinstance(message, TierStats):
            self._of_tier = message.values
            self.feed.chosen(now)
            return
        if isinstance(message, TierEvent):
            self.feed.learn(message)
        self._scheduler.answered(self._transfer.receive(message, now))

    def take_messages(self) -> list[ToConnector]:
        """To be sent in this order. While the runner is lost nothing is told: slots are given back when nobody can
        write them any more.
        """
        return [] if self._is_silent else self._transfer.take_messages()

    def tick(self, now: float) -> None:
        """At least once a second."""
        self._scheduler.answered(self._transfer.tick(now))

    def reset(self) -> None:
        """The prefix cache was emptied."""
        self._transfer.reset()
        self._scheduler.answered(self._transfer.forget_leases())

    def runner_lost(self) -> None:
        """With its KV; all sequences were ended."""
        self._transfer.runner_lost()
        self._is_silent = True

    def runner_back(self) -> None:
        """Every rank has begun anew."""
        self._is_silent = False

    def counters(self) -> dict[str, float]:
        """For `ReplicaLoad.counters`."""
        counters = self._transfer.counters
        return {
            "kv_connected": float(self._transfer.is_connected),
            "kv_loads": counters.loads,
            "kv_failed_loads": counters.failed_loads,
            "kv_blocks_loaded": counters.blocks_loaded,
            "kv_blocks_stored": counters.blocks_stored,
            "kv_blocks_refused": counters.blocks_refused,
            "kv_load_wait_s": counters.load_wait_s,
            "kv_offloads": counters.offloads,
            "kv_stalls": counters.stalls,
            "kv_wanting": self._transfer.num_wanting,
            "kv_loading": self._transfer.num_loading,
            "kv_awaited": self._transfer.num_awaited,
            "kv_storing": self._transfer.num_storing,
            "kv_swapped": self._transfer.num_swapped,
            **self._of_tier,
        }
