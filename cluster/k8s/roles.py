"""PURE. Which roles the replicas of an application have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig, load
from replica.errors import ConfigError


def read(args: Mapping[str, Any]) -> tuple[dict[str, int], ClusterConfig | None, list[str]]:
    """Replicas of each role, the configuration (None if it is refused), and sentences."""
    try:
        config = load(args)
    except ConfigError as error:
        return {}, None, str(error).splitlines()
    return {role.value: count for role, count in config.replicas.counts.items()}, config, []
