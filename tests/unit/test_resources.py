"""Room for replicas: asked for, available, where."""

from __future__ import annotations

import pytest

from cluster.config import load
from cluster.resources import NodeRoom, shortage
from replica.errors import ConfigError


def node(name: str, cpus: float, gpus: float = 0, free_cpus: float | None = None) -> NodeRoom:
    free = {"CPU": cpus if free_cpus is None else free_cpus, "GPU": gpus}
    return NodeRoom(name, {"CPU": cpus, "GPU": gpus}, free)


REPLICA = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]


def test_what_fits_is_no_shortage() -> None:
    assert shortage(REPLICA, 2, "STRICT_PACK", [node("a", 8, 4)]) == ""
    assert shortage(REPLICA, 2, "STRICT_PACK", [node("a", 4, 2), node("b", 4, 2)]) == ""
    assert shortage([{"CPU": 0.1}] * 1, 10, "STRICT_PACK", [node("a", 1)]) == "", "tenths do not add up exactly"


def test_a_node_must_hold_a_whole_replica_unless_pack_is_allowed() -> None:
    nodes = [node("a", 4, 1), node("b", 4, 1)]
    sentence = shortage(REPLICA, 1, "STRICT_PACK", nodes)
    assert sentence == (
        "asked for 1 replica(s) of 3 CPU, 2 GPU in 3 bundles on one node (rank_placement: STRICT_PACK): "
        "1 CPU for itself, 1 CPU, 1 GPU a rank; there is room for 0. "
        "Free: a has 4 of 4 CPU, 1 of 1 GPU; b has 4 of 4 CPU, 1 of 1 GPU"
    )
    assert shortage(REPLICA, 1, "PACK", nodes) == ""


def test_what_others_use_is_not_there() -> None:
    sentence = shortage([{"CPU": 3.0}], 2, "STRICT_PACK", [node("a", 8, free_cpus=5)])
    assert "room for 1" in sentence
    assert "a has 5 of 8 CPU" in sentence


def test_ranks_have_bundles_of_their_own() -> None:
    assert load({}).bundles is None
    assert load({"runner_placement": "workers"}).bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    config = load({"num_gpus_per_replica": 2, "num_cpus_per_rank": 3})
    assert config.bundles == [{"CPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert config.engine_config().parallel.tensor_parallel_size == 2
    assert load({"num_gpus_per_replica": 1}).engine_config().parallel.has_workers, "the replica itself has no GPU"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_gpus_per_replica is 2 and tensor_parallel_size is 3.*one GPU"):
        load({"num_gpus_per_replica": 2, "tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match=r"runner_placement is 'process'.*there are 2"):
        load({"tensor_parallel_size": 2, "runner_placement": "process"})
