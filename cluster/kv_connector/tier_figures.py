"""PURE. What a connector counts, as names and numbers for `ReplicaLoad.counters`: one of a node's replicas tells."""

from __future__ import annotations

from typing import Protocol

from cluster.kv_connector.stats import ConnectorStats
from replica.kv_messages import KVTier


class DiskFigures(Protocol):
    """What of the files is told."""

    read_bytes: int
    written_bytes: int
    num_lost: int


class FetchFigures(Protocol):
    """What of other nodes is told."""

    fetched_bytes: int


def tier_figures(
    stats: ConnectorStats, block_bytes: int, disk: DiskFigures | None, fetched: FetchFigures | None
) -> dict[str, float]:
    """Names begin with `tier_`."""
    loads, stores = stats.loads, stats.stores
    given = {tier: loads.given.get(tier, 0) for tier in (KVTier.HOST, KVTier.DISK, KVTier.REMOTE)}
    return {
        "tier_slots_host": stats.num_slots,
        "tier_slots_disk": stats.num_disk_slots,
        "tier_blocks_host": stats.num_found,
        "tier_blocks_disk": stats.num_on_disk,
        "tier_free": stats.num_free,
        "tier_leased": stats.num_leased,
        "tier_reserved": stats.num_reserved,
        "tier_staging": stats.num_staging,
        "tier_quarantined": stats.num_quarantined,
        "tier_stranded": stats.num_stranded,
        "tier_holders": stats.num_holders,
        "tier_peers": stats.num_peers,
        "tier_evictions_host": stats.num_evictions,
        "tier_evictions_disk": stats.num_disk_evictions,
        "tier_asked": loads.asked,
        **{f"tier_given_{tier.value}": count for tier, count in given.items()},
        "tier_late": loads.late,
        "tier_corrupt": loads.corrupt + (0 if disk is None else disk.num_lost),
        "tier_not_fetched": loads.not_fetched,
        "tier_stored": stores.stored,
        "tier_known": stores.known,
        "tier_not_reused": stores.not_reused,
        "tier_no_room": stores.no_room,
        "tier_disk_waiting": stats.num_waiting_for_disk + stats.num_disk_writes,
        "tier_disk_failures": stats.num_disk_failures,
        "tier_not_written": stats.num_not_written,
        "tier_stored_bytes_host": stores.stored * block_bytes,
        "tier_stored_bytes_disk": 0 if disk is None else disk.written_bytes,
        "tier_loaded_bytes_host": sum(given.values()) * block_bytes,
        "tier_loaded_bytes_disk": 0 if disk is None else disk.read_bytes,
        "tier_loaded_bytes_remote": 0 if fetched is None else fetched.fetched_bytes,
    }
