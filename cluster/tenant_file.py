"""PURE. The file of tenants: its text, and what is in force with the configuration around it. Passed to routers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config import ClusterConfig, PlainYaml, sentence
from cluster.live_knobs import Overlay, lay_over
from cluster.tenant_config import TenantConfig, TenantsConfig, tenants_of
from replica.errors import ConfigError
from router.tenants import Tenant, TenantBook, default_tenant

_Named = Mapping[str, TenantConfig]


def parse(text: bytes) -> _Named:
    """Tenants by name, of a YAML mapping; nothing: no tenants. Raises ConfigError, a sentence a mistake, in which no
    key stands.
    """
    try:
        data = yaml.load(text.decode("utf-8"), PlainYaml)
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8") from None
    except yaml.MarkedYAMLError as error:  # as a string it would quote the line, with the key that may stand there
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"not YAML: {error.problem}{place}") from None
    except yaml.YAMLError:
        raise ConfigError("not YAML") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"expected tenants by name at the top, found {type(data).__name__}")
    try:
        return TenantsConfig.model_validate({"named": data}).named
    except ValidationError as error:
        sentences = [sentence(item, TenantsConfig).removeprefix("named.") for item in error.errors()]
        raise ConfigError("\n".join(sentences)) from None


def in_force(start: Mapping[str, Any], overlay: Overlay, file: _Named) -> list[Tenant]:
    """Tenants of a configuration, of what lies over it, and of a parsed file. Raises ConfigError."""
    config = lay_over(start, overlay)
    return tenants_of(config.tenants.named, file, default_tenant(config.http.api_keys).digests)


def check_file(config: ClusterConfig) -> None:
    """Before anything is started. Raises ConfigError when the file is not there or cannot be used."""
    if (path := config.tenants.file) is None:
        return
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tenants.file {path}: {error.strerror}") from None
    try:
        TenantBook(in_force(config.model_dump(), {}, parse(text)), needs_keys=True)
    except ConfigError as error:
        raise ConfigError(f"tenants.file {path}: {error}") from None
