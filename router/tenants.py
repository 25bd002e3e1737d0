"""PURE. Who asks: tenants, and which of them an API key belongs to.

A key is known by its SHA-256 alone, so neither the configuration nor a memory image of a router gives one away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from replica.errors import ConfigError

#: of requests with one of `http.api_keys`, or with no key where none is needed
DEFAULT_TENANT = "default"
#: what a stored key begins with; 64 hexadecimal digits follow
HASH_PREFIX = "sha256:"


def hashed(key: str) -> str:
    """An API key as the configuration may hold it."""
    return HASH_PREFIX + hashlib.sha256(key.encode("utf-8")).hexdigest()


class Tenant(msgspec.Struct, frozen=True):
    """Somebody with keys, a share and limits. None: no limit."""

    name: str
    #: SHA-256 of each key
    digests: frozenset[bytes] = frozenset()
    #: share of the work beside other tenants that wait
    weight: float = 1.0
    max_concurrent_requests: int | None = None
    #: lowest and highest `priority` that its requests may have
    priority: tuple[int, int] | None = None
    tokens_per_minute: float | None = None


def default_tenant(api_keys: Iterable[str]) -> Tenant:
    """Without limits. `api_keys` in plain text."""
    return Tenant(DEFAULT_TENANT, frozenset(digest_of(hashed(key)) for key in api_keys))


def digest_of(stored: str) -> bytes:
    """Of a key as the configuration holds it."""
    return bytes.fromhex(stored.removeprefix(HASH_PREFIX))


class TenantBook:
    """Tenants by name and by key. Immutable: another one takes its place."""

    def __init__(self, tenants: Iterable[Tenant], needs_keys: bool) -> None:
        """Raises ConfigError when two tenants have the same key. There is always a default tenant."""
        by_name = {tenant.name: tenant for tenant in tenants}
        by_name.setdefault(DEFAULT_TENANT, Tenant(DEFAULT_TENANT))
        self.by_name: Mapping[str, Tenant] = by_name
        #: whether a request without a known key is answered 401
        self.needs_keys = needs_keys
        self._by_digest: dict[bytes, str] = {}
        for tenant in by_name.values():
            for digest in tenant.digests:
                other = self._by_digest.setdefault(digest, tenant.name)
                if other != tenant.name:
                    raise ConfigError(
                        f"the tenants {other!r} and {tenant.name!r} have the same key "
                        f"({HASH_PREFIX}{digest.hex()[:8]}...); allowed: each key once"
                    )

    def name_of(self, authorization: bytes | None) -> str | None:
        """The tenant behind an `Authorization` header; None: nobody that may come in.

        One look-up by digest, however many keys there are: what it costs tells nothing about a key, since nobody can
        choose digests.
        """
        otherwise = None if self.needs_keys else DEFAULT_TENANT
        scheme, _, key = (authorization or b"").partition(b" ")
        if not self._by_digest or scheme.lower() != b"bearer":
            return otherwise
        digest = hashlib.sha256(key.strip()).digest()
        return self._by_digest.get(digest, otherwise)
