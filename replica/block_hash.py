"""PURE. The one chained block hash, part of the contract: equal in every process, computed once and carried along.

`hash(block) = SHA-256(parent hash | token ids as little-endian uint32)`, cut to 16 bytes. The root holds what else must
match for KV to be interchangeable (model fingerprint, adapter, salt). SHA-256 because a collision would hand one user's
KV to another (case C-18 asks for a compare or a collision-resistant hash); with SHA extensions it costs about 0.6 us a
block, Python included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import numpy as np

HASH_BYTES = 16
_VERSION = b"shoal-block-1"


def root_hash(model_fingerprint: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """Parent of a sequence's first block. Fields are length-prefixed, so no two different triples encode alike."""
    digest = hashlib.sha256(_VERSION)
    for field in (model_fingerprint, adapter, cache_salt):
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()[:HASH_BYTES]


def chain_hashes(parent: bytes, token_ids: Seq[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which start right after `parent`. A last partial block has none."""
    num_blocks = len(token_ids) // block_size
    if num_blocks == 0:
        return []
    data = np.asarray(token_ids[: num_blocks * block_size], dtype="<u4").tobytes()
    width = 4 * block_size
    sha256 = hashlib.sha256
    hashes = []
    for start in range(0, num_blocks * width, width):
        parent = sha256(parent + data[start : start + width]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes
