"""PURE. When an answer must have begun: a header and a field say so, in milliseconds from the arrival."""

from __future__ import annotations

import re
from collections.abc import Iterable

from replica.errors import DeadlineExceededError, InvalidRequestError
from router.http_errors import RULES, HttpError
from router.openai_api import MAX_DEADLINE_MS, ChatOrCompletion
from router.sentences import short

HEADER = "X-Request-Deadline-Ms"
_HEADER = HEADER.lower().encode()
#: `float` alone would also take "1_000", "1e3" and spaces around it
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?", re.ASCII)


def header_deadline_ms(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """What the header says; of several the earliest. Raises InvalidRequestError."""
    found = []
    for name, value in headers:
        if name == _HEADER:
            text = value.decode("latin-1")
            number = float(text) if _NUMBER.fullmatch(text) else 0.0
            if not 0 < number <= MAX_DEADLINE_MS:
                raise InvalidRequestError(
                    f"{HEADER} is {short(text)}; allowed: a number above 0, up to {MAX_DEADLINE_MS} (a day).", HEADER
                )
            found.append(number)
    return min(found, default=None)


def late_body() -> HttpError:
    """The same answer for a body that has not come in time, of which the rest is not waited for."""
    rule = RULES[DeadlineExceededError]
    message = "The deadline passed before the request was read."
    return HttpError(rule.status, message, rule.code, {"connection": "close"}, rule.type)


def deadline_of(request: ChatOrCompletion, header_ms: float | None, arrived_s: float, now_s: float) -> float | None:
    """Seconds since the epoch; `arrived_s` and `now_s` as well. Raises DeadlineExceededError if it has passed."""
    given = [value for value in (request.deadline_ms, header_ms) if value is not None]
    if not given:
        return None
    deadline_s = arrived_s + min(given) / 1000
    if deadline_s <= now_s:
        raise DeadlineExceededError("The deadline passed before the request was read.")
    return deadline_s
