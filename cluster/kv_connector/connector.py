"""ASYNC. The KVConnector of a node: `ConnectorCore` with an arena, a door for the replicas of the node, a disk, and
other connectors. Decides nothing: it carries out the core's instructions, and answers each job exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from cluster.kv_connector.arena import Arena
from cluster.kv_connector.config import KVCacheConfig, num_slots
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.disk_index import DiskRecord
from cluster.kv_connector.disk_jobs import DiskJobs, Run
from cluster.kv_connector.disk_journal import DiskEntry
from cluster.kv_connector.disk_tier import DiskTier
from cluster.kv_connector.instructions import (
    ClearDisk,
    Close,
    DropDisk,
    Fetch,
    Instruction,
    MemberId,
    ReadDisk,
    Resync,
    Send,
    WriteDisk,
)
from cluster.kv_connector.peer_links import PeerLinks
from cluster.kv_connector.service import KVService, Member
from cluster.kv_connector.tier_figures import tier_figures
from cluster.kv_connector.transport import PeerAddress
from replica.arena_map import round_slot
from replica.config import GIB
from replica.errors import ConfigError
from replica.kv_messages import (
    FromConnector,
    Hello,
    KVPeer,
    KVSpace,
    TierStats,
    ToConnector,
    Unwelcome,
    Welcome,
)

#: the core wants to be called so often
TICK_S = 1.0
#: between a timer and the core's look at the time: what lies in sockets is read first, on every kind of loop
READ_FIRST_S = 0.002
logger = logging.getLogger(__name__)


class Connector:
    """Made by `open`; everything happens on its loop."""

    def __init__(
        self,
        config: KVCacheConfig,
        space: KVSpace,
        identity: KVPeer,
        arena: Arena,
        disk: DiskTier | None,
        clock: Callable[[], float],
        name: str | None,
    ) -> None:
        self.space, self.identity = space, identity
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.arena = arena
        self.disk = disk
        #: why it cannot go on: memory ran out while the arena was filled
        self.failure: ConfigError | None = None
        #: why there is no disk, or less than was asked for
        self.disk_shortage = ""
        records = () if disk is None else (_record(e) for e in disk.entries())
        self.core = ConnectorCore(
            config,
            space,
            arena.num_slots,
            0 if disk is None else disk.num_slots,
            identity=identity,
            slot_bytes=arena.slot_bytes,
            on_disk=list(records),
            generation=0 if disk is None else disk.generation,
        )
        self._ids = itertools.count()
        self._members: dict[MemberId, Member] = {}
        self._ids_of: dict[Member, MemberId] = {}
        #: what is told to who is welcomed just now, and has to hear that first
        self._held: dict[MemberId, list[FromConnector]] = {}
        #: members without a socket here: what stands for connectors of other nodes
        self._inner: dict[MemberId, Callable[[FromConnector | None], object]] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._told_at = float("-inf")
        self._is_closed = False
        self._disk_jobs = None if disk is None else DiskJobs(disk, arena.slab)
        self.peers = PeerLinks(self)
        self._service = KVService(self, arena.descriptor, name)
        self._filling = self._loop.create_task(self._fill())
        self._on_time()

    @classmethod
    async def open(
        cls,
        config: KVCacheConfig,
        space: KVSpace,
        identity: KVPeer,
        disk_folder: Path | None = None,
        *,
        available: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str | None = None,
    ) -> Connector:
        """`disk_folder`: where the disk tier is, if there is one; `available`: bytes of memory that are free, None:
        looked up. Raises ConfigError if the arena cannot be had. Without its disk it goes on, and says so.
        """
        arena = Arena(num_slots(config.host_tier_gib, round_slot(space.block_bytes)), space.block_bytes, available)
        disk, shortage = None, ""
        if config.disk_tier_gib and disk_folder is not None:
            try:
                disk = await DiskTier.open(disk_folder, space, space.block_bytes, int(config.disk_tier_gib * GIB))
                shortage = disk.shortage
            except (ConfigError, OSError) as error:
                shortage = f"there is no disk tier: {error}"
                logger.error("%s", shortage)
            except BaseException:
                await arena.close()
                raise
        opened = cls(config, space, identity, arena, disk, clock, name)
        opened.disk_shortage = shortage
        return opened

    @property
    def socket_name(self) -> str:
        """Where replicas of this node connect."""
        return self._service.name

    @property
    def num_members(self) -> int:
        """Processes of replicas that are connected."""
        return len(self._members)

    @property
    def now(self) -> float:
        return self._clock()

    def figures(self) -> dict[str, float]:
        """A snapshot, by name (`tier_figures.py`)."""
        disk = None if self.disk is None else self.disk.stats
        return tier_figures(self.core.stats(self.now), self.space.block_bytes, disk, self.peers.stats)

    async def close(self) -> None:
        """Idempotent. When it returns nothing of it touches arena or disk any more; the files on disk stay."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._service.close()
        await self.peers.close()
        while self._jobs:
            await asyncio.wait(self._jobs)
        if self.disk is not None:
            await self.disk.close()
        await self.arena.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._filling

    # ---- the door: `KVHandler` ----

    def on_hello(self, member: Member, hello: Hello) -> Welcome | Unwelcome:
        """See `KVHandler`. Whatever else follows for the newcomer is told behind its welcome."""
        number = next(self._ids)
        self._held[number] = []
        self.act(self.core.on_hello(number, hello, self.now))
        first, *rest = self._held[number]
        if isinstance(first, Unwelcome):
            del self._held[number]
            logger.info("%s of %s is not welcome: %s", hello.member, hello.holder.peer_id, first.message)
            return first
        assert isinstance(first, Welcome), "the core's first word to a newcomer"
        self._members[number], self._ids_of[member] = member, number
        self._held[number] = rest
        self._loop.call_soon(self._let_in, number)
        return first

    def on_message(self, member: Member, message: ToConnector) -> None:
        """See `KVHandler`."""
        self.say(self._ids_of[member], message)

    def on_gone(self, member: Member) -> None:
        """See `KVHandler`."""
        number = self._ids_of.pop(member)
        del self._members[number]
        self._held.pop(number, None)
        self.leave(number)

    def _let_in(self, number: MemberId) -> None:
        for message in self._held.pop(number, ()):
            self._send(number, message)

    # ---- what stands for other nodes ----

    def join(
        self, hello: Hello, hear: Callable[[FromConnector | None], object], *, is_peer: bool = True
    ) -> MemberId | None:
        """A member that is no process of this node. `hear` gets what it is told, and None when it has to end (then
        `leave` is to be called as soon as nothing of it reads the arena). None: it is not welcome.
        """
        number = next(self._ids)
        welcome: list[bool] = []

        def first(message: FromConnector | None) -> None:
            if not welcome:
                welcome.append(isinstance(message, Welcome))
            else:
                hear(message)

        self._inner[number] = first
        self.act(self.core.on_hello(number, hello, self.now, is_peer=is_peer))
        if welcome != [True]:
            del self._inner[number]
            return None
        return number

    def say(self, number: MemberId, message: ToConnector) -> None:
        """A word of a member."""
        self.act(self.core.on_message(number, message, self.now))

    def leave(self, number: MemberId) -> None:
        """A member is gone, and reads nothing any more."""
        self._inner.pop(number, None)
        self.act(self.core.on_gone(number, self.now))

    # ---- instructions ----

    def act(self, told: Sequence[Instruction]) -> None:
        """Carry them out, in their order; then see when the core wants to be called again."""
        reads: list[ReadDisk] = []
        writes: list[WriteDisk] = []
        for one in told:
            match one:
                case Send(member=member, message=message):
                    self._send(member, message)
                case Close(members=members):
                    self._close_members(members)
                case ReadDisk():
                    reads.append(one)
                case WriteDisk():
                    writes.append(one)
                case DropDisk():
                    self._write(writes)
                    writes = []
                    assert self.disk is not None, "nothing is on a disk that is not there"
                    self.disk.forget(one.disk_slot, one.block_hash)
                case ClearDisk(job=job):
                    self._start(self._clear_disk(job))
                case Fetch():
                    self._start(self._fetch(one))
                case Resync(peer_id=peer_id):
                    self.peers.resync(peer_id)
        self._write(writes)
        if reads:
            assert self._disk_jobs is not None, "nothing is on a disk that is not there"
            for read in self._disk_jobs.reads(reads):
                self._start(self._answer(read, self.core.on_disk_read))
        self._set_timer()

    def _send(self, number: MemberId, message: FromConnector) -> None:
        if (held := self._held.get(number)) is not None:
            held.append(message)
        elif (member := self._members.get(number)) is not None:
            member.send(message)
        elif (hear := self._inner.get(number)) is not None:
            hear(message)

    def _close_members(self, numbers: Iterable[MemberId]) -> None:
        for number in numbers:
            if (member := self._members.get(number)) is not None:
                member.finish()
            elif (hear := self._inner.get(number)) is not None:
                hear(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def _write(self, writes: list[WriteDisk]) -> None:
        if writes:
            assert self._disk_jobs is not None, "a disk that is not there has no slots"
            for run in self._disk_jobs.writes(writes):
                self._start(self._answer(run, self.core.on_disk_written))

    async def _answer(
        self,
        run: Run,
        answer: Callable[[int, int | None, float], list[Instruction]],
    ) -> None:
        """Of jobs that are carried out together."""
        jobs, work = run
        checksums: Sequence[int | None] = [None] * len(jobs)
        try:
            checksums = await work
        except Exception:  # whatever it is: each job has one answer
            logger.exception("%d disk jobs failed", len(jobs))
        for job, checksum in zip(jobs, checksums, strict=True):
            self.act(answer(job, checksum, self.now))

    async def _clear_disk(self, job: int) -> None:
        assert self.disk is not None, "a disk that is not there is empty"
        is_empty = False
        try:
            is_empty = await self.disk.clear(self.core.generation)
        except Exception:
            logger.exception("the disk tier was not emptied")
        self.act(self.core.on_disk_cleared(job, is_empty, self.now))

    async def _fetch(self, one: Fetch) -> None:
        oks = [False] * len(one.hashes)
        try:
            oks = await self.peers.fetch(one)
        except Exception:
            logger.exception("blocks of %s were not fetched", one.peer_id)
        self.act(self.core.on_fetched(one.job, oks, self.now))

    # ---- time ----

    def _set_timer(self) -> None:
        due = self.core.next_deadline
        if self._is_closed or due is None or due >= self._timer_at:
            return
        self._arm(due)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - self.now) + READ_FIRST_S, self._on_time)

    def _on_time(self) -> None:
        now = self.now
        self._timer_at = float("inf")
        self.peers.beat()
        self.act(self.core.on_time(now))
        if self._timer_at == float("inf") or self._timer_at > now + TICK_S:
            self._arm(now + TICK_S)
        self._tell_figures(now)

    def _tell_figures(self, now: float) -> None:
        """To one replica of the node, so that they are counted once: the one that is here for the longest time."""
        if now - self._told_at < TICK_S * 0.9:
            return
        self._told_at = now
        for member in self._members.values():
            if member.hello is not None and member.hello.wants_events and member.is_connected:
                member.send(TierStats(self.figures()))
                return

    async def _fill(self) -> None:
        try:
            await self.arena.prefault()
        except ConfigError as error:
            logger.error("the KV connector ends: %s", error)
            self.failure = error
            self._service.close()

    # ---- other nodes ----

    @property
    def address(self) -> PeerAddress | None:
        """Where connectors of other nodes come; None: it does not listen."""
        return self.peers.address


def _record(entry: DiskEntry) -> DiskRecord:
    return DiskRecord(entry.block_hash, entry.slot, entry.digest, entry.position, entry.parent)
