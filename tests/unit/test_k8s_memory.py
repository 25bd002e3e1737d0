"""The arena of the KVConnector is memory of its pod, and `shoal k8s check` counts it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_k8s import MANIFEST, TP2, container, findings, pod, read, served, worker


def with_tier(service: dict[str, Any], **kv_cache: Any) -> str:
    served(service, lambda c: c["applications"][0]["args"].setdefault("kv_cache", {}).update(kv_cache))
    return findings(service)


def limit(group: dict[str, Any], text: str) -> None:
    for part in container(group)["resources"].values():
        part["memory"] = text


def test_an_arena_that_does_not_fit_is_said_with_all_its_numbers() -> None:
    service = read(MANIFEST)
    limit(worker(service), "12Gi")
    assert with_tier(service, host_tier_gib=8, kv_cache_gib=2) == ""
    said = with_tier(service, host_tier_gib=10)
    assert "workerGroupSpecs[1].template.spec.containers[0].resources" in said
    assert "memory limit 12.0 GiB, and needed are 12.7 GiB before any weights: 10.0 for kv_cache.host_tier_gib" in said
    assert "(once a pod, not in /dev/shm), 2.0 for the KV pools of 1 replica(s), 0.7 for processes" in said
    limit(worker(service), "13Gi")
    assert with_tier(service) == ""


def test_replicas_that_share_a_pod_have_a_pool_each_and_one_arena() -> None:
    service = read(MANIFEST)
    room = container(worker(service))["resources"]["limits"]["cpu"]
    each = int(room) // 2
    served(service, lambda c: c["applications"][0]["args"].update(num_cpus_per_replica=each, threads_per_replica=each))
    limit(worker(service), "12Gi")
    worker(service).update(replicas=1, minReplicas=1, maxReplicas=1)
    assert "4.0 for the KV pools of 2 replica(s)" in with_tier(service, host_tier_gib=8, kv_cache_gib=2)


def test_a_pool_on_a_device_and_a_pool_in_blocks_are_not_memory_that_is_known() -> None:
    service = read(TP2)
    assert "0.0 for the KV pools" in with_tier(service, host_tier_gib=500)
    service = read(MANIFEST)
    assert "0.0 for the KV pools" in with_tier(service, host_tier_gib=500, num_blocks=100)


@pytest.mark.parametrize("size", ["2Gi", "64Mi"])
def test_the_size_of_dev_shm_does_not_matter_to_the_arena(size: str) -> None:
    service = read(MANIFEST)
    limit(worker(service), "64Gi")
    before = findings(service)
    for volume in pod(worker(service)).get("volumes", []):
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            volume["emptyDir"]["sizeLimit"] = size
    assert before == ""
    without = findings(service)
    assert with_tier(service, host_tier_gib=32) == without
