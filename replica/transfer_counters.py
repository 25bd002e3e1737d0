"""PURE. What a replica's half of the KVConnector counts."""

from __future__ import annotations

import msgspec


class TransferCounters(msgspec.Struct):
    """Totals since the start."""

    loads: int = 0
    #: loads that came to nothing or to less: late, void, or the copy failed
    failed_loads: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    #: offered and refused: there already, no room, or not asked for often enough
    blocks_refused: int = 0
    #: seconds between question and answer
    load_wait_s: float = 0.0
    #: of put back sequences, those whose KV was kept
    offloads: int = 0
    #: times that a sequence which wanted a block waited a step for copies to free one
    stalls: int = 0
