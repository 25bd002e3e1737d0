"""RAY. Composition root: `ClusterConfig` -> Serve application. `import_path: cluster.app:build` for `serve run` and
KubeRay.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray import serve

from cluster import __version__, live_knobs, model_store, tenant_file
from cluster.cluster_token import ensure_token, read_token, token_for
from cluster.config import ClusterConfig, HttpConfig, load
from cluster.kv_connector.actor import find_connector
from cluster.line_socket import tell as tell_line
from cluster.role_config import DEPLOYMENTS
from cluster.serve_env import SERVE_ENV
from cluster.serve_logs import join_serve_logs
from cluster.serve_policy import serve_options
from replica.deployment import replica_deployment
from replica.messages import Role
from router.deployment import router_deployment
from router.tenant_source import TenantRules

APP_NAME = "shoal"


def build(args: Mapping[str, Any] | None = None) -> serve.Application:
    """The Serve application. `args` are the keys of `ClusterConfig`. Raises ConfigError on what cannot work."""
    return build_from(load(args or {}))


def build_from(config: ClusterConfig, terminal: str = "") -> serve.Application:
    """The Serve application of a checked configuration. `terminal`: where a `shoal serve` hears of lost ranks."""
    ensure_token()
    return router_deployment(
        [_replicas(config, role, terminal) for role in config.replicas.counts],
        num_routers=config.router.replicas,
        longest_stream_s=config.longest_stream_s,
        env_vars=SERVE_ENV,
        node_label=config.node_label,
        model=config.model,
        model_source=model_store.resolve,
        settings={
            "served_model_names": (config.served_name,),
            "max_model_len": config.max_model_len,
            "api_keys": config.http.api_keys,
            "cors_allow_origins": config.http.cors_allow_origins,
            "max_body_bytes": int(config.http.max_body_mib * (1 << 20)),
            "max_pending_body_bytes": int(config.http.max_pending_body_mib * (1 << 20)),
            "body_timeout_s": config.http.body_timeout_s,
            "admin_endpoints": config.http.admin_endpoints,
            "set_request_id_header": False,
            "version": __version__,
        },
        config=config.model_dump(),
        live=live_knobs.router_settings,
        tenant_rules=TenantRules(tenant_file.parse, tenant_file.in_force),
        tenant_settings={
            "path": config.tenants.file,
            "needs_keys": config.tenants.needs_keys(config.http.api_keys),
            "num_routers": config.router.replicas,
        },
        cluster_token=read_token,
        chat_template=config.chat_template,
        set_up_logs=join_serve_logs,
    )


def _replicas(config: ClusterConfig, role: Role, terminal: str) -> serve.Application:
    """Those of one role."""
    own = config.of_role(role)
    return replica_deployment(
        # API keys are none of its business
        config.model_copy(update={"http": HttpConfig(), "tenants": config.tenants.without_keys()}).model_dump(),
        partial(live_knobs.engine_settings, role=role),
        model_store.resolve,
        name=DEPLOYMENTS[role],
        role=role,
        how_many=serve_options(config, role),
        replicas_on_node=replicas_on_node(config),
        num_cpus=config.num_cpus_per_replica,
        drain_s=config.drain_s,
        env_vars=SERVE_ENV,
        request_router_class="router.membership:Membership",
        bundles=own.bundles,
        bundle_strategy=config.rank_placement,
        node_label=config.node_label,
        set_up_logs=join_serve_logs,
        tell=partial(tell_line, terminal),
        find_connector=(
            partial(find_connector, config.kv_cache.model_dump(), join_serve_logs, SERVE_ENV)
            if config.kv_cache.has_connector
            else None
        ),
        cluster_token=token_for,
    )


def replicas_on_node(config: ClusterConfig) -> int:
    """How many replicas are likely to share a node's cores: all of them on a laptop, spread evenly otherwise."""
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"]) if ray.is_initialized() else 1
    return max(1, -(-config.most_replicas // max(1, num_nodes)))
