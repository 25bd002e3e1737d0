"""PURE. Pieces of the sentences that tell a client what is wrong with a request."""

from __future__ import annotations

#: How much of a wrong value an error repeats, in characters.
MAX_ECHO_CHARS = 60


class WrongValueError(ValueError):
    """A finished sentence about one field; who knows the field's name makes an `InvalidRequestError` of it."""


def short(value: object) -> str:
    """A value as an error message shows it: never long, and never walked through (it may be megabytes, or nested
    deeply).
    """
    if isinstance(value, (list, dict)):
        if len(value) > 4 or any(
            isinstance(item, (list, dict)) for item in (value if isinstance(value, list) else value.values())
        ):
            kind = "a list" if isinstance(value, list) else "an object"
            return f"{kind} of {len(value)} entr{'y' if len(value) == 1 else 'ies'}"
        if isinstance(value, list):
            text = "[" + ", ".join(map(short, value)) + "]"
        else:
            text = "{" + ", ".join(f"{short(key)}: {short(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, str):
        text = repr(value[: MAX_ECHO_CHARS + 1])
    else:
        text = repr(value)
        text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."
