"""ASYNC. Chat messages to prompt text, by the model's own Jinja template, with the same surroundings as Hugging Face
gives it.

Same: immutable sandbox, `trim_blocks`, `lstrip_blocks`, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, the `generation` block (which only marks text and is passed through). Different, on
purpose: with `continue_final_message` the text is cut where a marker behind the last message comes out, so spaces at
its end stay and a repeated sentence cannot be mistaken for the last one. Compiled once; no asyncio inside, safe to
call from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from replica.errors import InvalidRequestError, ModelLoadError
from router.tool_plan import facts_of

#: Names the template gets from us: a client may not set them through `chat_template_kwargs`.
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
#: Comes out behind the last message when it is to be continued. Private-use characters: no template strips or edits
#: them.
_END_MARKER = "\ue0a5end-of-final-message\ue0a6"


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RaisedByTemplate(jinja2.TemplateError):
    """The template's own complaint: a sentence for the client."""


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template. Raises `ModelLoadError` when the source is no valid template.

    `added_tokens`: text of each added token of the vocabulary -> whether it is special.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        added_tokens: Mapping[str, bool] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be compiled: {error}.") from error
        #: what the template and the vocabulary know of tools and thoughts
        self.facts = msgspec.structs.replace(facts_of(source, added_tokens), takes_system=self._takes_system())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Prompt text for `messages` (each with `role` and a string `content`). `tools` is the template's variable of
        that name, which it may not know: `tool_plan.plan_tools` decides.

        Raises `InvalidRequestError` when the template refuses or cannot render them.
        """
        kwargs = dict(template_kwargs or {})
        reserved = RESERVED_NAMES.intersection(kwargs)
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {min(reserved)!r}: use the request field of that name.",
                "chat_template_kwargs",
            )
        given = list(messages)
        if continue_final_message:
            last = dict(given[-1])
            last["content"] = last["content"] + _END_MARKER
            given[-1] = last
        text = self._render(given, add_generation_prompt and not continue_final_message, kwargs, tools)
        if not continue_final_message:
            return text
        cut = text.rfind(_END_MARKER)
        if cut < 0:
            raise InvalidRequestError(
                "continue_final_message: the chat template does not show the last message's text, so it cannot go on.",
                "continue_final_message",
            )
        return text[:cut]

    def _takes_system(self) -> bool:
        """Whether a system message comes out. Found by trying: templates refuse it or leave it out in many ways."""
        mark = "probe"
        messages = [{"role": "system", "content": mark}, {"role": "user", "content": "x"}]
        try:
            return mark in self._render(messages, True, {}, None)
        except InvalidRequestError:
            return False

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        names = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except _RaisedByTemplate as error:
            raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error
        except (
            Exception
        ) as error:  # a template is a program: it may raise anything, and only the messages differ from call to call
            raise InvalidRequestError(
                "The chat template of this model cannot render these messages: it may not allow one of their roles, "
                "their order, or a value in chat_template_kwargs.",
                "messages",
            ) from error
