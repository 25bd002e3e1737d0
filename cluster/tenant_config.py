"""PURE. The `tenants` section of the configuration, and what it makes of both its sources: inline and a file.

What stands inline lies over the file, field by field, so that `shoal set` reaches tenants of the file too; keys add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, field_validator

from replica.config import MAX_INTEGER, FrozenModel
from router.tenants import DEFAULT_TENANT, HASH_PREFIX, Tenant, digest_of

#: a name is a label of metrics and a part of dotted keys
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
NAME_ALLOWED = "1 to 64 letters, digits, '-' and '_', the first a letter or digit"
_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-fA-F]{{64}}")
#: each is a series of every tenant metric
MAX_TENANTS = 1000


class TenantConfig(FrozenModel):
    """One tenant. auto: as the file says, and if it says nothing: weight 1, no limit."""

    keys: tuple[str, ...] = Field((), description="Its API keys, as `shoal key` prints them: sha256:<64 hex digits>.")
    weight: float | None = Field(None, ge=0.001, le=1000, description="Share of the work beside others. auto: 1.")
    max_concurrent_requests: int | None = Field(None, ge=1, description="Most requests under way. auto: any number.")
    priority: tuple[int, int] | None = Field(
        None, description="Lowest and highest priority of its requests. auto: any."
    )
    tokens_per_minute: float | None = Field(
        None, ge=1, le=MAX_INTEGER, description="Prompt and output tokens in a minute. auto: any number."
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _keys_are_hashed(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError(f"is no list; allowed: a list of {HASH_PREFIX}<64 hex digits>")
        for place, key in enumerate(value):
            if not isinstance(key, str) or not _HASH.fullmatch(key):
                # the key itself is not repeated: sentences end up in logs
                raise ValueError(
                    f"number {place + 1} is no hash of a key; allowed: {HASH_PREFIX}<64 hex digits>, which "
                    "`shoal key --hash` makes of a key on its standard input, and `shoal key` of a new one"
                )
        return value

    @field_validator("priority", mode="before")
    @classmethod
    def _range_is_one(cls, value: object) -> object:
        if value is None or value == "auto":
            return None
        is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(end) is int for end in value)
        if not is_pair or not -MAX_INTEGER <= value[0] <= value[1] <= MAX_INTEGER:  # type: ignore[index]
            raise ValueError("is no range of priorities")
        return value


class TenantsConfig(FrozenModel):
    """Who may ask, how much, and what share everybody has."""

    file: str | None = Field(None, description="YAML of tenants by name, read again when it changes. auto: none.")
    allow_anonymous: bool = Field(
        False, description="Requests with no key, or an unknown one, are the default tenant's instead of 401."
    )
    named: dict[str, TenantConfig] = Field({}, description="Tenants by name; `default` has the keys of http.api_keys.")

    @field_validator("file")
    @classmethod
    def _file_is_found_from_anywhere(cls, value: str | None) -> str | None:
        """Routers run elsewhere than the command."""
        if value is None:
            return None
        if not value.strip():
            raise ValueError("is empty")
        return str(Path(value).expanduser().absolute())

    @field_validator("named")
    @classmethod
    def _names_are_labels(cls, value: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is no name of a tenant; allowed: {NAME_ALLOWED}")
        if len(value) > MAX_TENANTS:
            raise ValueError(f"holds {len(value)} tenants; allowed: at most {MAX_TENANTS}")
        if (default := value.get(DEFAULT_TENANT)) is not None and default.keys:
            raise ValueError(f"{DEFAULT_TENANT!r} has keys; allowed: none, it has those of http.api_keys")
        seen: dict[bytes, str] = {}
        for name, tenant in value.items():
            for digest in map(digest_of, tenant.keys):
                if seen.setdefault(digest, name) != name:
                    raise ValueError(f"{seen[digest]!r} and {name!r} have the same key; allowed: each key once")
        return value

    def needs_keys(self, api_keys: Iterable[str]) -> bool:
        """Whether a request without a known key is refused. It does not depend on what a file holds: one that lost all
        its keys must not let everybody in.
        """
        has_keys = self.file is not None or any(tenant.keys for tenant in self.named.values())
        return any(api_keys) or (has_keys and not self.allow_anonymous)

    def without_keys(self) -> TenantsConfig:
        """For those who need not know them."""
        named = {name: tenant.model_copy(update={"keys": ()}) for name, tenant in self.named.items()}
        return self.model_copy(update={"named": named})


def tenants_of(
    inline: Mapping[str, TenantConfig], file: Mapping[str, TenantConfig], api_digests: Iterable[bytes]
) -> list[Tenant]:
    """Both sources together. `api_digests`: of `http.api_keys`. Equal keys of two tenants are found by `TenantBook`."""
    names = dict.fromkeys([DEFAULT_TENANT, *file, *inline])
    nothing = TenantConfig()
    return [
        _tenant(name, inline.get(name, nothing), file.get(name, nothing), api_digests if name == DEFAULT_TENANT else ())
        for name in names
    ]


def _tenant(name: str, over: TenantConfig, under: TenantConfig, more_digests: Iterable[bytes]) -> Tenant:
    def first(field: str) -> float | None:
        value = getattr(over, field)
        found: float | None = getattr(under, field) if value is None else value
        return found

    weight, limit = first("weight"), first("max_concurrent_requests")
    return Tenant(
        name,
        frozenset([*map(digest_of, [*over.keys, *under.keys]), *more_digests]),
        1.0 if weight is None else float(weight),
        None if limit is None else int(limit),
        under.priority if over.priority is None else over.priority,
        first("tokens_per_minute"),
    )
