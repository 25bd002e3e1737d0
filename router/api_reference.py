"""PURE. `docs/api.md`, written from the models and tables that check requests, so that it cannot drift.

`python -m router.api_reference` writes it; a unit test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from replica.messages import MAX_GRAMMAR_BYTES
from router import api_prose, message_checks, schema_bounds, structured
from router.api_notes import CHAT_NOTES, CHOICES, ENDPOINTS, NOTES, TOKEN_NOTES, Note
from router.openai_api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.openai_fields import CHAT_REFUSED, COMPLETION_REFUSED, WITHOUT_EFFECT, Refused
from router.openapi import RULES_OVER_FIELDS, openapi

__all__ = ["markdown", "openapi"]


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default()
    if value is None or value == () or value == {}:
        return "-"
    return f"`{json.dumps(int(value) if value == 0 and value is not False else value)}`"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join([_row(head), "|" + "---|" * len(head), *(_row(row) for row in rows)]) + "\n"


def _fields(model: type[BaseModel], names: Iterable[str], notes: Mapping[str, Note]) -> str:
    rows = []
    for name in names:
        field, note = model.model_fields[name], notes[name]
        told = [f"`{name}`", field.description or "", _default(name, field), note.meaning, note.vllm, note.openai]
        rows.append(told)
    return _table(("Field", "Allowed", "Default", "Meaning", "vLLM", "OpenAI"), rows)


def _refused(rules: Mapping[str, Refused], names: Iterable[str]) -> str:
    rows = []
    for name in sorted(names):
        rule = rules[name]
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
        rows.append((f"`{name}`", rule.reason, rule.instead or "-", neutral or "-"))
    return _table(("Field", "Why", "Use instead", "Accepted all the same (beside null and empty)"), rows)


def _token_fields() -> str:
    notes = {**NOTES, **TOKEN_NOTES}
    rows = []
    for path, model in (("/tokenize", TokenizeRequest), ("/detokenize", DetokenizeRequest)):
        for name, field in model.model_fields.items():
            note = notes[name]
            rows.append((f"`{path}`", f"`{name}`", field.description or "", _default(name, field), note.meaning))
    return _table(("Path", "Field", "Allowed", "Default", "Meaning"), rows)


def _sections() -> Iterable[str]:
    common = [name for name in CompletionRequest.model_fields if name in ChatRequest.model_fields]
    both = [name for name in common if name not in ("logprobs", "add_special_tokens")]
    yield api_prose.INTRO
    rows = ((f"`{path}`", meaning, vllm) for path, meaning, vllm in ENDPOINTS)
    yield "## Endpoints\n\n" + _table(("Path", "What it gives", "vLLM"), rows)
    yield "## Fields of both endpoints that generate\n\n" + _fields(ChatRequest, both, NOTES)
    for title, model in (("POST /v1/completions", CompletionRequest), ("POST /v1/chat/completions", ChatRequest)):
        own = [name for name in model.model_fields if name not in both]
        notes = {**NOTES, **CHAT_NOTES} if model is ChatRequest else NOTES
        yield f"## Fields of {title} alone\n\n" + _fields(model, own, notes)
    rules = "\n".join(f"- {rule}" for rule in RULES_OVER_FIELDS)
    yield f"Rules over fields, each 400 when broken:\n\n{rules}\n"
    yield api_prose.MESSAGES.format(
        roles=", ".join(f"`{role}`" for role in message_checks.ROLES), calls=message_checks.MAX_CALLS
    )
    yield api_prose.STRUCTURED.format(
        rules=_table(("Thing", "Rule", "vLLM"), api_prose.STRUCTURED_RULES).strip(),
        depth=schema_bounds.MAX_DEPTH,
        nodes=schema_bounds.MAX_NODES,
        properties=schema_bounds.MAX_PROPERTIES,
        patterns=schema_bounds.MAX_PATTERN_PROPERTIES,
        reference=schema_bounds.MAX_REFERENCE_DEPTH,
        joined=schema_bounds.MAX_JOINED_PATTERNS,
        multiples=schema_bounds.MAX_MULTIPLES,
        text=structured.MAX_TEXT_BYTES >> 10,
        lines=structured.MAX_TEXT_LINES,
        grammar=MAX_GRAMMAR_BYTES >> 10,
    )
    yield api_prose.TOOLS
    yield "## POST /tokenize, POST /detokenize\n\n" + _token_fields()
    yield api_prose.ANSWERS
    shared = COMPLETION_REFUSED.keys() & CHAT_REFUSED.keys()
    everything = {**COMPLETION_REFUSED, **CHAT_REFUSED}
    yield "## Refused fields\n\nOn both endpoints:\n\n" + _refused(everything, shared)
    yield "On `/v1/completions`:\n\n" + _refused(everything, COMPLETION_REFUSED.keys() - shared)
    yield "On `/v1/chat/completions`:\n\n" + _refused(everything, CHAT_REFUSED.keys() - shared)
    rows2 = ((f"`{name}`", purpose) for name, purpose in WITHOUT_EFFECT.items())
    yield "## Fields without effect\n\nAccepted with any value.\n\n" + _table(("Field", "What it is for"), rows2)
    cases = "\n".join(f"- **{case}**: {text}" for case, text in CHOICES.items())
    yield f"## Choices\n\nWhere systems differ, by case of the shared list.\n\n{cases}\n"


def markdown() -> str:
    """The text of `docs/api.md`."""
    return "\n".join(_sections())


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "api.md").write_text(markdown(), encoding="utf-8")
