"""PURE. A computed block as it is offered to the KVConnector: with its place in its chain, by which tiers decide what
goes first.
"""

from __future__ import annotations

from typing import NamedTuple

from replica.sequence import Sequence


class Offer(NamedTuple):
    """One full block. Cheap to make: decoding makes one every `block_size` tokens and sequence."""

    block_hash: bytes
    block_id: int
    #: hash of the block before it; empty for the first
    parent: bytes
    position: int


def offer_of(sequence: Sequence, position: int) -> Offer:
    """Of a block that is computed and has its hash."""
    hashes = sequence.block_hashes
    return Offer(hashes[position], sequence.block_ids[position], hashes[position - 1] if position else b"", position)
