"""PURE. When an answer must have begun: a header and a field say so, in milliseconds from the arrival."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replica.errors import DeadlineExceededError, InvalidRequestError
from router.http_errors import NOT_AGAIN, RULES, HttpError
from router.openai_api import DEADLINE_ALLOWED, MAX_DEADLINE_MS, ChatOrCompletion
from router.sentences import short

HEADER = "X-Request-Deadline-Ms"
_HEADER = HEADER.lower().encode()


def header_deadline_ms(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """What the header says; of several the earliest. The same numbers are allowed as in the field, so those of JSON.
    Raises InvalidRequestError.
    """
    found = [_number_in(value) for name, value in headers if name == _HEADER]
    return min(found, default=None)


def _number_in(value: bytes) -> float:
    text = value.strip(b" \t")  # blanks around it are not part of a value (RFC 9110, 5.5); not every server takes them
    try:
        number = msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError:
        shown = short(text.decode("latin-1"))
    else:
        if 0 < number <= MAX_DEADLINE_MS:
            return float(number)
        shown = short(number)
    raise InvalidRequestError(f"{HEADER} is {shown}; allowed: {DEADLINE_ALLOWED}.", HEADER)


def late_body() -> HttpError:
    """The same answer for a body that has not come in time, of which the rest is not waited for."""
    rule = RULES[DeadlineExceededError]
    message = "The deadline passed before the request was read."
    return HttpError(rule.status, message, rule.code, {"connection": "close", **NOT_AGAIN}, rule.type)


def deadline_of(request: ChatOrCompletion, header_ms: float | None, arrived_s: float, now_s: float) -> float | None:
    """Seconds since the epoch; `arrived_s` and `now_s` as well. Raises DeadlineExceededError if it has passed."""
    given = [value for value in (request.deadline_ms, header_ms) if value is not None]
    if not given:
        return None
    deadline_s = arrived_s + min(given) / 1000
    if deadline_s <= now_s:
        raise DeadlineExceededError("The deadline passed before the request was read.")
    return deadline_s
