"""A KVConnector in process, as the contract in `replica/kv_messages.py` has it, and the engine's harness beside it.

It is unfriendly: a slot that is given out or taken back is filled with rubbish, so that what is read too late or
written too early shows in the tokens.
"""

from __future__ import annotations

import numpy as np

from replica.engine_core import EngineCore
from replica.fake_runner import CostModel, FakeModelRunner
from replica.kv_messages import (
    Acquire,
    Acquired,
    ArenaPlace,
    Beat,
    Clear,
    Cleared,
    FromConnector,
    Hello,
    KVPeer,
    KVSpace,
    KVTier,
    LostSlots,
    Release,
    Reserve,
    Reserved,
    Seal,
    TierEvent,
    ToConnector,
)
from replica.kv_transfer import TransferLimits
from replica.step import Arena
from tests.unit.engine_harness import VOCAB, Harness

LEASE_S = 10.0


class FakeArena:
    def __init__(self, slots: np.ndarray) -> None:  # type: ignore[type-arg]
        self.array = slots

    def close(self) -> None:
        """Nothing is mapped."""


class FakeConnector:
    """One arena. Answers come back from `handle`, in order; events are asked for."""

    def __init__(self, num_slots: int, slot_bytes: int, tells: bool = True, name: str = "c") -> None:
        self.name = name
        self.slots = np.full((num_slots, slot_bytes), 0xAB, np.uint8)
        self.tells = tells
        self.free = list(range(num_slots))
        #: hash -> slot, least recently used first
        self.sealed: dict[bytes, int] = {}
        self.leases: dict[tuple[str, int], list[int]] = {}
        self.reserved: dict[tuple[str, int], dict[int, tuple[bytes, int]]] = {}
        #: slots of a holder that was given up, and may still write them
        self.quarantine: dict[str, list[int]] = {}
        #: leased slots whose hash was forgotten
        self.orphans: set[int] = set()
        self.num_released = 0
        self._numbers: dict[str, int] = {}
        self._stored: dict[str, list[bytes]] = {}
        self._removed: dict[str, list[bytes]] = {}
        #: the arena cannot be mapped
        self.is_closed = False

    def place(self, holder: str) -> ArenaPlace:
        space = KVSpace("fake", 0, self.slots.shape[1], 1, "")
        return ArenaPlace("", KVPeer(holder, "1"), space, self.name)

    def open(self, place: ArenaPlace, member: str) -> Arena:
        if self.is_closed or place.incarnation != self.name:
            raise OSError("no such arena")
        return FakeArena(self.slots)

    def handle(self, holder: str, message: ToConnector) -> list[FromConnector]:
        match message:
            case Acquire():
                return [self._acquire(holder, message)]
            case Release(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    self.end_lease(holder, lease_id)
            case Reserve():
                return [self._reserve(holder, message)]
            case Seal():
                self._seal(holder, message)
            case Clear(clear_id=clear_id):
                for block_hash in list(self.sealed):
                    self._forget(block_hash)
                return [Cleared(clear_id)]
            case Beat() | Hello():
                pass
        return []

    def events(self, holder: str) -> list[FromConnector]:
        """What changed since the last call; at first everything."""
        if not self.tells:
            return []
        number = self._numbers.get(holder, 0)
        stored, removed = self._stored.get(holder, []), self._removed.get(holder, [])
        if number and not stored and not removed:
            return []
        self._stored[holder], self._removed[holder] = [], []
        self._numbers[holder] = number + 1
        kept = list(self.sealed) if not number else [h for h in stored if h in self.sealed]
        return [TierEvent(number, {KVTier.HOST: kept}, [h for h in removed if h not in self.sealed])]

    def leave(self, holder: str) -> None:
        """The last process of the holder is gone."""
        for key in [key for key in self.leases if key[0] == holder]:
            self.end_lease(*key)
        for key in [key for key in self.reserved if key[0] == holder]:
            for _, slot in self.reserved.pop(key).values():
                self._give_back(slot)
        for slot in self.quarantine.pop(holder, []):
            self._give_back(slot)
        self._numbers.pop(holder, None)

    def give_up(self, holder: str) -> None:
        """It was not heard for a lease: it stands still, and may go on any time."""
        for key in [key for key in self.leases if key[0] == holder]:
            self.end_lease(*key)
        for key in [key for key in self.reserved if key[0] == holder]:
            self.quarantine.setdefault(holder, []).extend(slot for _, slot in self.reserved.pop(key).values())

    def void(self, holder: str, lease_id: int) -> list[FromConnector]:
        """As for slabs that were found corrupt: all leases of theirs are void, here all of one holder."""
        slots = self.leases.get((holder, lease_id), [])
        for slot in slots:
            self.slots[slot] = 0xCD
            for block_hash in [h for h, s in self.sealed.items() if s == slot]:
                self._forget(block_hash)
        lost = [key for key, leased in self.leases.items() if not set(slots).isdisjoint(leased)]
        assert all(key[0] == holder for key in lost), "others would have to be told"
        for key in lost:
            self.end_lease(*key)
        return [LostSlots(key[1]) for key in lost]

    def end_lease(self, holder: str, lease_id: int) -> None:
        slots = self.leases.pop((holder, lease_id), None)
        if slots is None:
            return
        self.num_released += 1
        for slot in slots:
            if slot in self.orphans and not self._is_leased(slot):
                self.orphans.discard(slot)
                self._give_back(slot)

    def evict(self, count: int) -> None:
        """The least recently used that nobody reads."""
        for block_hash in [h for h, slot in self.sealed.items() if not self._is_leased(slot)][:count]:
            self._forget(block_hash)

    @property
    def is_at_baseline(self) -> bool:
        return not self.leases and not self.reserved and len(self.free) + len(self.sealed) == len(self.slots)

    def _acquire(self, holder: str, message: Acquire) -> Acquired:
        slots: list[int] = []
        for block_hash in message.hashes:
            if block_hash not in self.sealed:
                break
            slot = self.sealed.pop(block_hash)
            self.sealed[block_hash] = slot
            slots.append(slot)
        if slots:
            self.leases[holder, message.lease_id] = slots
        return Acquired(message.lease_id, slots, [KVTier.HOST] * len(slots))

    def _reserve(self, holder: str, message: Reserve) -> Reserved:
        given: dict[int, tuple[bytes, int]] = {}
        writing = {h for of_one in self.reserved.values() for h, _ in of_one.values()}
        for position, block_hash in enumerate(message.hashes):
            if block_hash in self.sealed or block_hash in writing:
                continue
            if not self.free:
                self.evict(1)
            if self.free:
                given[position] = (block_hash, self.free.pop())
        if given:
            self.reserved[holder, message.reservation_id] = given
        return Reserved(message.reservation_id, [given[i][1] if i in given else -1 for i in range(len(message.hashes))])

    def _seal(self, holder: str, message: Seal) -> None:
        for position, (block_hash, slot) in self.reserved.pop((holder, message.reservation_id), {}).items():
            if position in message.written and block_hash not in self.sealed:
                self.sealed[block_hash] = slot
                for other in self._numbers:
                    self._stored.setdefault(other, []).append(block_hash)
            else:
                self._give_back(slot)

    def _forget(self, block_hash: bytes) -> None:
        slot = self.sealed.pop(block_hash)
        for other in self._numbers:
            self._removed.setdefault(other, []).append(block_hash)
        if self._is_leased(slot):
            self.orphans.add(slot)
        else:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self.slots[slot] = 0xAB
        self.free.append(slot)

    def _is_leased(self, slot: int) -> bool:
        return any(slot in slots for slots in self.leases.values())


class TierHarness(Harness):
    """A core, a runner and a connector, which others may share. Messages arrive before and after each step, unless
    `is_quiet`.
    """

    def __init__(
        self,
        connector: FakeConnector | None = None,
        *,
        num_slots: int = 256,
        num_blocks: int = 64,
        block_size: int = 4,
        name: str = "a",
        limits: TransferLimits | None = None,
        per_copy_s: float = 0.0,
        **scheduler: object,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, **scheduler)  # type: ignore[arg-type]
        self.connector = connector or FakeConnector(num_slots, 8 * block_size)
        self.name = name
        self.is_quiet = False
        self.runner = FakeModelRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            eos_token_ids=(7,),
            open_arena=self.connector.open,
            cost=CostModel(per_copy_s=per_copy_s),
        )
        self.limits = limits or TransferLimits(min_load_blocks=1, load_wait_s=5.0)
        self.core = EngineCore(self.config, self.runner.info, transfer_limits=self.limits)
        assert self.core.kv is not None
        self.kv = self.core.kv
        self.connect()

    def connect(self) -> None:
        self.kv.connected(self.connector.place(self.name), LEASE_S, self.now)
        self.hear_connector()

    def hear_connector(self) -> None:
        for message in self.kv.take_messages():
            for answer in self.connector.handle(self.name, message):
                self.kv.receive(answer, self.now)
        for event in self.connector.events(self.name):
            self.kv.receive(event, self.now)

    def plan(self):  # type: ignore[no-untyped-def]
        if not self.is_quiet:
            self.hear_connector()
        plan = super().plan()
        if not self.is_quiet:
            self.hear_connector()
            if plan is None:  # perhaps the answer lets somebody in
                plan = super().plan()
                self.hear_connector()
        return plan

    def finish(self, plan) -> None:  # type: ignore[no-untyped-def]
        super().finish(plan)
        if not self.is_quiet:
            self.hear_connector()

    def counter(self, name: str) -> float:
        return self.core.load(self.now).counters[f"kv_{name}"]
