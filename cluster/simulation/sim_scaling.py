"""PURE. Replicas come and go in virtual time: a policy is asked once a second, as Serve asks one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from cluster.autoscaling import ScalingPolicy
from cluster.simulation.event_queue import Rank
from cluster.simulation.records import SimRecord
from cluster.simulation.sim_cluster import SimCluster
from cluster.simulation.sim_replica import SimReplica
from replica.messages import ReplicaId
from replica.scaling_figures import ScalingFigures


class Seen(msgspec.Struct, frozen=True):
    """What a policy may look at. `replicas`: figures of those that are up; `num_ongoing`: requests that clients wait
    for; `num_running` and `target`: replicas that are up, and how many were wanted last.
    """

    replicas: list[Mapping[str, float]]
    num_ongoing: int
    num_running: int
    target: int


class Policy(Protocol):
    """Ours, or a rival's."""

    def wanted(self, seen: Seen, now: float) -> int: ...


class OurPolicy:
    """The production policy."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy

    def wanted(self, seen: Seen, now: float) -> int:
        return self._policy.decide(seen.replicas, seen.target, now)


class SimScaler:
    """Follows a policy: one that is wanted is up after `start_s`, one that is not drains, the youngest first. A replica
    is paid for from the order to its end.
    """

    def __init__(
        self, cluster: SimCluster, policy: Policy, *, start_s: float, drain_s: float = 30.0, period_s: float = 1.0
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._start_s, self._drain_s, self._period_s = start_s, drain_s, period_s
        self._records: list[SimRecord] = []
        #: name -> when it was ordered; those that start are not in `cluster.replicas` yet
        self._ordered: dict[ReplicaId, float] = dict.fromkeys(cluster.replicas, 0.0)
        self._starting: list[ReplicaId] = []
        self._draining: list[ReplicaId] = []
        self._figures: dict[ReplicaId, ScalingFigures] = {}
        self._number = len(self._ordered)
        self._paid_s = 0.0
        self.target = len(self._ordered)
        #: (when, how many were wanted from then on)
        self.changes: list[tuple[float, int]] = [(0.0, self.target)]

    def follow(self, records: list[SimRecord]) -> None:
        """From now on, until all of `records` have ended. For `SimCluster.run`."""
        self._records = records
        self._tick()

    def replica_seconds(self) -> float:
        """All that was paid for until now."""
        now = self._cluster.events.now
        return self._paid_s + sum(now - at for at in self._ordered.values())

    def _tick(self) -> None:
        events = self._cluster.events
        self._let_go()
        up = [replica for name, replica in self._cluster.replicas.items() if name not in self._draining]
        ongoing = sum(1 for r in self._records if r.num_ends == 0 and r.request.arrival_s <= events.now)
        told = [self._told(replica) for replica in up]
        wanted = self._policy.wanted(Seen(told, ongoing, len(up), self.target), events.now)
        if wanted != self.target:
            self.target = wanted
            self.changes.append((events.now, wanted))
        self._approach(up)
        if any(record.num_ends == 0 for record in self._records):
            events.after(self._period_s, Rank.TIMER, self._tick)

    def _told(self, replica: SimReplica) -> Mapping[str, float]:
        figures = self._figures.setdefault(replica.replica_id, ScalingFigures())
        now = self._cluster.events.now
        return figures.take(replica.core.load(now), replica.core.scheduler.pace.line, now)

    def _approach(self, up: list[SimReplica]) -> None:
        excess = len(up) + len(self._starting) - self.target
        for _ in range(-excess):
            self._order()
        for _ in range(excess):
            if self._starting:  # Serve, too, gives up those first that are not up yet
                self._end(self._starting.pop())
            else:
                leaving = up.pop()
                leaving.drain(self._drain_s)
                self._draining.append(leaving.replica_id)

    def _order(self) -> None:
        name = ReplicaId(f"replica-{self._number}")
        self._number += 1
        self._ordered[name] = self._cluster.events.now
        self._starting.append(name)
        self._cluster.events.after(self._start_s, Rank.FAULT, lambda: self._arrive(name))

    def _arrive(self, name: ReplicaId) -> None:
        if name in self._starting:
            self._starting.remove(name)
            self._cluster.add_replica(name)

    def _let_go(self) -> None:
        for name in [*self._draining]:
            if not self._cluster.replicas[name].core.num_unfinished:
                self._draining.remove(name)
                self._cluster.remove(name)
                self._end(name)

    def _end(self, name: ReplicaId) -> None:
        self._paid_s += self._cluster.events.now - self._ordered.pop(name)
