"""ASYNC. The endpoints that generate nothing: models, health, figures, tokens, and what is accepted here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from replica.errors import InvalidRequestError, NoReplicaError
from router.edge import Edge
from router.http_errors import HttpError
from router.openai_api import parse_detokenize, parse_tokenize
from router.prepare import model_name, render_chat
from router.prompt_limits import check_vocabulary
from router.sentences import short

_encode = msgspec.json.Encoder().encode
#: how long /reset_prefix_cache waits for all replicas
RESET_TIMEOUT_S = 5.0
#: how long the questions behind /debug wait for replicas: who is silent is named in the answer
EXPLAIN_TIMEOUT_S = 1.0
DEFAULT_LIVING, MAX_LIVING = 50, 1000


class InfoEndpoints:
    """Functions for Starlette's routes. They raise; the application turns errors into answers."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        #: by the policy it was made for
        self._openapi: tuple[str, bytes] | None = None

    def _card(self, name: str) -> dict[str, object]:
        edge = self._edge
        return {
            "id": name,
            "object": "model",
            "created": edge.started_s,
            "owned_by": "shoal",
            "root": edge.settings.served_model_names[0],
            "parent": None,
            "max_model_len": edge.settings.max_model_len,
        }

    async def models(self, request: Request) -> Response:
        self._check_served()
        cards = [self._card(name) for name in self._edge.settings.served_model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = model_name(request.path_params["name"], self._edge.settings)
        self._check_served()
        return json_response(self._card(name))

    def _check_served(self) -> None:
        """Many wait for a server to be ready by asking for its models. Raises NoReplicaError."""
        if not self._edge.backend.health().ok:
            raise NoReplicaError("no replica is ready: all of them start, drain or are gone", 2.0)

    async def health(self, request: Request) -> Response:
        health = self._edge.backend.health()
        return json_response({**health.detail, "ok": health.ok}, 200 if health.ok else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._edge.settings.version})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._edge.backend.load()})

    async def status(self, request: Request) -> Response:
        """For `shoal status`: what this router knows of the replicas."""
        return json_response(self._edge.backend.status())

    async def metrics(self, request: Request) -> Response:
        text = self._edge.metrics.text() + self._edge.backend.metrics_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        return await self._from_body(request, self._tokenize)

    def _tokenize(self, body: bytes) -> dict[str, object]:
        codec, settings = self._edge.codec, self._edge.settings
        request = parse_tokenize(body)
        model_name(request.model, settings)
        text = request.prompt if request.prompt is not None else render_chat(request, codec)
        add_special = request.add_special_tokens
        if add_special is None:
            add_special = request.prompt is not None
        tokens = codec.encode(text, add_special)
        strings = [codec.token_text(token_id) for token_id in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": settings.max_model_len, "tokens": tokens, "token_strs": strings}

    async def detokenize(self, request: Request) -> Response:
        return await self._from_body(request, self._detokenize)

    def _detokenize(self, body: bytes) -> dict[str, object]:
        request = parse_detokenize(body)
        model_name(request.model, self._edge.settings)
        check_vocabulary(request.tokens, self._edge.settings.vocab_size, "tokens")
        return {"prompt": self._edge.codec.decode(request.tokens, False)}

    async def _from_body(self, request: Request, function: Callable[[bytes], dict[str, object]]) -> Response:
        body = await self._edge.read(request.scope, request.receive)
        try:
            return json_response(await self._edge.compute(body.is_long, function, body.take()))
        finally:
            body.release()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Every replica forgets its cached prefixes: for tests and benchmarks, so off unless it was asked for."""
        self._check_admin("POST /reset_prefix_cache")
        for name in ("reset_running_requests", "reset_external"):
            value = request.query_params.get(name, "false")
            if value.lower() not in ("false", "0"):
                raise InvalidRequestError(f"{name} is {short(value)}; allowed: false.", name)
        return json_response({"reset": await self._edge.backend.reset_prefix_cache(RESET_TIMEOUT_S)})

    async def debug_requests(self, request: Request) -> Response:
        """The unfinished requests that are oldest, one line of data each: what each does or waits for."""
        self._check_admin("GET /debug/requests")
        if unknown := [name for name in request.query_params if name != "limit"]:
            raise InvalidRequestError(f"{short(unknown[0])} is not known here; allowed: limit.", unknown[0][:64])
        text = request.query_params.get("limit", str(DEFAULT_LIVING))
        limit = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
        if not 1 <= limit <= MAX_LIVING:
            raise InvalidRequestError(f"limit is {short(text)}; allowed: 1 to {MAX_LIVING}.", "limit")
        return json_response(await self._edge.backend.living(limit, EXPLAIN_TIMEOUT_S))

    async def debug_request(self, request: Request) -> Response:
        """All that is known of one request: where its time went, and what it waits for."""
        self._check_admin("GET /debug/requests/{request_id}")
        name = request.path_params["request_id"]
        told = await self._edge.backend.explain(name, EXPLAIN_TIMEOUT_S) if name else None
        if told is None:
            raise HttpError(
                404,
                f"Neither this router nor a replica knows {short(name)}, as an id or as an X-Request-Id. Another "
                "router may; what ended long ago is forgotten, and a 400 for a wrong field is not kept.",
                "not_found",
            )
        return json_response(told)

    def _check_admin(self, what: str) -> None:
        if not self._edge.settings.admin_endpoints:
            raise HttpError(404, f"{what} is off here; http.admin_endpoints: true switches it on.", "not_found")

    async def openapi(self, request: Request) -> Response:
        """What is accepted, from the models that accept it."""
        policy = self._edge.settings.policy  # it may change, and with it what a priority may be
        if self._openapi is None or self._openapi[0] != policy:
            self._openapi = policy, await self._edge.compute(True, self._build_openapi)
        return Response(self._openapi[1], media_type="application/json")

    def _build_openapi(self) -> bytes:
        """Takes 90 ms, and as much again to import, so it waits until somebody asks."""
        from router.openapi import openapi

        return _encode(openapi(self._edge.settings))


def json_response(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")
