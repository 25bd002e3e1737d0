"""RAY. The router as a Serve ingress deployment: HTTP edge, tokenizer, dispatcher and streams to replicas in one
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from replica.errors import ConfigError
from replica.messages import RouterId
from router import membership
from router.app import create_app
from router.app_settings import AppSettings
from router.grammar_worker import GrammarChecker
from router.live_backend import LiveBackend
from router.live_settings import LiveSettings
from router.pairing import PairingDispatcher
from router.placement import POLICIES
from router.tenant_desk import TenantDesk
from router.tenant_source import TenantRules, TenantSource
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: model name -> folder on this node with tokenizer and configuration
ModelSource = Callable[[str], Path]
#: the configuration at the start, and what was changed since (Serve's `user_config`) -> what is in force here. Raises
#: ConfigError.
Live = Callable[[Mapping[str, Any], Mapping[str, Any]], LiveSettings]


class Router:
    """Plain class behind the deployment. Serve calls `__serve_build_asgi_app__` after the constructor.

    `config` is the whole configuration at the start; `live` makes of it what may change, `tenant_rules` its tenants;
    `settings` is the rest. `cluster_token` reads what replicas want a proof of. `tenant_settings`: the tenants' file or
    None, whether keys are needed, how many routers.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        replicas: list[DeploymentHandle[Any]],
        model: str,
        model_source: ModelSource,
        settings: Mapping[str, Any],
        config: Mapping[str, Any],
        live: Live,
        tenant_rules: TenantRules,
        tenant_settings: Mapping[str, Any],
        cluster_token: Callable[[], bytes],
        chat_template: str | None = None,
        set_up_logs: Callable[[], None] = lambda: None,
    ) -> None:
        set_up_logs()
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(None, model_source, model)
        tokenizer = Tokenizer.from_folder(folder, chat_template)
        router_id = RouterId(uuid.uuid4().hex[:12])
        self._config, self._live = config, live
        self._overlay: Mapping[str, Any] = {}
        self._told: Mapping[str, Any] = {}
        self._refused = ""
        now = live(config, {})
        self.settings = _complete({**settings, "router_name": router_id, "policy": now.order_policy}, tokenizer)
        self.backend = LiveBackend(
            PairingDispatcher(now.dispatcher, POLICIES[now.placement], now.hand_over, router_id),
            router_id,
            self.settings.served_model_names[0],
            token=cluster_token(),
        )
        self.backend.config_number = now.number
        self._grammars = GrammarChecker()
        desk = TenantDesk((), tenant_settings["needs_keys"], tenant_settings["num_routers"])
        self._tenants = TenantSource(desk, tenant_rules, config, tenant_settings["path"])
        self._tenants.load()
        self._tenants.watch()
        self._app = create_app(
            self.settings, tokenizer, self.backend, reason_against=self._grammars.reason_against, tenants=desk
        )
        membership.LISTENERS.append((loop, membership.Views(self.backend.on_view)))
        # any call makes Serve build its router for the handle, and with it our observer; that nobody is up yet is no
        # error
        for handle in replicas:
            with contextlib.suppress(DeploymentUnavailableError, TimeoutError):
                # a replica that is stopped must not keep a router from starting
                await asyncio.wait_for(handle.broadcast("describe").results_async(return_exceptions=True), 5)
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve calls it after the constructor and at each change of `user_config`. What cannot work is refused whole,
        and what was in force stays (as in `replica/deployment.py`).
        """
        self._told = user_config
        try:
            live = self._live(self._config, user_config)
            self._tenants.lay(user_config)
        except ConfigError as error:
            self._refused = str(error)
            logger.error("user_config is refused, the configuration stays as it was: %s", error)
            return
        self._refused, self._overlay = "", user_config
        self.backend.dispatcher.configure(live.dispatcher, POLICIES[live.placement])
        self.backend.dispatcher.desk.config = live.hand_over
        self.backend.config_number = live.number
        self._app.state.edge.look_at_priorities(live.order_policy)

    async def stopping(self, drain_s: float) -> None:
        """`shoal serve` stops, and all goes: nobody comes in, and what is here ends within that time. Returns when
        nothing is left. Serve itself does not tell that from a replica that is replaced, and when the application is
        deleted its proxies know no route any more: who comes then gets a 404 and takes the model for unknown.
        """
        logger.info("the server stops; streams have %g s to end", drain_s)
        await self.backend.stop(drain_s)

    async def configuration(self) -> dict[str, Any]:
        """For `shoal get` and `shoal set`: the configuration at the start, what lies over it, what Serve told last, and
        why that does not lie over it.
        """
        return {
            "number": self.backend.config_number,
            "refused": self._refused,
            "told": dict(self._told),
            "start": dict(self._config),
            "overlay": dict(self._overlay),
        }


def _complete(settings: Mapping[str, Any], tokenizer: Tokenizer) -> AppSettings:
    """Fill what the configuration left open from the model's own files."""
    facts = tokenizer.facts
    filled: dict[str, Any] = dict(settings)
    own = facts.max_model_len
    if filled.get("max_model_len") is None:
        filled["max_model_len"] = own or 8192
    filled.setdefault("vocab_size", facts.vocab_size or tokenizer.num_tokens)
    defaults = facts.generation_defaults
    for name, value in (
        ("default_temperature", defaults.temperature),
        ("default_top_p", defaults.top_p),
        ("default_top_k", defaults.top_k),
        ("default_min_p", defaults.min_p),
        ("default_repetition_penalty", defaults.repetition_penalty),
    ):
        if value is not None:
            filled.setdefault(name, value)
    return AppSettings.model_validate(filled)


def router_deployment(
    replicas: list[serve.Application],
    *,
    num_routers: int,
    longest_stream_s: float,
    env_vars: dict[str, str],
    node_label: str | None = None,
    **kwargs: Any,
) -> serve.Application:
    """The ingress node of the Serve application. `kwargs` go to `Router`; options: `docs/architecture.md`.

    `node_label`: only nodes whose Ray label of that name is `router`, and one router on each, so that losing a node
    costs one.
    """
    actor_options: dict[str, Any] = {"num_cpus": 0.1, "runtime_env": {"env_vars": env_vars}}
    placement: dict[str, Any] = {}
    if node_label:
        actor_options["label_selector"] = {node_label: "router"}
        placement = {"max_replicas_per_node": 1}
    decorate: Any = serve.deployment  # its stubs do not know the plain-class form
    deployment = decorate(
        serve.ingress()(Router),
        name="Router",
        num_replicas=num_routers,
        ray_actor_options=actor_options,
        **placement,
        # one line per health probe and status call would bury everything else
        logging_config={"enable_access_log": False},
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=longest_stream_s,
        max_surge_percent=100,  # in an update new ones are up before old ones go: with a single one nobody waits
        max_ongoing_requests=100_000,
        user_config={},  # not None, so that `reconfigure` is called from the start
    )
    application: serve.Application = deployment.bind(replicas, **kwargs)
    return application
