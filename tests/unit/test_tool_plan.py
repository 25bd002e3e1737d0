"""How tools reach the prompt, with a template that knows them and with one that does not, and where thoughts begin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.chat_template import ChatTemplate
from router.message_parts import ReplyPlan
from router.tokenizer import Tokenizer
from router.tool_plan import TemplateFacts, ToolRequest, facts_of, parse_tools, plan_tools, reply_for_prompt
from tests.unit.grammar_walk import byte_tokenizer

#: like the default model's: every role with its text, and a system message of its own
PLAIN = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>default</s>{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{ "as {\\"name\\": <a>, \\"arguments\\": <b>} in <tool_call></tool_call>" }}{% endif %}' + PLAIN
)
LLAMA = '{% if tools is not none %}{{ \'{"name": f, "parameters": {}}\' }}{% endif %}' + PLAIN
PYTHON_TAG = "{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}<|python_tag|>" + PLAIN
OTHERS = {
    "none": PLAIN,
    "talks of tools": 'You have tools: <tool_call> "arguments" {{ messages[0].content }}',
    "tags": "{% for tool in tools %}<tool_call><function={{ tool.name }}>{% endfor %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]{% endif %}",
    "command r": '{% for t in tools %}{"tool_name": "x", "name": 1, "parameters": {}}{% endfor %}',
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in Zürich",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "tool", "content": "rain", "tool_call_id": "2"},
    {"role": "assistant", "content": "So so.", "tool_calls": [CALL]},
    {"role": "tool", "content": "fog", "tool_call_id": "3"},
]
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
REQUEST = parse_tools([WEATHER], None, None)


def chosen(choice: str) -> ToolRequest | None:
    return parse_tools([WEATHER], choice, None)


def test_facts_from_templates() -> None:
    assert facts_of(HERMES).tool_format == "hermes"
    assert facts_of(LLAMA).tool_format == "llama3_json"
    assert facts_of(PYTHON_TAG).tool_format == "llama3_json"
    assert {name: facts_of(source).tool_format for name, source in OTHERS.items()} == dict.fromkeys(OTHERS)
    assert not facts_of(PLAIN).thinks
    assert facts_of("{{ x.split('</think>') }}").thinks


def test_facts_from_the_vocabulary() -> None:
    facts = facts_of(PLAIN, {"<think>": False, "</think>": False, "<tool_call>": True, "<|im_end|>": True})
    assert facts.thinks
    assert facts.added_markers == {"<think>", "</think>", "<tool_call>"}
    assert facts.special_markers == {"<tool_call>"}
    assert not facts_of(PLAIN, {"<think>": False}).thinks


def test_a_model_folder_tells_both(tmp_path: Path) -> None:
    byte_tokenizer(("<think>", "</think>", "<|python_tag|>")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    template = Tokenizer.from_folder(tmp_path).chat_template
    assert template is not None
    assert template.facts.tool_format == "hermes"
    assert template.facts.thinks
    assert template.facts.added_markers == {"<think>", "</think>", "<|python_tag|>"}
    assert not template.facts.special_markers


@pytest.mark.parametrize(
    ("source", "takes_system"),
    [
        (PLAIN, True),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", False),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", False),
        ("{{ messages[-1].x.y }}", False),
    ],
)
def test_whether_a_template_takes_a_system_message_is_tried(source: str, takes_system: bool) -> None:
    assert ChatTemplate(source).facts.takes_system is takes_system


def test_a_template_that_knows_tools_gets_them_and_the_messages_as_they_are() -> None:
    template = ChatTemplate(HERMES)
    plan = plan_tools(REQUEST, template.facts, TALK)
    assert plan.messages == TALK
    assert plan.template_tools == [WEATHER]
    assert plan.reply == ReplyPlan("hermes", ("get_weather",))
    text = template.render(plan.messages, tools=plan.template_tools)
    assert text.startswith(json.dumps(WEATHER, ensure_ascii=False))
    assert template.render(plan.messages, tools=None).startswith("<s>default</s>")


def test_a_template_without_tools_gets_a_text_that_shows_them() -> None:
    plan = plan_tools(REQUEST, ChatTemplate(PLAIN).facts, TALK[:1])
    assert plan.template_tools is None
    assert plan.reply.tool_format == "hermes"
    assert [message["role"] for message in plan.messages] == ["system", "user"]
    text = plan.messages[0]["content"]
    assert json.dumps(WEATHER["function"], ensure_ascii=False) in text.splitlines()
    assert "<tool_call>\n" in text
    assert plan.messages[1] is not TALK[0]
    assert plan.messages[1] == TALK[0]


def test_the_text_is_merged_into_a_system_message_that_is_there() -> None:
    plan = plan_tools(REQUEST, TemplateFacts(), [{"role": "system", "content": "Be kind."}, *TALK[:1]])
    assert [message["role"] for message in plan.messages] == ["system", "user"]
    assert plan.messages[0]["content"].startswith("Be kind.\n\nYou can use tools.")
    empty = plan_tools(REQUEST, TemplateFacts(), [{"role": "system", "content": ""}])
    assert empty.messages[0]["content"].startswith("You can use tools.")


def test_without_a_system_role_the_text_stands_before_the_first_user_message() -> None:
    facts = TemplateFacts(takes_system=False)
    plan = plan_tools(REQUEST, facts, [{"role": "assistant", "content": "Hi"}, *TALK[:1]])
    assert [message["role"] for message in plan.messages] == ["assistant", "user"]
    assert plan.messages[1]["content"].startswith("You can use tools.")
    assert plan.messages[1]["content"].endswith("\n\nWeather?")
    assert [message["role"] for message in plan_tools(REQUEST, facts, []).messages] == ["user"]


@pytest.mark.parametrize("request_", [None, chosen("none"), REQUEST])
def test_earlier_calls_and_results_become_text_for_a_template_without_tools(request_: ToolRequest | None) -> None:
    plan = plan_tools(request_, TemplateFacts(), TALK)
    assert plan.messages[-5:] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": f"{CALL_TEXT}\n{CALL_TEXT}"},
        {
            "role": "user",
            "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>",
        },
        {"role": "assistant", "content": f"So so.\n{CALL_TEXT}"},
        {"role": "user", "content": "<tool_response>\nfog\n</tool_response>"},
    ]
    assert TALK[1]["content"] == ""


def test_a_user_who_quotes_a_result_is_left_alone() -> None:
    talk = [{"role": "user", "content": "<tool_response>x</tool_response>"}, *TALK[2:3]]
    assert len(plan_tools(None, TemplateFacts(), talk).messages) == 2
    assert talk[0]["content"] == "<tool_response>x</tool_response>"


@pytest.mark.parametrize("facts", [TemplateFacts(), TemplateFacts("hermes"), TemplateFacts("llama3_json")])
def test_choice_none_shows_no_tools_and_looks_for_no_calls(facts: TemplateFacts) -> None:
    plan = plan_tools(chosen("none"), facts, TALK[:1], "body")
    assert (plan.messages, plan.template_tools, plan.grammar) == (TALK[:1], None, "body")
    assert plan.reply.is_plain


def test_finish_reason_and_names_of_a_named_choice() -> None:
    other = {"type": "function", "function": {"name": "now"}}
    plan = plan_tools(parse_tools([WEATHER, other], other, None), TemplateFacts("hermes"), TALK[:1])
    assert plan.reply.tool_names == ("now",)
    assert not plan.reply.says_tool_calls
    assert plan.template_tools is not None
    assert len(plan.template_tools) == 2
    assert plan_tools(chosen("required"), TemplateFacts("hermes"), TALK[:1]).reply.says_tool_calls


def test_auto_has_no_grammar_unless_something_is_to_be_held() -> None:
    assert plan_tools(REQUEST, TemplateFacts(), TALK[:1]).grammar == ""
    assert plan_tools(None, TemplateFacts(), TALK[:1], "body").grammar == "body"
    single = plan_tools(parse_tools([WEATHER], None, False), TemplateFacts(), TALK[:1]).grammar
    assert "get_weather" in single
    assert "city" not in single
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert "city" in plan_tools(parse_tools([strict], None, None), TemplateFacts(), TALK[:1]).grammar


@pytest.mark.parametrize(
    ("prompt", "continued", "begins", "splits"),
    [
        ("<assistant>\n", "", False, True),
        ("<assistant>\n<think>\n", "", True, True),
        ("<assistant>\n<think>\n\n</think>\n\n", "", False, False),
        ("<user>what is <think> for</user>\n<assistant>", "", False, True),
        ("<assistant><think>I", "<think>I", True, True),
        ("<assistant><think>a</think>b<think>I", "<think>a</think>b<think>I", True, True),
        ("<assistant><think>a</think>I", "<think>a</think>I", False, False),
        ("<assistant>I", "<think>I", False, False),
        ("<assistant>I", "I", False, False),
        ("<assistant> ", " ", False, True),
    ],
)
def test_where_the_prompt_ends_decides_about_reasoning(prompt: str, continued: str, begins: bool, splits: bool) -> None:
    reply = reply_for_prompt(ReplyPlan(splits_reasoning=True), prompt, continued)
    assert (reply.begins_in_reasoning, reply.splits_reasoning) == (begins, splits)
    assert reply_for_prompt(ReplyPlan(), prompt, continued) == ReplyPlan()


def test_a_plan_for_a_prompt_looks_at_the_message_that_is_continued() -> None:
    messages = [{"role": "assistant", "content": "<think>Well"}]
    plan = plan_tools(None, TemplateFacts(thinks=True), messages, 'start: "x"')
    assert plan.for_prompt("<assistant><think>Well", continues=True).reply.begins_in_reasoning
    assert not plan.for_prompt("<assistant><think>Well").reply.begins_in_reasoning
    assert plan_tools(None, TemplateFacts(), messages, "g").for_prompt("<think>").grammar == "g"
