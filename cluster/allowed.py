"""PURE. What a key of the configuration may be, in a few words: for error sentences and for docs/knobs.md."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

#: pydantic's names of limits
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_RANGE = "a list of two whole numbers, the lower first"
_KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def allowed(model: type[BaseModel], name: str) -> str:
    """Of the field `name`; a section has none."""
    field = model.model_fields[name]
    kinds = list(get_args(field.annotation)) if _is_union(field.annotation) else [field.annotation]
    words = [_kind(kind, field) for kind in kinds if kind is not NoneType]
    return " or ".join(["auto", *words] if NoneType in kinds else words)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _kind(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(str(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        if get_args(kind)[0] is str:
            return "a list of texts"
        item = get_args(kind)[0]
        is_section = get_origin(item) is dict or (isinstance(item, type) and issubclass(item, BaseModel))
        return "a list of sections" if is_section else _RANGE
    if get_origin(kind) is dict:
        if get_args(kind)[1] is str:
            return "a text for each name"
        return "a section for each name"
    word = _KINDS[kind]
    if kind in (int, float) and (limits := _limits(field)):
        return f"{word}, {limits}"
    return word


def _limits(field: FieldInfo) -> str:
    found = {name: getattr(limit, name, None) for limit in field.metadata for name in _LIMITS if hasattr(limit, name)}
    return ", ".join(f"{_LIMITS[name]} {value:.15g}" for name, value in found.items())
