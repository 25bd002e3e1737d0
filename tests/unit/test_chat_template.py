"""Rendering as Hugging Face does it, and errors that a client can read."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from replica.errors import ConfigError, InvalidRequestError, ModelLoadError
from router.chat_template import ChatTemplate
from router.tokenizer import read_chat_template
from tests.unit.http_fakes import TEMPLATE

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes "}]


def test_generation_prompt_is_added_or_not() -> None:
    template = ChatTemplate(TEMPLATE)
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(MESSAGES[:1]) == text + "<|im_start|>assistant\n"
    assert template.render(MESSAGES[:1], add_generation_prompt=False) == text


def test_final_message_is_continued_with_its_last_space() -> None:
    text = ChatTemplate(TEMPLATE).render(MESSAGES, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes "


def test_final_message_that_the_template_hides_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        ChatTemplate("{{ messages[0]['content'] }}").render(MESSAGES, continue_final_message=True)


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    )
    assert ChatTemplate(source).render(MESSAGES) == "Hi\nend"


def test_generation_block_is_passed_through() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES) == "[Hi][Yes ]"


def test_tojson_escapes_no_html_and_no_unicode() -> None:
    template = ChatTemplate("{{ x | tojson }} {{ x | tojson(indent=1) }}")
    assert template.render(MESSAGES, template_kwargs={"x": ["<é>"]}) == '["<é>"] [\n "<é>"\n]'


def test_strftime_now_and_special_tokens() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ strftime_now('%d %B %Y') }}", {"bos_token": "<s>"}, now=lambda: datetime(2024, 2, 1)
    )
    assert template.render(MESSAGES) == "<s>01 February 2024"


def test_complaint_of_the_template_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ 1 + 'a' }}", "{{ messages[0].x.y }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"]
)
def test_failure_inside_the_template_is_one_plain_sentence(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert "cannot render" in str(caught.value)
    assert "Error" not in str(caught.value)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_template_kwargs_cannot_replace_what_has_a_field(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        ChatTemplate(TEMPLATE).render(MESSAGES, template_kwargs={name: []})


def test_broken_source_is_told_at_load() -> None:
    with pytest.raises(ModelLoadError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


def test_override_is_a_path_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("from a file {{ messages }}")
    assert read_chat_template(str(path)) == "from a file {{ messages }}"
    assert read_chat_template("{{ x }}") == "{{ x }}"
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        read_chat_template("nowhere.jinja")


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "description": "<é>"}}]])
@pytest.mark.parametrize("continued", [False, True])
def test_equals_hugging_face(continued: bool, tools: list[dict[str, Any]] | None) -> None:
    """transformers is there in the development environment; the router itself never imports it."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{- bos_token }}\n{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}\n"
        "{%- for message in messages %}\n    {%- if message.role == 'user' %}\n"
        "  {{- '<u>' + message.content | trim + '</u>\\n' }}\n    {%- else %}\n{% generation %}\n"
        "<a>{{ message.content }}</a>\n{% endgeneration %}\n    {%- endif %}\n{%- endfor %}\n{{ 'x<y' | tojson }}\n"
        "{%- if add_generation_prompt %}<a>{% endif %}"
    )
    messages = [{"role": "user", "content": " Hi  there "}, {"role": "assistant", "content": "Well, é"}]
    rendered, _ = utilities.render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        bos_token="<s>",
    )
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, not continued, continued, tools=tools)
    assert ours == rendered[0]
