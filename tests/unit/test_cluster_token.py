"""Where the cluster's token comes from, what proves it, and that it is told nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import cluster_token
from cluster.cluster_token import FILE_ENV, TOKEN_ENV, ensure_token, read_token, token_for
from replica.errors import ConfigError
from replica.stream_proof import is_proof, proof

TOKEN = "0123456789abcdef0123"


def test_the_first_that_is_there_counts(tmp_path: Path) -> None:
    environ = {"SHOAL_CACHE": str(tmp_path)}
    assert read_token(environ) == b""
    ensure_token(environ)
    own = read_token(environ)
    assert len(own) == 64
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of ray"}
    assert read_token(environ) not in (own, b"of ray")
    environ[TOKEN_ENV] = TOKEN
    assert read_token(environ) == TOKEN.encode()
    file = tmp_path / "secret"
    file.write_text(f"{TOKEN}-of-a-file\n")
    environ[FILE_ENV] = str(file)
    assert read_token(environ) == f"{TOKEN}-of-a-file".encode()


def test_a_file_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    environ = {"SHOAL_CACHE": str(tmp_path / "new")}
    ensure_token(environ)
    first = read_token(environ)
    ensure_token(environ)
    assert read_token(environ) == first
    (made,) = (tmp_path / "new").iterdir()
    assert made.stat().st_mode & 0o777 == 0o600


def test_no_file_is_made_where_a_token_is_given(tmp_path: Path) -> None:
    ensure_token({"SHOAL_CACHE": str(tmp_path), TOKEN_ENV: TOKEN})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({TOKEN_ENV: "short-secret"}, f"{TOKEN_ENV}: the cluster token has 12 bytes; needed: at least 16"),
        ({FILE_ENV: "/nowhere/token"}, f"{FILE_ENV}: /nowhere/token: No such file or directory"),
    ],
)
def test_what_cannot_be_a_token_is_a_sentence_without_it(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_token(environ)
    assert str(raised.value) == sentence


def test_beyond_loopback_there_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_token, "read_token", lambda: b"")
    assert token_for("127.0.0.1") == b""
    with pytest.raises(ConfigError, match=r"listens on 10\.0\.0\.3, which others can reach"):
        token_for("10.0.0.3")
    monkeypatch.setattr(cluster_token, "read_token", lambda: TOKEN.encode())
    assert token_for("10.0.0.3") == TOKEN.encode()


def test_a_proof_is_of_one_router_for_one_incarnation() -> None:
    token = TOKEN.encode()
    shown = proof(token, "router-1", "a")
    assert TOKEN not in shown
    assert is_proof(shown, token, "router-1", "a")
    assert is_proof(shown.encode(), token, "router-1", "a")
    assert not is_proof(shown, token, "router-2", "a")
    assert not is_proof(shown, token, "router-1", "b")
    assert not is_proof(shown, b"another token, long", "router-1", "a")
    assert not is_proof("", token, "router-1", "a")
    assert not is_proof("ü", token, "router-1", "a")
