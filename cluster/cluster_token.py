"""ASYNC. The cluster's token: what processes of one cluster know and a stranger does not. It is read by each process
where it is needed, and is in no configuration, argument, log or runtime environment of Ray.

The first that is there counts:

- `SHOAL_CLUSTER_TOKEN_FILE`, a file; `SHOAL_CLUSTER_TOKEN`, the token itself (a Secret as environment);
- Ray's own token, where Ray asks for one (`RAY_AUTH_MODE=token`): another key is derived from it;
- `cluster-token` in the cache folder, which the first `shoal serve` makes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from replica.cache_folder import cache_folder
from replica.errors import ConfigError

FILE_ENV, TOKEN_ENV = "SHOAL_CLUSTER_TOKEN_FILE", "SHOAL_CLUSTER_TOKEN"
_LEAST_BYTES = 16


def read_token(environ: Mapping[str, str] | None = None) -> bytes:
    """Empty if there is none. Raises ConfigError for one that cannot be read or is too short."""
    environ = os.environ if environ is None else environ
    if path := environ.get(FILE_ENV):
        return _from_file(Path(path), FILE_ENV)
    if token := environ.get(TOKEN_ENV):
        return _checked(token.encode(), TOKEN_ENV)
    if environ.get("RAY_AUTH_MODE") == "token" and (token := environ.get("RAY_AUTH_TOKEN")):
        return hmac.digest(token.encode(), b"shoal data plane", hashlib.sha256)
    own = _own_file(environ)
    return _from_file(own, str(own)) if own.exists() else b""


def ensure_token(environ: Mapping[str, str] | None = None) -> None:
    """Make the file in the cache folder, readable by its owner alone, if there is no token. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    if read_token(environ):
        return
    own = _own_file(environ)
    own.parent.mkdir(parents=True, exist_ok=True)
    made = own.with_name(f"{own.name}.{secrets.token_hex(4)}")
    made.touch(mode=0o600)
    made.write_text(secrets.token_hex(32))
    try:
        os.link(made, own)  # of two that start at once the first wins, and nobody reads half a file
    except FileExistsError:
        pass
    finally:
        made.unlink()


def token_for(host: str) -> bytes:
    """For a replica that listens on `host`. Raises ConfigError where others could reach it and there is no token."""
    token = read_token()
    if not token and not ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"the data plane listens on {host}, which others can reach, and this node knows no cluster token; give all "
            f"nodes the same one: {FILE_ENV}=PATH or {TOKEN_ENV} (docs/start_and_stop.md)"
        )
    return token


def _own_file(environ: Mapping[str, str]) -> Path:
    return cache_folder(environ) / "cluster-token"


def _from_file(path: Path, name: str) -> bytes:
    try:
        return _checked(path.read_bytes().strip(), name)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None


def _checked(token: bytes, name: str) -> bytes:
    if len(token) < _LEAST_BYTES:
        raise ConfigError(f"{name}: the cluster token has {len(token)} bytes; needed: at least {_LEAST_BYTES}")
    return token
