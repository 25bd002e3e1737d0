"""PURE. What the connector's core tells its shell to do.

Every job is answered exactly once, whatever becomes of it: only the shell knows that nobody touches the slab any more.
An answer that comes twice is ignored. Jobs of one kind may end in any order.
"""

from __future__ import annotations

import msgspec

from replica.kv_messages import FromConnector

#: a connection, as the shell numbers them; never used again
MemberId = int
JobId = int


class Send(msgspec.Struct, frozen=True):
    """To one connection; in the order of the instructions."""

    member: MemberId
    message: FromConnector


class Close(msgspec.Struct, frozen=True):
    """These connections have to end: send what is left, then no more (`SHUT_WR`). `on_gone` follows when the other side
    has closed, and by that says that it does not touch the arena any more.
    """

    members: list[MemberId]


class ReadDisk(msgspec.Struct, frozen=True):
    """Bring this slab into the slot, check it; then `on_disk_read`."""

    job: JobId
    disk_slot: int
    slot: int
    block_hash: bytes
    checksum: int


class WriteDisk(msgspec.Struct, frozen=True):
    """Whatever the index on disk says of `disk_slot` is void from now on. Write the slab, then its entry (hash,
    position, parent, checksum); then `on_disk_written`.
    """

    job: JobId
    slot: int
    disk_slot: int
    block_hash: bytes
    position: int
    parent: bytes


class DropDisk(msgspec.Struct, frozen=True):
    """The index on disk forgets that this block is in `disk_slot`, if it still says so; in the order of the
    instructions. Needs no answer.
    """

    disk_slot: int
    block_hash: bytes


class ClearDisk(msgspec.Struct, frozen=True):
    """The index on disk forgets everything, and this survives a crash; then `on_disk_cleared`. No WriteDisk is on its
    way when it is told.
    """

    job: JobId


class Fetch(msgspec.Struct, frozen=True):
    """Bring these blocks from another node into these slots, check each; then `on_fetched`, within `within_s`."""

    job: JobId
    peer_id: str
    hashes: list[bytes]
    slots: list[int]
    within_s: float
    #: ours (`TierEvent.generation`): who has an older one gives nothing
    generation: int = 0


class Resync(msgspec.Struct, frozen=True):
    """An event of this peer is missing: subscribe to it anew."""

    peer_id: str


Instruction = Send | Close | ReadDisk | WriteDisk | DropDisk | ClearDisk | Fetch | Resync
