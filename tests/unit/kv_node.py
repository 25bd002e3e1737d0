"""The core of a KVConnector with what tests want to say to it and see of it. Books are checked after every call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from cluster.kv_connector.config import KVCacheConfig
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.disk_index import DiskRecord
from cluster.kv_connector.instructions import Instruction, Send, WriteDisk
from replica.kv_messages import (
    Acquire,
    Acquired,
    Hello,
    KVPeer,
    KVSpace,
    Release,
    Reserve,
    Reserved,
    Seal,
    ToConnector,
)

SPACE = KVSpace("smol@1", 16, 4096, 1, "block-major")
T = TypeVar("T")


def hashes(count: int, name: str = "h") -> list[bytes]:
    """A chain."""
    return [f"{name}{i:06}".encode().ljust(16, b"-") for i in range(count)]


@dataclasses.dataclass
class Lease:
    """An answer to `Acquire`; without an answer there are no slots."""

    lease_id: int
    answer: Acquired | None
    told: list[Instruction]

    @property
    def slots(self) -> list[int]:
        return [] if self.answer is None else self.answer.slots


class Node:
    """Member 1 is a replica's engine from the start."""

    def __init__(
        self, num_slots: int = 8, num_disk_slots: int = 0, *, on_disk: Sequence[DiskRecord] = (), **config: Any
    ) -> None:
        self.core = ConnectorCore(
            KVCacheConfig(**config),
            SPACE,
            num_slots,
            num_disk_slots,
            identity=KVPeer("node", "0"),
            slot_bytes=4096,
            on_disk=on_disk,
        )
        self.now = 0.0
        self.next_id = 0
        self.told: list[Instruction] = []
        self.hello(1)

    def hello(
        self,
        member: int,
        name: str = "replica-0",
        incarnation: str = "a",
        *,
        space: KVSpace = SPACE,
        is_peer: bool = False,
        wants_events: bool = True,
    ) -> list[Instruction]:
        hello = Hello(KVPeer(name, incarnation), f"member-{member}", space, wants_events)
        return self.kept(self.core.on_hello(member, hello, self.now, is_peer=is_peer))

    def say(self, message: ToConnector, member: int = 1) -> list[Instruction]:
        return self.kept(self.core.on_message(member, message, self.now))

    def gone(self, member: int) -> list[Instruction]:
        return self.kept(self.core.on_gone(member, self.now))

    def wait(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.kept(self.core.on_time(self.now))

    def kept(self, told: list[Instruction]) -> list[Instruction]:
        """`told` holds all of it, in order."""
        self.told += told
        self.core.validate()
        assert self.core.stats(self.now).num_stranded == 0
        return told

    def reserve(self, wanted: list[bytes], member: int = 1, *, must_stay: bool = False) -> tuple[int, list[int]]:
        """As one run of a chain that begins with it."""
        self.next_id += 1
        positions = list(range(len(wanted)))
        parents = [b"", *wanted[:-1]]
        told = self.say(Reserve(self.next_id, wanted, must_stay, parents, positions), member)
        return self.next_id, only(messages(told, Reserved)).slots

    def seal(self, number: int, count: int, member: int = 1) -> list[Instruction]:
        return self.say(Seal(number, list(range(count))), member)

    def store(self, wanted: list[bytes], member: int = 1, *, must_stay: bool = False) -> list[int]:
        """Reserved and written: the slots, -1 where there was none."""
        number, slots = self.reserve(wanted, member, must_stay=must_stay)
        self.say(Seal(number, [i for i, slot in enumerate(slots) if slot >= 0]), member)
        return slots

    def acquire(self, wanted: list[bytes], member: int = 1, *, within_s: float = 1.0, **more: Any) -> Lease:
        self.next_id += 1
        told = self.say(Acquire(self.next_id, wanted, within_s, **more), member)
        return Lease(self.next_id, next(iter(messages(told, Acquired)), None), told)

    def release(self, *leases: Lease, member: int = 1) -> list[Instruction]:
        return self.say(Release([lease.lease_id for lease in leases]), member)

    def count_found(self, wanted: list[bytes], member: int = 1) -> int:
        """Blocks that an Acquire gets at once; they are given back."""
        lease = self.acquire(wanted, member, within_s=0)
        self.release(lease, member=member)
        self.wait(0)
        return len(lease.slots)

    def write_all(self, checksum: int = 7) -> int:
        """All writes to disk end well. Returns how many there were."""
        count = 0
        while jobs := of(self.told, WriteDisk):
            self.told = [t for t in self.told if not isinstance(t, WriteDisk)]
            for job in jobs:
                count += 1
                self.kept(self.core.on_disk_written(job.job, checksum, self.now))
        return count

    def answers(self) -> list[Acquired]:
        return messages(self.told, Acquired)


def of(told: Sequence[Instruction], kind: type[T]) -> list[T]:
    return [t for t in told if isinstance(t, kind)]


def messages(told: Sequence[Instruction], kind: type[T], member: int | None = None) -> list[T]:
    return [
        t.message
        for t in told
        if isinstance(t, Send) and isinstance(t.message, kind) and (member is None or t.member == member)
    ]


def only(items: list[T]) -> T:
    assert len(items) == 1, items
    return items[0]
