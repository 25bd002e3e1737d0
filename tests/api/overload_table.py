"""The tables of docs/overload.md, and whether an answer is what a row says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

from tests.api.calls import error_of
from tests.api.wire import Reply

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "overload.md"
_HEADER = ["Id", "Situation", "Status", "`code`", "`type`", "`Retry-After`", "What to do, and which knob", "Test"]
#: what OpenAI's Python client raises
EXCEPTIONS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    429: openai.RateLimitError,
    **dict.fromkeys((500, 502, 503, 504), openai.InternalServerError),
}


class Row(NamedTuple):
    """`status` is a number, or a word where the status was sent before or never is. `code` and `type`: None if null."""

    name: str
    status: str
    code: str | None
    type: str | None
    retry: str
    test: str


def rows() -> dict[str, Row]:
    """All rows by id."""
    found: dict[str, Row] = {}
    is_table = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if cells == _HEADER:
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and cells:
            name, _, status, code, type_, retry, _, test = cells
            name = name.strip("`")
            assert name not in found, f"{name} is there twice"
            found[name] = Row(name, status, _word(code), _word(type_), retry, test.strip("`"))
    return found


def _word(cell: str) -> str | None:
    return None if cell in ("null", "–") else cell.strip("`")


def check(name: str, answer: httpx.Response | Reply) -> str:
    """A whole answer is what the row says, and OpenAI's client takes it for that. Returns the error's message."""
    row = rows()[name]
    if isinstance(answer, Reply):
        answer = httpx.Response(
            answer.status, headers=answer.headers, content=answer.body, request=httpx.Request("POST", "http://x")
        )
    assert str(answer.status_code) == row.status, answer.text[:500]
    assert ("retry-after" in answer.headers) == (row.retry == "yes"), row
    assert (answer.headers.get("x-should-retry") == "false") == (row.retry == "never"), row
    assert ("x-should-retry" in answer.headers) == (row.retry == "never"), row
    if row.retry == "yes":
        assert answer.headers["retry-after"].isdigit()
        assert 1 <= int(answer.headers["retry-after"]) <= (3600 if answer.status_code == 429 else 60)
    if answer.status_code == 200:
        assert "error" not in answer.json()
        return ""
    message = error_of(answer, int(row.status))
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (row.code, row.type), error
    assert ("Retry-After" in message) == (row.retry == "yes"), message
    with openai.OpenAI(base_url="http://x", api_key="none") as client:
        raised = client._make_status_error_from_response(answer)  # type: ignore[arg-type]  # another httpx in its hints
        assert type(raised) is EXCEPTIONS[answer.status_code]
        if int(answer.headers.get("retry-after", 0)) <= 60:  # it gives up where it would have to wait for long
            is_again = row.retry == "yes" or (answer.status_code >= 500 and row.retry == "no")
            assert client._should_retry(answer) == is_again  # type: ignore[arg-type]
    assert raised.body == error
    return message


def check_events(name: str, events: list[Any]) -> str:
    """What came of a stream ends as the row says. Returns the error's message."""
    row = rows()[name]
    *chunks, last = events
    assert all("error" not in chunk for chunk in chunks)
    if row.status == "200":
        assert last == "[DONE]"
        return ""
    assert row.status == "event"
    assert "[DONE]" not in events
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert (last["error"]["code"], last["error"]["type"]) == (row.code, row.type)
    reasons = {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]}
    assert reasons == {None}, "a failure must not look like an end"
    return str(last["error"]["message"])
