"""PURE. The errors that a client gets for what a replica or the dispatcher decided."""

from __future__ import annotations

from replica.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LostTooOftenError,
    NeverFitsError,
    NoReplicaError,
    NotFiniteError,
    QueueFullError,
    ReplicaLostError,
    ShedError,
    ShoalError,
    TooManySequencesError,
)
from replica.messages import FinishReason, RefusalReason, SequenceOutput
from router.instructions import Fail, Refuse


def final_error(output: SequenceOutput) -> ShoalError | None:
    """Why the request ends with this output, where another replica would say the same; None: it does not."""
    match output.finish_reason:
        case FinishReason.INVALID:
            return InvalidRequestError(output.message)
        case FinishReason.NOT_FINITE:
            return NotFiniteError(output.message)
        case FinishReason.DEADLINE:
            return DeadlineExceededError(output.message)
    return None


def refusal_error(instruction: Refuse) -> ShoalError:
    """The error of a request that the dispatcher refuses."""
    match instruction.reason:
        case RefusalReason.NEVER_FITS:
            return NeverFitsError(instruction.message, None)
        case RefusalReason.TOO_MANY_SEQUENCES:
            return TooManySequencesError(instruction.message, "n")
        case RefusalReason.INVALID:
            return InvalidRequestError(instruction.message)
        case RefusalReason.DEADLINE:
            return DeadlineExceededError(instruction.message)
        case RefusalReason.SHED:
            return ShedError(instruction.message, instruction.retry_after_s)
        case RefusalReason.NO_REPLICA:
            return NoReplicaError(instruction.message, instruction.retry_after_s)
        case _:
            return QueueFullError(instruction.message, instruction.retry_after_s)


def failure_error(instruction: Fail) -> ReplicaLostError:
    """The error of a request that the dispatcher gives up after it was begun, or lost too often."""
    return (LostTooOftenError if instruction.is_lost_too_often else ReplicaLostError)(instruction.message)
