"""PURE. Where KV is: part of the contract with routers and of that with the KVConnector."""

from __future__ import annotations

import enum


class KVTier(enum.StrEnum):
    """Where a block is."""

    #: a replica's own pool
    POOL = "pool"
    #: the arena of a node
    HOST = "host"
    DISK = "disk"
    #: the arena or disk of another node
    REMOTE = "remote"
