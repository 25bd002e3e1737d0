"""PURE. A snapshot of a connector."""

from __future__ import annotations

import msgspec

from cluster.kv_connector.loads import LoadCounters
from cluster.kv_connector.stores import StoreCounters


class ConnectorStats(msgspec.Struct, frozen=True):
    """Slots of the arena: free + found + lingering + reserved + staging + quarantined + stranded = all."""

    num_slots: int
    num_free: int
    #: blocks that can be found
    num_found: int
    #: by leases, a slot of two counts twice
    num_leased: int
    num_reserved: int
    #: filled from disk or from another node just now
    num_staging: int
    #: forgotten, and read to the end
    num_lingering: int
    #: of holders that were given up and still have the arena mapped
    num_quarantined: int
    #: of nobody, or of a job without an answer for a minute: always 0
    num_stranded: int
    num_holders: int
    num_disk_slots: int
    num_on_disk: int
    num_disk_writes: int
    num_waiting_for_disk: int
    #: found the backlog of writes full
    num_not_written: int
    #: writes that failed
    num_disk_failures: int
    num_evictions: int
    num_disk_evictions: int
    num_peers: int
    loads: LoadCounters
    stores: StoreCounters
