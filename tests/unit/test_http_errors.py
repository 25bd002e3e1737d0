"""One table from the error tree to HTTP, complete and safe to show."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from replica import errors
from replica.errors import (
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
    RefusedError,
    ReplicaLostError,
    ShoalError,
    TenantLimitError,
    UnknownModelError,
)
from router.app_settings import AppSettings
from router.http_errors import MAX_MESSAGE_CHARS, RULES, HttpError, error_object, error_response, retry_after_seconds
from router.http_middleware import MAX_HEADER_BYTES, MAX_TARGET_BYTES


def tree(root: type[ShoalError]) -> list[type[ShoalError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in tree(child) if cls.__module__ == errors.__name__)]


def test_every_class_of_the_tree_has_a_rule_and_no_other() -> None:
    assert set(tree(ShoalError)) == set(RULES)


def test_statuses_say_who_is_to_blame() -> None:
    for cls, rule in RULES.items():
        is_client = issubclass(cls, InvalidRequestError | TenantLimitError)
        assert (400 <= rule.status < 500) == is_client, cls
        assert (rule.status == 429) == issubclass(cls, TenantLimitError), cls
        assert (rule.status in (429, 503)) == issubclass(cls, RefusedError), cls
    codes = [rule.code for cls, rule in RULES.items() if issubclass(cls, RefusedError)]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("estimate", "seconds"),
    [(0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (-5, 1), (1e9, 3600), (math.inf, 3600), (math.nan, 1)],
)
def test_retry_after_is_whole_seconds(estimate: float, seconds: int) -> None:
    response = error_response(QueueFullError("full", estimate))
    assert response.headers["retry-after"] == str(seconds) == str(retry_after_seconds(estimate))
    assert response.status == 503
    assert json.loads(response.body)["error"]["code"] == "queue_full"


def test_subclass_elsewhere_takes_the_rule_of_its_parent() -> None:
    class Special(NeverFitsError):
        pass

    error = error_object(Special("9000 of 8192", "messages"))["error"]
    assert error == {
        "message": "9000 of 8192",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_unknown_model_names_the_field() -> None:
    response = error_response(UnknownModelError("no such model"))
    error = json.loads(response.body)["error"]
    assert (response.status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_bug_is_500_and_its_text_is_not_shown() -> None:
    response = error_response(KeyError("secret /path"))
    assert response.status == 500
    assert b"secret" not in response.body
    assert b"KeyError" not in response.body


def test_message_is_bounded() -> None:
    message = json.loads(error_response(ReplicaLostError("x" * 100_000)).body)["error"]["message"]
    assert len(message) == MAX_MESSAGE_CHARS


def test_http_error_keeps_its_headers() -> None:
    response = error_response(HttpError(401, "no key", "invalid_api_key", {"www-authenticate": "Bearer"}))
    assert (response.status, response.headers) == (401, {"www-authenticate": "Bearer"})


def test_every_code_is_in_the_documentation(repo_root: Path) -> None:
    page = (repo_root / "docs" / "http.md").read_text()
    assert [rule.code for rule in RULES.values() if f"`{rule.code}`" not in page and rule.code is not None] == []


def test_limits_in_the_documentation_are_the_defaults(repo_root: Path) -> None:
    page = (repo_root / "docs" / "http.md").read_text()
    http = ClusterConfig().http
    for name, value in [
        ("max_body_mib", f"{http.max_body_mib:g} MiB"),
        ("max_pending_body_mib", f"{http.max_pending_body_mib:g} MiB"),
        ("body_timeout_s", f"{http.body_timeout_s:g} s"),
    ]:
        assert re.search(rf"`http\.{name}`, {value}\b", page), name
    fields = AppSettings.model_fields
    assert fields["max_body_bytes"].default == http.max_body_mib * 2**20
    assert fields["max_pending_body_bytes"].default == http.max_pending_body_mib * 2**20
    assert fields["body_timeout_s"].default == http.body_timeout_s
    for kib, num_bytes in [(64, MAX_HEADER_BYTES), (8, MAX_TARGET_BYTES)]:
        assert num_bytes == kib * 1024
        assert f"| {kib} KiB |" in page
