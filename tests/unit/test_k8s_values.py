"""The chart's values: what may be given, what a configuration reads as, and what becomes of it in the application."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import load
from cluster.k8s.serve_config import args_of, serve_config
from cluster.k8s.values import load_values, values_of
from replica.errors import ConfigError

Document = dict[str, Any]
NEEDED = {"model": {"id": "m"}, "image": {"tag": "t"}}


def test_values_of_a_configuration_say_the_same() -> None:
    config = load({"model": "m", "replicas": {"both": 3}, "num_gpus_per_replica": 2, "scheduler": {"max_num_seqs": 9}})
    made = values_of(config)
    assert made["config"] == {"scheduler": {"max_num_seqs": 9}}
    again = load(args_of(load_values({**made, "image": {"tag": "t"}})))
    assert again == config.model_copy(update={"node_label": "shoal/role", "tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"http": {"api_keys": ["k"]}}, "keys do not belong"), ({"tenants": {"file": "/x"}}, "set tenants.secretName")],
)
def test_what_a_chart_does_not_take(config: Document, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        values_of(load(config))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"replicaCount": 2}, "replicaCount: unknown key"),
        ({"pods": {"cpus": 2}}, r"pods\.cpus: unknown key; did you mean 'cpu'\?"),
        ({"replicas": 0}, "replicas: Input should be greater"),
        ({"pods": {"tolerations": "x"}}, "allowed: a list of sections"),
        (
            {"pods": {"tolerations": [{"effect": "Never"}]}},
            r"pods\.tolerations\.0\.effect: Input should be 'NoSchedule'",
        ),
        ({"pods": {"env": {"A": 1}}}, r"pods\.env\.A: .*; allowed: text"),
        ({"pods": {"envFrom": [{}]}}, r"pods\.envFrom\.0: needs configMapRef or secretRef, and one of them only"),
        ({"pods": {"envFrom": [{"secretRef": 3}]}}, "must be a section with the keys name, optional"),
        (
            {"router": {"volumes": [{"name": "a"}]}},
            r"router\.volumes\.0: the volume 'a' needs one source, and has none",
        ),
        (
            {"head": {"podTemplate": {"spec": {"containers": []}}}},
            r"head\.podTemplate: spec has no 'containers'; allowed",
        ),
        (
            {"head": {"podTemplate": {"kind": "Pod"}}},
            r"head\.podTemplate: 'kind' is no part of it; allowed: metadata, spec",
        ),
        ({"pods": {"env": ["x"]}}, "allowed: a text for each name"),
        ({"config": {"drain_s": 5}}, "config.drain_s: set drain.seconds"),
    ],
)
def test_values_that_are_refused(values: Document, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_values({**NEEDED, **values})


def test_both_roles_and_none() -> None:
    made = serve_config(load_values({**NEEDED, "disaggregation": {"enabled": True, "decode": {"replicas": 2}}}))
    assert made["applications"][0]["args"]["replicas"] == {"prefill": 1, "decode": 2}


def test_the_application_asks_for_nodes_of_its_roles() -> None:
    from cluster.app import build

    application = build({"node_label": "shoal/role", "num_gpus_per_replica": 2})
    router = application._bound_deployment
    (replica,) = next(one for one in router.init_args if isinstance(one, list))
    options = router.ray_actor_options
    assert options is not None
    assert options["label_selector"] == {"shoal/role": "router"}
    assert router._replica_config.max_replicas_per_node == 1
    selectors = replica._bound_deployment._replica_config.placement_group_bundle_label_selector
    assert selectors == [{"shoal/role": "both"}] * 3


def test_each_role_is_a_deployment() -> None:
    from cluster.app import build

    more = {"disaggregation": {"prefill": {"tensor_parallel_size": 2, "max_num_seqs": 3}}}
    router = build({"node_label": "l", "replicas": {"prefill": 1, "decode": 2, "both": 3}, **more})._bound_deployment
    replicas = [one._bound_deployment for one in next(one for one in router.init_args if isinstance(one, list))]
    assert [(one.name, one.num_replicas) for one in replicas] == [("Replica", 3), ("Prefill", 1), ("Decode", 2)]
    bundles = [one._replica_config.placement_group_bundles for one in replicas]
    assert bundles == [None, [{"CPU": 1.0}] * 3, None]
    start, settings = replicas[1].init_args[:2]
    assert start["kv_cache"]["host_tier_gib"] == 0.25
    assert [settings(start, {})[0].scheduler.max_num_seqs for settings in (one.init_args[1] for one in replicas)] == [
        128,
        3,
        128,
    ]
    live = {"disaggregation": {"prefill": {"max_num_seqs": 5}}}
    assert settings(start, live)[0].scheduler.max_num_seqs == 5
