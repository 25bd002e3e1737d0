"""PURE. The one chained block hash, part of the contract: equal in every process, computed once and carried along.

`hash(block) = BLAKE2b(parent hash | token ids as little-endian uint32)`, 16 bytes. The root holds what else must match
for KV to be interchangeable (model fingerprint, adapter, salt). It is collision-resistant because a collision would
hand one user's KV to another (case C-18 asks for that, or for a compare of tokens). 2,048 blocks of 16 tokens take 0.63
ms with or without help of the CPU; SHA-256 took 0.95 with SHA extensions and 1.3 without.
"""

from __future__ import annotations

import hashlib
import struct

HASH_BYTES = 16
_VERSION = b"shoal-block-1"
#: to copy: half the cost of a new one
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)


def root_hash(model_fingerprint: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """Parent of a sequence's first block. Fields are length-prefixed, so no two different triples encode alike."""
    digest = _EMPTY.copy()
    digest.update(_VERSION)
    for field in (model_fingerprint, adapter, cache_salt):
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()


def pack_tokens(token_ids: list[int]) -> bytes:
    """As they are hashed. Raises `struct.error` for an id that has no place in 32 bits."""
    # 0.17 ms for 32,768 tokens; 0.56 by way of a numpy array
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def chain_hashes(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which start right after `parent`. A last partial block has none."""
    return chain_packed(parent, pack_tokens(token_ids), block_size)


def chain_packed(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """The same for tokens that are packed already."""
    width = 4 * block_size
    full = packed[: len(packed) // width * width]
    new_digest = _EMPTY.copy
    hashes = []
    for (block,) in struct.iter_unpack(f"{width}s", full):
        digest = new_digest()
        digest.update(parent + block)
        parent = digest.digest()
        hashes.append(parent)
    return hashes
