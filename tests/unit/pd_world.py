"""Prefill and decode replicas beside the cores of KVConnectors, in virtual time: what the shells carry, kept in queues
that a test may hold back, repeat or lose.

It is unfriendly: a slot that is given out to be written is filled with rubbish first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.instructions import Close, Fetch, Instruction, Resync, Send
from replica.config import AdmissionConfig, CacheConfig, EngineConfig, SchedulerConfig
from replica.engine_core import EngineCore
from replica.fake_runner import FakeModelRunner
from replica.kv_messages import (
    KV_LEASE_S,
    Acquire,
    Acquired,
    ArenaPlace,
    Beat,
    FromConnector,
    Hello,
    KVPeer,
    KVSpace,
    Release,
    Reserved,
    TierEvent,
    ToConnector,
    Welcome,
)
from replica.kv_transfer import TransferLimits
from replica.messages import (
    Continue,
    FinishReason,
    GenerateRequest,
    KVSink,
    KVSource,
    RequestId,
    RouterId,
    SamplingParams,
    Seated,
    SequenceInput,
)
from replica.router_output import RouterOutputs
from replica.step import Arena, ModelRunner, OpenArena, StepPlan, StepResult
from tests.unit.tier_harness import FakeArena

Hear = Callable[[FromConnector | None], object]
ROUTER = RouterId("r")


class PDNode:
    """A connector's core with its arena, and the other nodes that hear it."""

    def __init__(self, name: str, num_slots: int, space: KVSpace, **config: object) -> None:
        self.name, self.num_slots, self.space, self.config = name, num_slots, space, config
        self.incarnation = 0
        self.now = 0.0
        self.num_fetched = 0
        self.others: dict[str, PDNode] = {}
        self.start()

    def start(self) -> None:
        """Another process: an empty arena, and nobody connected."""
        self.incarnation += 1
        self.slots = np.full((self.num_slots, self.space.block_bytes), 0xAB, np.uint8)
        identity = KVPeer(self.name, str(self.incarnation))
        self.core = ConnectorCore(
            KVCacheConfig(**self.config),  # type: ignore[arg-type]
            self.space,
            self.num_slots,
            0,
            identity=identity,
            slot_bytes=self.space.block_bytes,
        )
        self.members: dict[int, Hear] = {}
        self.next_member = 0
        self.fetches: deque[Fetch] = deque()
        #: what peers told and was not heard yet
        self.news: deque[tuple[str, TierEvent]] = deque()
        self._leases = 0

    def die(self) -> None:
        """kill -9, and another one in its place. Whoever was connected hears of it elsewhere."""
        for other in self.others.values():
            other.news = deque(one for one in other.news if one[0] != self.name)
            other.act(other.core.on_peer_gone(self.name))
        self.start()

    def open(self, place: ArenaPlace, member: str) -> Arena:
        if place.incarnation != f"{self.name}/{self.incarnation}":
            raise OSError("no such arena")
        return FakeArena(self.slots)

    def place(self, holder: KVPeer) -> ArenaPlace:
        return ArenaPlace("", holder, self.space, f"{self.name}/{self.incarnation}")

    def hears(self, other: PDNode) -> None:
        """From now on it is told what `other` has."""
        self.others[other.name] = other
        self.act(self.core.on_peer(other.name))
        self.news = deque(one for one in self.news if one[0] != other.name)

        def hear(message: FromConnector | None) -> None:
            if isinstance(message, TierEvent):
                self.news.append((other.name, message))

        hello = Hello(KVPeer(f"news for {self.name}", str(other.next_member)), "news", self.space)
        other.join(hello, hear, is_peer=True)

    def hear_news(self, most: int = 1000) -> None:
        while self.news and most:
            peer_id, event = self.news.popleft()
            most -= 1
            self.act(self.core.on_peer_event(peer_id, event, self.now))

    def join(self, hello: Hello, hear: Hear, *, is_peer: bool = False) -> int:
        member, self.next_member = self.next_member, self.next_member + 1
        self.members[member] = hear
        self.act(self.core.on_hello(member, hello, self.now, is_peer=is_peer))
        return member

    def say(self, member: int, message: ToConnector) -> None:
        if member in self.members:
            self.act(self.core.on_message(member, message, self.now))

    def leave(self, member: int) -> None:
        if self.members.pop(member, None) is not None:
            self.act(self.core.on_gone(member, self.now))

    def pass_time(self, now: float, beats: bool = True) -> None:
        self.now = now
        for member in list(self.members) if beats else ():
            self.act(self.core.on_message(member, Beat(), now))
        self.act(self.core.on_time(now))

    def act(self, told: list[Instruction]) -> None:
        closing: list[int] = []
        for one in told:
            match one:
                case Send(member=member, message=message):
                    if isinstance(message, Reserved):
                        self.slots[[slot for slot in message.slots if slot >= 0]] = 0xCD
                    if (hear := self.members.get(member)) is not None:
                        hear(message)
                case Close(members=members):
                    closing += members
                case Fetch(slots=slots):
                    self.slots[slots] = 0xCD
                    self.fetches.append(one)
                case Resync(peer_id=peer_id):
                    self.hears(self.others[peer_id])
                case _:
                    raise AssertionError(f"{one}: there is no disk")
        for member in closing:
            if (hear := self.members.get(member)) is not None:
                hear(None)

    def fetch(self, ok: bool = True) -> None:
        """The oldest one ends."""
        one = self.fetches.popleft()
        oks = [False] * len(one.hashes)
        if ok and (giver := self.others.get(one.peer_id)) is not None:
            oks = giver.give(one, self)
        self.num_fetched += sum(oks)
        self.act(self.core.on_fetched(one.job, oks, self.now))

    def give(self, one: Fetch, taker: PDNode) -> list[bool]:
        answers: list[FromConnector | None] = []
        self._leases += 1
        hello = Hello(KVPeer(taker.name, f"{taker.incarnation}.{self._leases}"), "reader", self.space, False)
        member = self.join(hello, answers.append, is_peer=True)
        self.say(member, Acquire(1, one.hashes, 0.0))
        slots = next((a.slots for a in answers if isinstance(a, Acquired)), [])
        for slot, mine in zip(slots, one.slots, strict=False):
            taker.slots[mine] = self.slots[slot]
        self.say(member, Release([1]))
        self.leave(member)
        return [i < len(slots) for i in range(len(one.hashes))]


class PDReplica:
    """An engine core, its runner, and its connection to a node."""

    def __init__(self, name: str, node: PDNode, core: EngineCore, runner: ModelRunner) -> None:
        self.name, self.node, self.core, self.runner = name, node, core, runner
        assert core.kv is not None
        self.kv = core.kv
        self.member: int | None = None
        self.connections = 0
        self.down: deque[ToConnector] = deque()
        self.up: deque[FromConnector] = deque()
        self.ranks: list[int] = []
        self.is_told_to_close = False
        #: something may still be read or written in the arena
        self.is_copying: Callable[[], bool] = lambda: False
        self.now = 0.0

    def connect(self) -> None:
        """As another holder: the engine's connection, and one of whoever copies."""
        self.connections += 1
        self.down.clear()
        self.up.clear()
        self.is_told_to_close = False
        holder, mine = KVPeer(self.name, str(self.connections)), self.connections

        def hear(message: FromConnector | None) -> None:
            if mine == self.connections and message is None:
                self.is_told_to_close = True
            elif mine == self.connections and message is not None:
                self.up.append(message)

        self.member = self.node.join(Hello(holder, "engine", self.node.space), hear)
        rank = self.node.join(Hello(holder, "rank", self.node.space, False), lambda _: None)
        self.ranks.append(rank)
        assert isinstance(self.up.popleft(), Welcome)
        self.kv.connected(self.node.place(holder), KV_LEASE_S, self.now)

    def disconnect(self) -> None:
        """The engine closes; whoever copies does when it has finished."""
        if self.member is not None:
            member, self.member = self.member, None
            self.down.clear()
            self.up.clear()
            self.kv.gone()
            self.node.leave(member)
        self.close_ranks()

    def close_ranks(self) -> None:
        current = self.ranks[-1:] if self.member is not None else []
        if not self.is_copying():
            for rank in self.ranks[: len(self.ranks) - len(current)]:
                self.node.leave(rank)
            self.ranks = current

    def die(self) -> None:
        """kill -9."""
        for member in [*self.ranks, *([] if self.member is None else [self.member])]:
            self.node.leave(member)
        self.ranks, self.member = [], None

    def exchange(self, count: int = 1000) -> None:
        """So many messages each way."""
        if self.is_told_to_close and not self.up:
            self.disconnect()
        self.close_ranks()
        self.down += self.kv.take_messages()
        for _ in range(count):
            if not self.down and not self.up:
                return
            if self.down:
                message = self.down.popleft()
                if self.member is not None:
                    self.node.say(self.member, message)
            if self.up:
                self.kv.receive(self.up.popleft(), self.now)
            self.down += self.kv.take_messages()


class PDPair:
    """One P and one D, on one node or on two, and a router that makes no mistakes: it seats, prefills and continues."""

    def __init__(
        self,
        make_runner: Callable[[OpenArena], ModelRunner],
        space: KVSpace,
        *,
        num_nodes: int = 1,
        num_slots: int | tuple[int, int] = 64,
        chunk: int = 16,
        limits: TransferLimits | None = None,
        **scheduler: object,
    ) -> None:
        self.now = 0.0
        sizes = (num_slots, num_slots) if isinstance(num_slots, int) else num_slots
        self.nodes = [PDNode(f"n{i}", sizes[i], space) for i in range(num_nodes)]
        if num_nodes == 2:
            for one, other in (self.nodes, reversed(self.nodes)):
                one.hears(other)
        settings = {"max_num_batched_tokens": chunk, "watermark": 0.0, **scheduler}
        self.config = EngineConfig(
            scheduler=SchedulerConfig.model_validate(settings),
            admission=AdmissionConfig(max_queued_requests=1000),
            cache=CacheConfig(),
        )
        self.limits = limits or TransferLimits(min_load_blocks=1, load_wait_s=5.0)
        self.p = self.replica("p", self.nodes[0], make_runner)
        self.d = self.replica("d", self.nodes[-1], make_runner)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.seats: dict[str, Seated] = {}
        self.samplings: dict[str, SamplingParams] = {}
        self.prompts: dict[str, list[int]] = {}
        self.begun: set[str] = set()
        #: D was told to compute them
        self.alone: set[str] = set()
        #: what P said first, and D was not told
        self.firsts: dict[str, list[int]] = {}
        #: tells of each step: who, its plan, its result
        self.on_step: Callable[[PDReplica, StepPlan, StepResult], object] = lambda *_: None

    def replica(self, name: str, node: PDNode, make_runner: Callable[[OpenArena], ModelRunner]) -> PDReplica:
        runner = make_runner(node.open)
        core = EngineCore(self.config, runner.info, transfer_limits=self.limits)
        one = PDReplica(name, node, core, runner)
        if isinstance(runner, FakeModelRunner):
            one.is_copying = lambda: runner.copies.is_busy
        one.connect()
        return one

    # ---- the router ----

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams, load_within_s: float = 3.0) -> None:
        """To D, which will have a seat for it."""
        self.tokens[name], self.prompts[name], self.samplings[name] = [], prompt, sampling
        source = KVSource(name, 60.0, load_within_s, [self.nodes[0].name])
        request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)], kv_source=source)
        assert self.d.core.submit(ROUTER, request, 0, self.now).refusal is None

    def submit_local(self, one: PDReplica, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.tokens[name] = []
        request = GenerateRequest(RequestId(name), [SequenceInput(0, prompt, sampling)])
        assert one.core.submit(ROUTER, request, 0, self.now).refusal is None

    def prefill(self, name: str) -> None:
        """D has a seat: P is to begin."""
        self.begun.add(name)
        sampling = msgspec.structs.replace(self.samplings[name], max_tokens=1)
        sink = KVSink(name, self.seats[name].num_cached_tokens)
        item = SequenceInput(0, self.prompts[name], sampling)
        request = GenerateRequest(RequestId(f"{name}@p"), [item], kv_sink=sink)
        assert self.p.core.submit(ROUTER, request, 0, self.now).refusal is None

    def go_on(self, name: str, token_ids: list[int]) -> None:
        if not token_ids:
            self.alone.add(name)
        self.d.core.go_on(ROUTER, Continue(name, name, {0: token_ids}), self.now)

    def abort(self, name: str) -> None:
        for one, request_id in ((self.d, name), (self.p, f"{name}@p")):
            one.core.abort(ROUTER, RequestId(request_id), self.now)

    def take(self, outputs: RouterOutputs, one: PDReplica, names: dict[int, str]) -> None:
        for output in outputs.values():
            for item in output.outputs:
                self.say(item.request_id, item.new_token_ids, item.finish_reason)
            for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
                self.say(names[seq_id], [token_id], None)

    def say(self, name: str, token_ids: list[int], reason: FinishReason | None) -> None:
        if name.endswith("@p"):
            name = name.removesuffix("@p")
            if token_ids and name in self.tokens and not self.tokens[name] and name not in self.alone:
                self.firsts[name] = token_ids
                self.tokens[name] += token_ids
            return
        self.tokens[name] += token_ids
        if reason is not None:
            assert name not in self.ends, f"{name} ended twice"
            self.ends[name] = reason

    # ---- time ----

    def step(self, one: PDReplica) -> bool:
        """One step of a replica, and what it has to say."""
        one.now = self.now
        names = {s.seq_id: str(s.request_id) for s in one.core.scheduler.living()}
        plan = one.core.schedule(self.now)
        for _, seated in one.core.take_seated():
            self.seats[seated.request_id] = seated
        self.take(one.core.take_ended(), one, names)
        if plan is None:
            return False
        result = one.runner.execute(plan)
        self.on_step(one, plan, result)
        self.take(one.core.update(plan, result, self.now), one, names)
        one.core.validate()
        return True

    def pass_time(self, seconds: float, beats: bool = True) -> None:
        self.now += seconds
        for one in (self.p, self.d):
            one.now = self.now
        for node in self.nodes:
            node.pass_time(self.now, beats)

    def carry(self) -> None:
        """All that is on its way arrives."""
        for _ in range(3):
            for one in (self.p, self.d):
                one.exchange()
            for node in self.nodes:
                node.hear_news()
                while node.fetches:
                    node.fetch()
                node.core.validate()

    def run(self, most: int = 10_000) -> None:
        """Until nobody has anything to do. Every seat is prefilled, every first token is handed on."""
        for _ in range(most):
            self.carry()
            for name, seated in list(self.seats.items()):
                if seated.is_waiting and name not in self.begun:
                    self.prefill(name)
            for name in list(self.firsts):
                self.go_on(name, self.firsts.pop(name))
            self.now += 0.001
            is_busy = [self.step(one) for one in (self.p, self.d)]
            if not any(is_busy):
                self.carry()
                if not self.p.core.has_work and not self.d.core.has_work and not self.firsts:
                    return
                self.pass_time(0.05)
        raise AssertionError("it does not end")

    def check_baseline(self) -> None:
        """Nothing is pinned, leased, reserved, or waited for."""
        self.carry()
        for node in self.nodes:
            while node.fetches:
                node.fetch()
        for one in (self.p, self.d):
            one.core.validate()
            assert one.core.num_unfinished == 0
            assert one.core.blocks.num_free == one.core.blocks.num_blocks, f"stranded blocks of {one.name}"
        for node in self.nodes:
            stats = node.core.stats(self.now)
            assert stats.num_leased == stats.num_reserved == stats.num_staging == stats.num_stranded == 0, stats
            assert stats.num_free + stats.num_found == stats.num_slots
            assert all(not holder.leases for holder in node.core.holders)
