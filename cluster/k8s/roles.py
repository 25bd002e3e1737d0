"""PURE. Which roles the replicas of an application have, and what this version of Shoal can serve of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig, load
from replica.errors import ConfigError

#: roles that the chart can render and the application does not know yet
NOT_YET = ("prefill", "decode")
NOT_YET_TEXT = "prefill and decode on different replicas is not built yet: the application refuses it; allowed: both"


def read(args: Mapping[str, Any]) -> tuple[dict[str, int], ClusterConfig | None, list[str]]:
    """Replicas of each role, the configuration (None if it is refused for another reason), and sentences.

    With roles that are not known yet the configuration is that of one role, for what does not depend on it.
    """
    replicas = args.get("replicas")
    sentences = []
    counts: dict[str, int] = {}
    if isinstance(replicas, Mapping) and set(replicas) & set(NOT_YET):
        counts = {str(name): count for name, count in replicas.items() if isinstance(count, int)}
        args = {key: value for key, value in args.items() if key != "replicas"}
        sentences.append(f"replicas: {NOT_YET_TEXT}")
    try:
        config = load(args)
    except ConfigError as error:
        return counts, None, [*sentences, *str(error).splitlines()]
    return counts or {"both": config.replicas.both}, config, sentences
