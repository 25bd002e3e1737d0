"""PURE. Do the replicas that are asked for fit the nodes that are there? Ray would wait for room for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

Resources = Mapping[str, float]
#: what Ray counts in tenths and hundredths does not add up exactly
_SLACK = 1e-6


class NodeRoom(msgspec.Struct, frozen=True):
    """One node: what it has, and what of it is free."""

    name: str
    total: dict[str, float]
    free: dict[str, float]


def shortage(replica: Sequence[Resources], num_replicas: int, strategy: str, nodes: Iterable[NodeRoom]) -> str:
    """Empty if `num_replicas` fit, each with the bundles of `replica`; else a sentence: asked for, available, where.

    `strategy`: STRICT_PACK keeps a replica on one node, PACK may use several. First fit, the fullest node last: it may
    see a shortage where a cleverer order would not, so a replica count at the very edge can be refused.
    """
    nodes = sorted(nodes, key=lambda node: -sum(node.free.values()))
    free = [dict(node.free) for node in nodes]
    parts = [_sum(replica)] if strategy == "STRICT_PACK" else list(replica)
    for count in range(num_replicas):
        if not _take(parts, free):
            return _sentence(replica, num_replicas, count, strategy, nodes)
    return ""


def fits(
    replica: Sequence[Resources], num_replicas: int, strategy: str, rooms: Sequence[Resources], one_each: bool = False
) -> tuple[int, int]:
    """How many replicas find a place, and how many of `rooms` then hold something. `one_each`: one replica a room."""
    free = [dict(room) for room in rooms]
    full = [dict(room) for room in rooms]
    parts = [_sum(replica)] if strategy == "STRICT_PACK" else list(replica)
    placed = 0
    while placed < num_replicas and _take(
        parts, [f for f, was in zip(free, full, strict=True) if not one_each or f == was]
    ):
        placed += 1
    return placed, sum(1 for now, was in zip(free, full, strict=True) if now != was)


def _take(parts: Iterable[Resources], free: list[dict[str, float]]) -> bool:
    for part in parts:
        room = next((one for one in free if all(one.get(k, 0) + _SLACK >= v for k, v in part.items())), None)
        if room is None:
            return False
        for name, value in part.items():
            room[name] = room.get(name, 0) - value
    return True


def _sentence(
    replica: Sequence[Resources], num_replicas: int, count: int, strategy: str, nodes: Sequence[NodeRoom]
) -> str:
    each = _sum(replica)
    whole = f"{num_replicas} replica(s) of {_text(each)}"
    if len(replica) > 1:
        where = "on one node (rank_placement: STRICT_PACK)" if strategy == "STRICT_PACK" else "on any nodes (PACK)"
        whole += f" in {len(replica)} bundles {where}: {_text(replica[0])} for itself, {_text(replica[-1])} a rank"
    names = list(each)
    rooms = [f"{node.name} has {_text({n: node.free.get(n, 0) for n in names}, node.total)}" for node in nodes]
    return f"asked for {whole}; there is room for {count}. Free: {'; '.join(rooms) or 'no node'}"


def _sum(bundles: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, value in bundle.items():
            total[name] = total.get(name, 0) + value
    return total


def _text(resources: Resources, total: Resources | None = None) -> str:
    of = {name: "" if total is None else f" of {total.get(name, 0):g}" for name in resources}
    return ", ".join(f"{value:g}{of[name]} {name}" for name, value in resources.items())
