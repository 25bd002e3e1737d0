"""PURE. Structured output: `response_format` and `structured_outputs` to a grammar in llguidance's notation, checked.

Choices made here. JSON is written as `json.dumps` writes it, ", " and ": " and no other white space. Measured with the
default model, 64 outputs of small schemas each way: with free white space a three-field object takes 28 to 31 tokens
instead of 22 in a chat, and one output was white space up to its limit; without any, lists stay empty (`[]`) nearly
always. A schema is followed as given, with or without `strict`; a keyword that cannot be followed (`not`, `if`,
`uniqueItems`, ...) is refused, never ignored, and so is `oneOf` whose branches may hold at once. A regex describes the
whole output. Everything is bounded: text by `MAX_GRAMMAR_BYTES`, schemas by `schema_bounds.py`, compilation by
`GRAMMAR_LIMITS`. The check builds the matcher once, over single bytes instead of a vocabulary, so that what nothing can
satisfy is refused too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from replica.errors import InvalidRequestError
from replica.messages import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES
from router.schema_bounds import check_schema, closed
from router.sentences import WrongValueError, short

MAX_CHOICES = 1024
MAX_REGEX_BYTES = 16 << 10
#: of a grammar that a client wrote: work of llguidance and of the conversion from GBNF grows with the square
MAX_TEXT_BYTES = 16 << 10
MAX_TEXT_LINES = 512
#: how JSON is written under a grammar
JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: of llguidance's reason for a refusal
MAX_REASON_CHARS = 200

Kind = Literal["schema", "regex", "choice", "grammar"]
RESPONSE_FORMAT = "response_format"
STRUCTURED_OUTPUTS = "structured_outputs"
_FORMATS = "'text', 'json_object', 'json_schema'"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED_PARTS = {
    "structural_tag": "structural tags are not supported; use tools, or a grammar",
    "whitespace_pattern": 'white space is always ", " and ": "',
}


class Constraint(msgspec.Struct, frozen=True):
    """What the output must look like. `value` is a schema, a regex, a tuple of choices or the text of a grammar."""

    kind: Kind
    value: Any
    #: the request field it came from
    param: str


def check_response_format(value: object) -> Constraint | None:
    """`response_format`; None for text. Raises `WrongValueError`."""
    if not isinstance(value, dict):
        raise WrongValueError(f"response_format is {short(value)}; allowed: an object with type {_FORMATS}.")
    kind = value.get("type")
    extra = set(value) - {"type", "json_schema"}
    if kind == "structural_tag" or "structural_tag" in extra:
        raise WrongValueError("response_format has structural tags, which are not supported; use tools, or a grammar.")
    if kind not in ("text", "json_object", "json_schema"):
        raise WrongValueError(f"response_format.type is {short(kind)}; allowed: {_FORMATS}.")
    if extra:
        raise WrongValueError(
            f"response_format has an unknown field {short(min(extra))}; allowed: type and json_schema."
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("schema", {"type": "object"}, RESPONSE_FORMAT)
    return Constraint("schema", _named_schema(value.get("json_schema")), RESPONSE_FORMAT)


def _named_schema(given: object) -> dict[str, Any]:
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise WrongValueError(f"{where} is {short(given)}; allowed: an object with name and schema.")
    for key, item in given.items():
        if key not in ("name", "schema", "strict", "description"):
            raise WrongValueError(
                f"{where} has an unknown field {short(key)}; allowed: name, schema, strict, description."
            )
        kind = bool if key == "strict" else str
        if key != "schema" and item is not None and not isinstance(item, kind):
            raise WrongValueError(
                f"{where}.{key} is {short(item)}; allowed: {'true or false' if kind is bool else 'a string'}."
            )
    return _checked_schema(given.get("schema"), f"{where}.schema")


def _checked_schema(schema: object, where: str) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise WrongValueError(f"{where} is {short(schema)}; allowed: a JSON Schema object.")
    check_schema(schema, where)
    return schema


def check_structured_outputs(value: object) -> Constraint | None:
    """`structured_outputs`, vLLM's field; None when it asks for nothing. Raises `WrongValueError`."""
    if not isinstance(value, dict):
        raise WrongValueError(
            f"structured_outputs is {short(value)}; allowed: an object with one of {', '.join(_KINDS)}."
        )
    given = {key: item for key, item in value.items() if item is not None}
    for key, reason in _REFUSED_PARTS.items():
        if key in given:
            raise WrongValueError(f"structured_outputs.{key} is {short(given[key])}: {reason}.")
    flags = ("disable_any_whitespace", "disable_additional_properties")
    for key, item in value.items():
        if key not in _KINDS and key not in flags and key not in _REFUSED_PARTS:
            raise WrongValueError(
                f"structured_outputs has an unknown field {short(key)}; allowed: {', '.join((*_KINDS, *flags))}."
            )
        if (key in flags or key == "json_object") and not isinstance(item, (bool, type(None))):
            raise WrongValueError(f"structured_outputs.{key} is {short(item)}; allowed: true or false.")
    kinds = [key for key in _KINDS if key in given and not (key == "json_object" and given[key] is False)]
    if len(kinds) > 1:
        raise WrongValueError(f"structured_outputs has {' and '.join(kinds)}; allowed: one of them.")
    if not kinds:
        return None
    return _PARTS[kinds[0]](given[kinds[0]])


def _json_part(value: object) -> Constraint:
    where = "structured_outputs.json"
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WrongValueError(
                f"{where} is text that is no JSON; allowed: a JSON Schema, or the text of one."
            ) from error
    return Constraint("schema", _checked_schema(value, where), STRUCTURED_OUTPUTS)


def _json_object_part(value: object) -> Constraint:
    return Constraint("schema", {"type": "object"}, STRUCTURED_OUTPUTS)


def _text_part(kind: Literal["regex", "grammar"], max_bytes: int, value: object) -> Constraint:
    if not isinstance(value, str) or not value.strip():
        raise WrongValueError(f"structured_outputs.{kind} is {short(value)}; allowed: a string that is not empty.")
    if len(value.encode()) > max_bytes:
        raise WrongValueError(
            f"structured_outputs.{kind} has {len(value.encode())} bytes; allowed: at most {max_bytes}."
        )
    if value.count("\n") >= MAX_TEXT_LINES:
        raise WrongValueError(
            f"structured_outputs.{kind} has {value.count(chr(10)) + 1} lines; allowed: at most {MAX_TEXT_LINES}."
        )
    return Constraint(kind, value, STRUCTURED_OUTPUTS)


def _choice_part(value: object) -> Constraint:
    where = "structured_outputs.choice"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise WrongValueError(f"{where} is {short(value)}; allowed: a list of 1 to {MAX_CHOICES} strings.")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise WrongValueError(f"{where} contains {short(choice)}; allowed: strings of at least one character.")
    return Constraint("choice", tuple(dict.fromkeys(value)), STRUCTURED_OUTPUTS)


#: bytes of output that a check writes
_STEPS_TRIED = 8
#: why a grammar cannot be used, or ""
ReasonAgainst = Callable[[str], str]

_PARTS: dict[str, Callable[[object], Constraint]] = {
    "json": _json_part,
    "json_object": _json_object_part,
    "regex": functools.partial(_text_part, "regex", MAX_REGEX_BYTES),
    "grammar": functools.partial(_text_part, "grammar", MAX_TEXT_BYTES),
    "choice": _choice_part,
}


def grammar_of(constraint: Constraint, against: ReasonAgainst) -> str:
    """The constraint as llguidance's JSON, `{"grammars": [one]}`, checked. Takes up to a second for what is near the
    limits. Raises `InvalidRequestError`.
    """
    if constraint.kind == "schema":
        schema = {key: value for key, value in closed(constraint.value).items() if key != "x-guidance"}
        part: dict[str, Any] = {"json_schema": {**schema, "x-guidance": JSON_STYLE}}
    elif constraint.kind == "regex":
        part = {"lark_grammar": _lark_of_regex(constraint.value)}
    elif constraint.kind == "choice":
        part = {"lark_grammar": "start: " + " | ".join(map(_lark_string, constraint.value))}
    else:
        part = {"lark_grammar": _lark_of_text(constraint.value)}
    try:
        text = json.dumps({"grammars": [{"name": constraint.kind, **part}]}, ensure_ascii=False)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits
        raise InvalidRequestError(
            f"{constraint.param} holds a value that cannot be written.", constraint.param
        ) from error
    check_grammar(text, constraint.param, against)
    return text


def _lark_string(text: str) -> str:
    """A literal in Lark: JSON's escapes, and DEL escaped as well, which llguidance does not read as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark_of_regex(regex: str) -> str:
    import llguidance  # imports in 40 ms, which a router without structured output need not pay

    # \d and \w are ASCII, as in JSON Schema's regexes and in xgrammar
    return f"start: /{llguidance.regex_to_lark(regex, use_ascii='dw')}/"


def _lark_of_text(text: str) -> str:
    """A client's grammar as Lark: as it is when it has a `start` rule, else converted from GBNF (vLLM's and llama.cpp's
    `root ::= ...`).

    llguidance's directives that bring in JSON schemas and settings would go round the limits: refused.
    """
    import llguidance.gbnf_to_lark

    try:
        lark: str = llguidance.gbnf_to_lark.any_to_lark(_tidied(text))
    except (
        Exception,
        RecursionError,
    ) as error:  # the converter raises a bare Exception, and IndexError at an early end
        reason = _one_line(str(error)) if isinstance(error, llguidance.gbnf_to_lark.GbnfToLarkError) else ""
        raise InvalidRequestError(
            "structured_outputs.grammar is neither a Lark grammar with a rule `start: ...` nor a GBNF grammar with a "
            f"rule `root ::= ...`{': ' * bool(reason)}{reason}.",
            STRUCTURED_OUTPUTS,
        ) from error
    for directive in ("%json", "%regex", "%lark"):
        if directive in text:
            raise InvalidRequestError(
                f"structured_outputs.grammar has {directive}; allowed: rules, terminals and %import. "
                "For JSON use structured_outputs.json.",
                STRUCTURED_OUTPUTS,
            )
    if "%llguidance" in text:
        raise InvalidRequestError(
            "structured_outputs.grammar has %llguidance; allowed: rules, terminals and %import.", STRUCTURED_OUTPUTS
        )
    return lark


def _tidied(text: str) -> str:
    """What the converter does not read, in a form that it does: Lark's `?rule`, and in GBNF `\\u` and `\\U`, `\\-` in a
    class, and an alternative that begins a line.
    """
    if "::=" not in text:
        return re.sub(r"^\?(?=\w+ *:)", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n\s*\|", " |", text)
    text = re.sub(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})", _plain_escape, text)
    return text.replace("\\-", "\\x2D")


def _plain_escape(match: re.Match[str]) -> str:
    number = int(match[1] or match[2], 16)
    if number < 0x80:
        return f"\\x{number:02X}"
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else match[0]


@functools.cache
def _bytes_tokenizer() -> Any:
    """A vocabulary of the 256 bytes and an end: the cheapest one (1 ms, 2 MB) that a matcher can be built over."""
    import llguidance

    class Wrapped:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
        special_token_ids = (256,)

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text if isinstance(text, bytes) else text.encode())

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))


@functools.cache
def _limits() -> Any:
    import llguidance

    limits: dict[str, Any] = dict(GRAMMAR_LIMITS)
    return llguidance.LLParserLimits(**limits, verbose_errors=False)


def check_grammar(grammar: str, param: str, reason_against: ReasonAgainst) -> None:
    """Raises `InvalidRequestError` when `grammar` is too long, or when there is a reason against it."""
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{param} makes a grammar of {num_bytes} bytes; allowed: at most {MAX_GRAMMAR_BYTES}.", param
        )
    if reason := reason_against(grammar):
        raise InvalidRequestError(f"{param} cannot be used: {reason}.", param)


def reason_against(grammar: str) -> str:
    """llguidance's reason in one line when `grammar` is wrong, too much work, or satisfied by nothing; else "". A
    grammar that names tokens of the model is checked without building it. Not bounded in all cases: see
    `grammar_worker.py`.
    """
    import llguidance

    matcher = llguidance.LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=_limits())
    reason = matcher.get_error()
    if not reason:
        reason = _reason_on_the_way(matcher)
    elif "special token" in reason or "Token range" in reason:
        reason = llguidance.LLMatcher.validate_grammar(grammar, limits=_limits())
    return _reason(reason) if reason else ""


def _reason_on_the_way(matcher: Any) -> str:
    """What the first steps of an output run into: some limits show only there."""
    mask = matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtension"):
        return "nothing can satisfy it"
    for _ in range(_STEPS_TRIED):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(mask, "little")
        matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the lowest byte that may come
        mask = matcher.compute_bitmask()
    return str(matcher.get_error())


def _reason(text: str) -> str:
    """llguidance's reason in our words where it names its own options, else its first line."""
    if "coerce_one_of" in text:
        return "the branches of oneOf may hold at once; use anyOf"
    if text.startswith(("panic", "<backtrace")):
        return "it is too large"
    return _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text.partition("<state>")[0].partition("<backtrace")[0].split())
    return line[:MAX_REASON_CHARS].rstrip(" .") + ("..." if len(line) > MAX_REASON_CHARS else "")
