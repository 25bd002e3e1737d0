"""PURE. The error tree. What a client sees for each leaf is one table in `router/http_errors.py`.

    ShoalError
    ├── InvalidRequestError          the request can never be served as it is        (param, message)
    │   ├── NeverFitsError           longer than the context or the KV pool          (numbers inside)
    │   ├── TooManySequencesError    more in one request than a whole queue holds    (numbers inside)
    │   ├── UnsupportedValueError    this server, as it is configured now, does not look at it
    │   └── UnknownModelError
    ├── RefusedError                 not now: reason, retry_after_s
    │   ├── QueueFullError
    │   ├── ShedError                it waited, and made way for more urgent work
    │   ├── NoReplicaError
    │   ├── RouterBusyError          the router holds as many bytes of long bodies as it may
    │   └── TenantLimitError         a limit of the tenant, whatever room there is
    │       ├── TenantConcurrencyError   as many requests as it may have at once
    │       └── TenantTokensError        as many tokens a minute as it may have
    ├── DeadlineExceededError        the request's own deadline, or that of a question to replicas, passed
    ├── ReplicaLostError             the replica died and the request could not be continued elsewhere
    │   └── LostTooOftenError        replica after replica died or failed under it
    ├── EngineError                  the model runner raised; the sequences of that step are gone
    │   ├── NotFiniteError           the model computed NaN or infinity for this request, and would again
    │   └── RanksLostError           ranks of a tensor-parallel group died, stopped or hung; the group is restarted
    ├── ModelLoadError               a model folder or file cannot be used (sentence inside)
    └── ConfigError                  a configuration that cannot work (field, value, what is allowed)

`assert` is for our own invariants, never for input.
"""

from __future__ import annotations

from replica.messages import RefusalReason


class ShoalError(Exception):
    """Root of everything Shoal raises on purpose. `str(error)` is a sentence fit for a client."""


class InvalidRequestError(ShoalError):
    """The request is wrong. `param` names the field, as in OpenAI error bodies."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:  # exceptions cross actor borders by pickle
        return (type(self), (self.message, self.param))


class NeverFitsError(InvalidRequestError):
    """Longer than the model's context or than the whole KV pool: waiting would not help."""


class TooManySequencesError(InvalidRequestError):
    """More sequences in one request than the queue of a replica ever holds: waiting would not help."""


class UnsupportedValueError(InvalidRequestError):
    """Right by itself, but this server does not act on it as it is configured now: without it the request is served."""


class UnknownModelError(InvalidRequestError):
    """No model of this name is served here."""


class RefusedError(ShoalError):
    """The cluster cannot take the request now. `retry_after_s` is a forecast of the drain."""

    reason: RefusalReason = RefusalReason.QUEUE_FULL

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.retry_after_s))


class QueueFullError(RefusedError):
    """Every replica's queue is at its cap, and stayed there for `admission_wait_ms`."""

    reason = RefusalReason.QUEUE_FULL


class ShedError(RefusedError):
    """It was queued at a replica and had to make way for more urgent work."""

    reason = RefusalReason.SHED


class NoReplicaError(RefusedError):
    """No replica is up."""

    reason = RefusalReason.NO_REPLICA


class RouterBusyError(RefusedError):
    """The router reads and tokenizes as many long bodies as it has memory for."""


class TenantLimitError(RefusedError):
    """A limit of the tenant. `retry_after_s` says when its own requests will have made room."""


class TenantConcurrencyError(TenantLimitError):
    """The tenant has as many requests at once as it may."""


class TenantTokensError(TenantLimitError):
    """The tenant has used the tokens that it may have in a minute."""


class DeadlineExceededError(ShoalError):
    """A deadline passed: the request's own before it was served, or the one of a question to replicas."""


class ReplicaLostError(ShoalError):
    """The replica that worked on the request is gone, and so are the attempts to continue elsewhere."""


class LostTooOftenError(ReplicaLostError):
    """As many replicas in a row as may be died or failed under the request: it may be what ends them."""


class EngineError(ShoalError):
    """The model runner failed on a step."""


class NotFiniteError(EngineError):
    """The model computed NaN or infinity where logits should be; the same would happen on every replica."""


class RanksLostError(EngineError):
    """A rank died, stopped or hung, and with it the KV of the whole replica. Says which and why."""


class ModelLoadError(ShoalError):
    """A model cannot be loaded; says which file and why."""


class ConfigError(ShoalError):
    """A configuration that cannot work; names the field, the value and what is allowed."""
