"""PURE. What an HTTP client sees of each error: one table from the error tree to (status, type, code).

Every error body is shaped as OpenAI's: `{"error": {"message", "type", "param", "code"}}`. `RULES` has one entry per
class of `replica.errors`; a test enumerates the tree against it. Errors of HTTP itself (no such route, no key, body
too large) are `HttpError`. Anything else is a bug of ours: the client sees "internal error" and nothing of its text.
"""

from __future__ import annotations

import math

import msgspec

from replica.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    LostTooOftenError,
    ModelLoadError,
    NeverFitsError,
    NoReplicaError,
    NotFiniteError,
    QueueFullError,
    RanksLostError,
    RefusedError,
    ReplicaLostError,
    RouterBusyError,
    ShedError,
    ShoalError,
    TenantConcurrencyError,
    TenantLimitError,
    TenantTokensError,
    TooManySequencesError,
    UnknownModelError,
    UnsupportedValueError,
)

#: Longest error message sent to a client, in characters: echoed input must not amplify.
MAX_MESSAGE_CHARS = 1000
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
UNAVAILABLE = "service_unavailable_error"
#: OpenAI's word; which limit it is says the code
RATE_LIMIT = "rate_limit_exceeded"
#: at the end of every refusal that time alone will end
COME_AGAIN = "Retry-After says in how many seconds to come again."


class ErrorRule(msgspec.Struct, frozen=True):
    """How one class of error is told over HTTP."""

    status: int
    type: str
    code: str | None


RULES: dict[type[ShoalError], ErrorRule] = {
    ShoalError: ErrorRule(500, SERVER_ERROR, "internal_error"),
    InvalidRequestError: ErrorRule(400, INVALID_REQUEST, None),
    NeverFitsError: ErrorRule(400, INVALID_REQUEST, "context_length_exceeded"),
    TooManySequencesError: ErrorRule(400, INVALID_REQUEST, "too_many_sequences"),
    UnsupportedValueError: ErrorRule(400, INVALID_REQUEST, "unsupported_value"),  # OpenAI's code
    UnknownModelError: ErrorRule(404, INVALID_REQUEST, "model_not_found"),
    RefusedError: ErrorRule(503, UNAVAILABLE, "refused"),
    QueueFullError: ErrorRule(503, UNAVAILABLE, "queue_full"),
    ShedError: ErrorRule(503, UNAVAILABLE, "shed"),
    NoReplicaError: ErrorRule(503, UNAVAILABLE, "no_replica"),
    RouterBusyError: ErrorRule(503, UNAVAILABLE, "router_busy"),
    TenantLimitError: ErrorRule(429, RATE_LIMIT, "tenant_limit"),
    TenantConcurrencyError: ErrorRule(429, RATE_LIMIT, "tenant_concurrency"),
    TenantTokensError: ErrorRule(429, RATE_LIMIT, "tenant_tokens"),
    DeadlineExceededError: ErrorRule(504, "timeout_error", "deadline_exceeded"),
    ReplicaLostError: ErrorRule(502, SERVER_ERROR, "replica_lost"),
    LostTooOftenError: ErrorRule(502, SERVER_ERROR, "replica_lost"),
    EngineError: ErrorRule(500, SERVER_ERROR, "engine_error"),
    NotFiniteError: ErrorRule(500, SERVER_ERROR, "not_finite"),
    RanksLostError: ErrorRule(502, SERVER_ERROR, "replica_lost"),
    ModelLoadError: ErrorRule(500, SERVER_ERROR, "model_load_error"),
    ConfigError: ErrorRule(500, SERVER_ERROR, "config_error"),
}
INTERNAL = ErrorRule(500, SERVER_ERROR, "internal_error")
#: Another try would end in the same way. OpenAI's clients repeat any 5xx twice unless `X-Should-Retry` is false: a
#: request that three replicas died under would be given to nine.
_IN_VAIN = (DeadlineExceededError, LostTooOftenError, NotFiniteError)
NOT_AGAIN = {"x-should-retry": "false"}


class HttpError(Exception):
    """An error of the HTTP layer itself; not part of the tree, because replicas never raise it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        type_: str = INVALID_REQUEST,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rule = ErrorRule(status, type_, code)
        self.headers = headers or {}


class ErrorResponse(msgspec.Struct, frozen=True):
    """A complete answer: `body` is the JSON object of the error."""

    status: int
    headers: dict[str, str]
    body: bytes


def rule_of(error: BaseException) -> ErrorRule:
    """The rule of the nearest class in the error's MRO; `INTERNAL` for what is not ours."""
    if isinstance(error, HttpError):
        return error.rule
    for cls in type(error).__mro__:
        if cls in RULES:
            return RULES[cls]
    return INTERNAL


def error_object(error: BaseException) -> dict[str, object]:
    """`{"error": {...}}` for a response body or for an event inside a stream."""
    rule = rule_of(error)
    known = isinstance(error, (ShoalError, HttpError))
    message = str(error) if known else "The server made an internal error; it was logged."
    if isinstance(error, RefusedError):
        message = f"{message[:1].upper()}{message[1:].rstrip('.')}. {COME_AGAIN}"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    param = error.param if isinstance(error, InvalidRequestError) else None
    if isinstance(error, UnknownModelError) and param is None:
        param = "model"
    return {"error": {"message": message, "type": rule.type, "param": param, "code": rule.code}}


def error_response(error: BaseException) -> ErrorResponse:
    """Status, headers and body for an error before the first byte of a response."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, RefusedError):
        headers["retry-after"] = str(retry_after_seconds(error.retry_after_s))
    elif isinstance(error, _IN_VAIN):
        headers |= NOT_AGAIN
    return ErrorResponse(rule_of(error).status, headers, msgspec.json.encode(error_object(error)))


def retry_after_seconds(estimate_s: float) -> int:
    """`Retry-After` counts whole seconds: round up, at least 1, at most an hour (also for NaN and infinity)."""
    if not math.isfinite(estimate_s):
        return 3600 if estimate_s > 0 else 1
    return min(3600, max(1, math.ceil(estimate_s)))
