"""PURE. A whole cluster in virtual time: routers, replicas, the network between them, clients and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cluster.simulation.event_queue import EventQueue, Rank
from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_replica import SimReplica
from cluster.simulation.sim_router import SimRouter
from cluster.simulation.sim_transfer import SimTransfers
from replica.config import EngineConfig, FrozenModel
from replica.fake_runner import CostModel, FakeModelRunner
from replica.messages import HEARTBEAT_S, DownMessage, ReplicaId, Role, RouterId, UpMessage
from router.disaggregation import Decision, HandOverConfig
from router.dispatcher import DispatcherConfig
from router.pairing import PairingDispatcher
from router.placement import POLICIES


class SimConfig(FrozenModel):
    """Shape of a simulated cluster. `engine` must be resolved."""

    engine: EngineConfig
    num_replicas: int = 1
    num_routers: int = 1
    num_blocks: int = 4096
    max_model_len: int = 8192
    #: of a model all of whose layers have one
    window: int | None = None
    #: beside `num_replicas`, which do both
    num_prefill: int = 0
    num_decode: int = 0
    decision: Decision = "auto"
    prefill_timeout_s: float = 30.0
    #: of KV, and of the link of each prefill replica
    kv_bytes_per_token: float = 0.0
    transfer_bytes_s: float = 1e9
    policy: str = "least-tokens"
    admission_wait_s: float = 0.1
    #: of each router (`DispatcherConfig`)
    max_waiting: int | None = None
    max_held_requests: int = 1024
    move_after_s: float = 2.0
    network_delay_s: float = 0.0005
    #: kill -9 to broken stream
    death_notice_s: float = 0.015


class SimCluster:
    """Build it, `run` a workload, read the records. Same input, same output to the byte."""

    def __init__(self, config: SimConfig, cost: CostModel | None = None) -> None:
        self._config = config
        self._cost = cost
        self.events = EventQueue()
        block_bytes = config.kv_bytes_per_token * config.engine.cache.block_size
        self.transfers = SimTransfers(self.events, block_bytes / config.transfer_bytes_s, config.network_delay_s)
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.routers: dict[RouterId, SimRouter] = {}
        for number in range(config.num_routers):
            router_id = RouterId(f"router-{number}")
            dispatcher = PairingDispatcher(
                DispatcherConfig(
                    admission_wait_s=config.admission_wait_s,
                    max_waiting=config.max_waiting,
                    max_held_requests=config.max_held_requests,
                    move_after_s=config.move_after_s,
                    priority_ageing_s=config.engine.scheduler.class_ageing_s,
                ),
                POLICIES[config.policy],
                self._hand_over_config(),
                router_id,
            )
            self.routers[router_id] = SimRouter(router_id, dispatcher, self.events, self._send_down)
        for number in range(config.num_replicas):
            self.add_replica(ReplicaId(f"replica-{number}"))
        for role, count in ((Role.PREFILL, config.num_prefill), (Role.DECODE, config.num_decode)):
            for number in range(count):
                self.add_replica(ReplicaId(f"{role.value}-{number}"), role)

    def _hand_over_config(self) -> HandOverConfig:
        config = self._config
        return HandOverConfig(
            config.decision,
            config.prefill_timeout_s,
            bytes_per_token=config.kv_bytes_per_token,
            transfer_bytes_s=config.transfer_bytes_s,
        )

    def add_replica(self, replica_id: ReplicaId, role: Role = Role.BOTH) -> None:
        """A replica comes up now."""
        config = self._config
        runner = FakeModelRunner(
            num_blocks=config.num_blocks,
            block_size=config.engine.cache.block_size,
            max_model_len=config.max_model_len,
            cost=self._cost,
            window=config.window,
        )
        replica = self.replicas[replica_id] = SimReplica(
            replica_id, config.engine, runner, self.events, self._send_up, role, self.transfers
        )
        for router in self.routers.values():
            router.add_replica(replica_id, role)
            replica.connect(router.router_id)

    def kill_at(self, time_s: float, replica_id: ReplicaId, replace_after_s: float | None = None) -> None:
        """`kill -9` at `time_s`; with `replace_after_s` another replica comes up that much later."""
        self.events.at(time_s, Rank.FAULT, lambda: self._kill(replica_id, replace_after_s))

    def drain_at(
        self, time_s: float, replica_id: ReplicaId, drain_s: float, replace_after_s: float | None = None
    ) -> None:
        """The replica is told to stop at `time_s`; with `replace_after_s` another one comes up that much later."""
        self.events.at(time_s, Rank.FAULT, lambda: self.replicas[replica_id].drain(drain_s))
        if replace_after_s is not None:
            successor = ReplicaId(f"{replica_id}'")
            self.events.at(time_s + replace_after_s, Rank.FAULT, lambda: self.add_replica(successor))

    def kill_router_at(self, time_s: float, router_id: RouterId) -> None:
        """`kill -9` of a router at `time_s`: its clients' connections break, and no other router has its requests."""
        self.events.at(time_s, Rank.FAULT, lambda: self._kill_router(router_id))

    def freeze_router_at(self, time_s: float, router_id: RouterId) -> None:
        """SIGSTOP of a router: its streams stay, and it takes and says nothing from `time_s` on."""

        def freeze() -> None:
            self.routers[router_id].is_frozen = True

        self.events.at(time_s, Rank.FAULT, freeze)

    def remove(self, replica_id: ReplicaId) -> None:
        """A drained replica ends."""
        self._kill(replica_id, None)

    def run(
        self,
        requests: Sequence[SimRequest],
        until_s: float = float("inf"),
        follow: Callable[[list[SimRecord]], None] = lambda records: None,
    ) -> list[SimRecord]:
        """Run until nothing is left to happen. One record per request, in the order given; `follow` gets them before
        anything happens.
        """
        routers = list(self.routers.values())
        records = [SimRecord(request) for request in requests]
        for record in records:
            self._plan_client(record, routers[record.request.router % len(routers)])
        follow(records)
        self._beat(records)
        self.events.run(until_s)
        return records

    def validate(self) -> None:
        """All books of all parts. Raises AssertionError."""
        for router in self.routers.values():
            router.dispatcher.validate()
        for replica in self.replicas.values():
            replica.core.validate()

    def _plan_client(self, record: SimRecord, router: SimRouter) -> None:
        self.events.at(record.request.arrival_s, Rank.ARRIVAL, lambda: self._arrive(record, router))
        if record.request.abort_at_s is not None:
            self.events.at(record.request.abort_at_s, Rank.ARRIVAL, lambda: router.client_leaves(record))

    def _beat(self, records: list[SimRecord]) -> None:
        """Heartbeats and the routers' own clock go on as long as a client waits for something."""
        for replica in self.replicas.values():
            replica.heartbeat()
        for router in self.routers.values():
            router.on_time()
        if any(record.num_ends == 0 for record in records):
            self.events.after(HEARTBEAT_S, Rank.TIMER, partial(self._beat, records))

    def _arrive(self, record: SimRecord, router: SimRouter) -> None:
        if router.is_frozen:
            record.num_ends, record.failure = 1, "the router is gone"
        else:
            router.arrive(record)

    def _send_down(self, router_id: RouterId, replica_id: ReplicaId, message: DownMessage) -> None:
        replica = self.replicas.get(replica_id)
        if replica is None:
            return  # dead, and the router does not know yet: the bytes go nowhere
        self.events.after(self._config.network_delay_s, Rank.MESSAGE_DOWN, lambda: replica.receive(router_id, message))

    def _send_up(self, replica_id: ReplicaId, router_id: RouterId, message: UpMessage) -> None:
        if (router := self.routers.get(router_id)) is not None:
            receive = partial(router.receive, replica_id, message)
            self.events.after(self._config.network_delay_s, Rank.MESSAGE_UP, receive)

    def _kill_router(self, router_id: RouterId) -> None:
        for record in self.routers.pop(router_id).die():
            record.failure = "the router died"
        for replica in self.replicas.values():
            self.events.after(self._config.death_notice_s, Rank.MESSAGE_DOWN, partial(replica.disconnect, router_id))

    def _kill(self, replica_id: ReplicaId, replace_after_s: float | None) -> None:
        role = self.replicas[replica_id].role
        self.replicas.pop(replica_id).die()
        for router in self.routers.values():
            notice = partial(router.replica_lost, replica_id)
            self.events.after(self._config.death_notice_s, Rank.MESSAGE_UP, notice)
        if replace_after_s is not None:
            successor = ReplicaId(f"{replica_id}'")
            self.events.after(replace_after_s, Rank.FAULT, lambda: self.add_replica(successor, role))
