"""PURE. How connectors of different nodes get slabs of each other: the interface, whatever carries the bytes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from replica.kv_messages import KVPeer, KVTier


class PeerAddress(msgspec.Struct, frozen=True):
    """A connector and where it listens. Another incarnation at the same place is somebody else."""

    peer: KVPeer
    host: str
    port: int


class ReadLease(msgspec.Struct, frozen=True):
    """Slots that stay sealed until they are given back; -1 where the block is not here."""

    slots: list[int]
    #: of whoever gave it
    lease_id: int = 0


class SlabSource(Protocol):
    """What a connector gives to others. Called on the loop."""

    async def lease_for_peer(
        self, reader: KVPeer, hashes: list[bytes], within_s: float, generation: int = 0
    ) -> ReadLease:
        """One slot for each hash. May bring them from disk first. `generation`: of the reader."""

    def release_of_peer(self, lease: ReadLease) -> None:
        """Nothing reads its slots any more. Exactly once for each lease."""

    def held_blocks(self) -> dict[KVTier, list[bytes]]:
        """All that it can give now: the first word to a subscriber."""


class Transport(Protocol):
    """Brings slabs of other connectors into slots of our arena."""

    async def fetch(
        self, peer: PeerAddress, hashes: list[bytes], slots: list[int], within_s: float, generation: int = 0
    ) -> list[bool]:
        """For each hash: its slot holds exactly its bytes, of this or a later generation. Never raises for what a peer
        does or does not do.

        The slots belong to the transport until it returns, also when it is cancelled: nothing writes into them after.
        """

    async def close(self) -> None:
        """Idempotent. What is being fetched ends."""
