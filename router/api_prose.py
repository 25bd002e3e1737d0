"""PURE. Paragraphs and small tables of `docs/api.md` that no model knows. Names in braces are filled in by
`api_reference.py`.
"""

from __future__ import annotations

from router.structured import MAX_CHOICES

INTRO = """# The API, field by field

Written by `python -m router.api_reference` from the models that check requests: edit those. `GET /openapi.json` says
the same to programs, with the limits of the server that is asked. Headers, limits of bodies and error codes are in
[http.md](http.md).

"vLLM" is 0.32, "OpenAI" its API of late 2026. *Same* means the same values and the same meaning; *not there* that the
field is refused or ignored there. vLLM ignores fields it does not know; here they are 400 with the nearest name.
"""

MESSAGES = """## Messages

A message is an object with `role` ({roles}) and `content`: a string, or a list of parts `{{"type": "text", "text":
...}}`, which are joined with nothing between. `developer` is the system role. Content may be missing or null in an
assistant's message alone. `name`, `reasoning` and `reasoning_content` are handed to the chat template. An assistant's
`tool_calls` (at most {calls}) have `function.name` and `function.arguments`, the text of a JSON object or an object;
the template gets an object. A message of role `tool` has `content` and usually `tool_call_id`. `refusal`,
`annotations`, `audio` and `function_call`, which answers carry and clients send back, may be there when they are null
or empty; `parsed` and `provider_specific_fields`, which client libraries add, whatever they are. Anything else is 400
with its place, like `messages[2].content[0]`.
"""

STRUCTURED = """## Structured output

`response_format`: `{{"type": "text"}}`, `{{"type": "json_object"}}`, or `{{"type": "json_schema", "json_schema":
{{"name": ..., "schema": ...}}}}`. `structured_outputs`, on both endpoints: exactly one of `json` (a schema, or its
text), `json_object`, `regex`, `choice`, `grammar`. Both are llguidance grammars in the end: the output follows them
token by token, and the request is compiled and checked before it is placed, so a bad one is 400.

{rules}

Limits: a schema of {depth} levels, {nodes} parts (with references and `allOf` written out), {properties} properties
in one object, {patterns} `patternProperties`, references that lead {reference} levels deep, {joined} patterns on one
property where schemas are joined, `multipleOf` with integers whose sum is {multiples} (0.25 counts 25); `regex` and
`grammar` of {text} KiB, `grammar` of {lines} lines; {grammar} KiB of grammar in all; and llguidance's own, in work
and not in seconds (`GRAMMAR_LIMITS`). Near all of them a request costs about a second of one thread. An output that
reaches `max_tokens` first is cut and says `length`.
"""

TOOLS = """## Tools

`tools`: at most 128 functions `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.
`tool_choice`: `none` (the model does not see them), `auto`, `required`, or `{"type": "function", "function": {"name":
...}}`. With `required` or a name the answer is held to calls whose arguments follow the schema of `parameters`; with
`auto` only tools that are `strict` are. `parallel_tool_calls: false` allows one call. Calls are read in the model's
own format (Hermes and Qwen, Llama 3); a model whose template knows no tools gets them as a system text and answers in
the Hermes format.

The answer has `message.tool_calls`, `content` null when there is no text, and `finish_reason` `tool_calls` (`stop`
after a named choice, as OpenAI says it). In a stream a call's `id` and `name` come first, then pieces of `arguments`.
`functions` and `function_call`, OpenAI's older form, are 400.

A model that thinks (`<think>...</think>`) has its thoughts in `message.reasoning`, and their tokens in
`usage.completion_tokens_details.reasoning_tokens`.
"""

ANSWERS = """## Answers

As vLLM's: `id` (`cmpl-...`, `chatcmpl-...`), `object`, `created`, `model`, `choices`, `usage`. `finish_reason` is
`stop`, `length` or `tool_calls`; `stop_reason` is the stop string or stop token id, null otherwise.
`usage.prompt_tokens_details.cached_tokens` is always there; of several prompts it is the sum (vLLM: of one of them).

Streams: each event is `data: <JSON>`, the last is `data: [DONE]`. A chat begins with one chunk for each choice that
has `delta.role`; the chunk with `finish_reason` may carry the last text. An error after the first token is a last
event `data: {"error": ...}` without `[DONE]` behind it, so that no client takes a part for the whole (vLLM adds
`[DONE]`). A chunk holds the text of one token, or of more: half a character and what may become a stop string wait,
and to a reader who is slow several steps go as one. Joined, the chunks are the whole answer, logprobs and ids included;
only a tool call that breaks in the middle was already begun in a stream, and is text in a whole answer.

Logprobs have one entry for each of `completion_tokens`, the eos or stop token that ended the answer included (OpenAI:
not), and none for tokens behind a stop string. A completion's `top_logprobs` hold the tokens asked for and the chosen
one, by text: of two tokens with one text the likelier is told. A chat's are exactly as many as asked for. A part of a
character has U+FFFD as its text and true `bytes`. Minus infinity is -9999.0. With `echo` the prompt's tokens come
first, the first of them null; `text_offset` is the place in `text`. `prompt_logprobs` are in each choice of a
completion, and at the top of a chat's answer, in vLLM's form. With `max_tokens` 0 nothing of the output is told.
"""

#: thing, rule, vLLM
STRUCTURED_RULES: tuple[tuple[str, str, str], ...] = (
    (
        "a schema",
        (
            "followed, `strict` or not; numbers beyond 2^53 and keywords that cannot be followed (`not`, `if`, "
            "`uniqueItems`, `propertyNames`, `minProperties` above what is required, ...) are 400; an unknown `format` "
            "is an annotation"
        ),
        "ignores some",
    ),
    (
        "additional properties",
        (
            "an object that lists `properties` allows no others unless it has `additionalProperties` (the answer fits "
            "the schema either way, and a model finds no end of an open object); not where `allOf` occurs, nor beside "
            "`anyOf`, `oneOf` or `$ref`. `disable_additional_properties` changes nothing"
        ),
        "the same, by its default backend",
    ),
    (
        "`oneOf`",
        (
            "branches must exclude each other visibly (a `const` or `enum` of a required property, or types), "
            "else 400: use `anyOf`"
        ),
        "taken as `anyOf`",
    ),
    (
        "white space",
        (
            '`", "` and `": "` and no other, as `json.dumps` writes; `disable_any_whitespace` changes nothing. '
            "Free white space costs up to a third more tokens, and now and then an answer of nothing else"
        ),
        "any, unless disabled",
    ),
    (
        "`$ref`",
        "into the schema itself, `#/...`; recursion is fine",
        "same",
    ),
    (
        "`regex`",
        "the whole output; Rust's syntax without look-around and back-references; `\\d` and `\\w` are ASCII",
        "same",
    ),
    (
        "`choice`",
        f"1 to {MAX_CHOICES} strings, taken literally",
        "same",
    ),
    (
        "`grammar`",
        "Lark with a rule `start`, or GBNF with a rule `root`; no `%json`, `%regex`, `%llguidance`",
        "EBNF (GBNF)",
    ),
    (
        "`structural_tag`, `whitespace_pattern`",
        "400",
        "accepted",
    ),
)
