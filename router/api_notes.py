"""PURE. What `docs/api.md` says of each field beside its type: what it does, and how vLLM 0.32 and OpenAI treat it.

A test holds the names against the models: no field without a note, no note without a field.
"""

from __future__ import annotations

from typing import NamedTuple

SAME = "same"
NONE = "not there"


class Note(NamedTuple):
    """`vllm` and `openai`: "same", "not there", or what differs there."""

    meaning: str
    vllm: str = SAME
    openai: str = SAME


#: fields of both endpoints that generate, then those of one
NOTES: dict[str, Note] = {
    "model": Note("an unknown name is 404", SAME, "must be given"),
    "prompt": Note("several prompts give several choices: index = prompt x `n` + sample", SAME, SAME),
    "messages": Note(
        "see [Messages](#messages)", "images and audio too, for models that read them", "images and audio too"
    ),
    "max_tokens": Note(
        "default: chat, what the context has left; completion, 16. More than the context has left is clipped, more "
        "than the "
        "whole context is 400. 0 only with `echo` in a completion",
        SAME,
        "400 instead of clipping",
    ),
    "max_completion_tokens": Note("wins over `max_tokens`"),
    "min_tokens": Note(
        "before that many no eos, stop token or stop string ends the answer, unless nothing else is allowed", SAME, NONE
    ),
    "temperature": Note(
        "default: the model's, else 1. Below 0.00001 greedy, from there to 0.01 taken as 0.01",
        SAME,
        "default 1",
    ),
    "top_p": Note("default: the model's, else 1"),
    "top_k": Note("default: the model's, else off", SAME, NONE),
    "min_p": Note("default: the model's, else 0, which is off", SAME, NONE),
    "presence_penalty": Note("over the output"),
    "frequency_penalty": Note("over the output"),
    "repetition_penalty": Note("over prompt and output; default: the model's, else 1", "any number above 0", NONE),
    "logit_bias": Note(
        "keys are token ids; -100 is as good as never. An id out of vocabulary is 400",
        "values outside are clipped, no limit on their number",
        SAME,
    ),
    "bad_words": Note(
        "never written, neither behind a space nor without one; by tokens, so another way to spell a word may come out",
        "no limit on length",
        NONE,
    ),
    "allowed_token_ids": Note("no other token is written; eos only if it is among them", SAME, NONE),
    "seed": Note(
        "same seed, same request, same answer, on any replica and after a replica was lost; sample i of `n` uses a "
        "mix of seed and i",
        "same answer only under equal load",
        "best effort",
    ),
    "n": Note("also with temperature 0 (equal choices); at most 128", "400 with temperature 0", SAME),
    "stop": Note("the text ends before it, wherever token borders lie"),
    "stop_token_ids": Note("", "no limit on their number", NONE),
    "include_stop_str_in_output": Note("also for stop tokens", SAME, NONE),
    "ignore_eos": Note("", SAME, NONE),
    "skip_special_tokens": Note(
        "false shows them in the text; where tool calls or thoughts are looked for, their own markers do not come out",
        SAME,
        NONE,
    ),
    "logprobs": Note(
        "how many alternatives beside the chosen token; true and false are refused. By the model's own distribution, "
        "before temperature, penalties and masks",
        SAME,
        "at most 5",
    ),
    "top_logprobs": Note("needs `logprobs` true", SAME, SAME),
    "prompt_logprobs": Note(
        "not with `stream`; the prefix cache is not read then", "-1 for all of the vocabulary", NONE
    ),
    "echo": Note(
        "completion: the answer begins with the prompt, and its logprobs are told too. Chat: it begins with the "
        "last message "
        "if that is an assistant's",
        SAME,
        "chat: not there",
    ),
    "return_token_ids": Note("`token_ids` and `prompt_token_ids` in the answer", SAME, NONE),
    "return_tokens_as_token_ids": Note("tokens in logprobs are named `token_id:17`", SAME, NONE),
    "truncate_prompt_tokens": Note(
        "keeps the end of a prompt. -1: what fits the context beside `max_tokens` (chat: beside one token)",
        "-1 keeps as many tokens as the context has",
        NONE,
    ),
    "truncation_side": Note("", "'right' too", NONE),
    "response_format": Note("see [Structured output](#structured-output)", "structural tags too", "chat only"),
    "structured_outputs": Note("see [Structured output](#structured-output)", "structural tags too", NONE),
    "stream": Note("server-sent events"),
    "stream_options": Note(
        "`include_usage`: a last chunk without choices that has `usage`. `continuous_usage_stats` beside it: usage "
        "in every "
        "chunk. Without `stream` 400",
        SAME,
        "no `continuous_usage_stats`; obfuscation instead",
    ),
    "kv_transfer_params": Note(
        "for a proxy that has one request compute a prompt and another one decode: with `do_remote_decode` the KV is "
        "kept where the server has tiers, and the answer has `kv_transfer_params` for the other. Blocks are found by "
        "the prompt, so `remote_*` decides nothing, and other keys are passed over. Not with `stream`",
        "fetches from the address that it names",
        NONE,
    ),
    "cache_salt": Note("prefixes are shared only between equal salts", SAME, NONE),
    "priority": Note("lower is earlier; 0 unless the server orders by priority", "ignored when it does not", NONE),
    "deadline_ms": Note(
        "milliseconds from arrival in which the answer must have begun, else 504; the header `X-Request-Deadline-Ms` "
        "says the same, and the earlier one counts",
        NONE,
        NONE,
    ),
    "request_id": Note(
        "accepted and without effect: the id of the answer is ours, and `X-Request-Id` is the way to trace",
        "becomes the id of the answer",
        NONE,
    ),
    "add_special_tokens": Note("whether the tokenizer adds what begins a text, as bos", SAME, NONE),
    "tools": Note("see [Tools](#tools)", "an empty list is 400", "an empty list is 400"),
    "tool_choice": Note("default auto when there are tools"),
    "parallel_tool_calls": Note("false: at most one call"),
    "reasoning_effort": Note(
        "'none' sets `enable_thinking` false for the template; other levels are 400",
        "handed to the template",
        "more levels",
    ),
    "add_generation_prompt": Note("", SAME, NONE),
    "continue_final_message": Note(
        "the answer goes on with the last message; it then needs no `add_generation_prompt: false` beside it",
        "400 unless add_generation_prompt is false",
        NONE,
    ),
    "chat_template_kwargs": Note("variables for the chat template; not `messages`, `tools`, `documents`", SAME, NONE),
}

#: where a chat differs
CHAT_NOTES: dict[str, Note] = {
    "logprobs": Note("by the model's own distribution, before temperature, penalties and masks"),
    "add_special_tokens": Note("false, since chat templates write what begins a text", SAME, NONE),
}

#: fields of /tokenize and /detokenize that mean something else there, or are there alone
TOKEN_NOTES: dict[str, Note] = {
    "prompt": Note("this or `messages`"),
    "messages": Note("this or `prompt`; counted as a chat would be, tools included"),
    "add_special_tokens": Note("default: true for a prompt, false for messages"),
    "return_token_strs": Note("the tokens as the vocabulary writes them"),
    "tokens": Note(""),
    "tool_choice": Note("", NONE),
}

#: case -> choice made where `cases/A_api.yaml` leaves one, or where systems differ
CHOICES: dict[str, str] = {
    "A-03": "At most 4 stop strings, OpenAI's limit; a fifth is 400. Empty strings are 400, `[]` is none.",
    "A-04": "`stream_options` without `stream` is 400, as OpenAI does. Without `include_usage` no chunk has `usage`.",
    "A-07": "`top_logprobs` above 0 needs `logprobs` true. `top_logprobs` of a token holds exactly as many as were "
    "asked for.",
    "A-09": "`max_tokens` 0 needs `echo`, else 400. With `logprobs` beside it the prompt is scored and `usage` "
    "counts 0 output tokens.",
    "A-13": "A completion without `max_tokens` has 16 tokens, OpenAI's default; a chat what the context has left.",
    "A-21": 'Text parts of a message are joined with "", nothing between them. Other parts are 400 and named.',
    "A-22": "An assistant's null or missing content is an empty text. An answer without calls has no key `tool_calls`.",
    "A-24": "`tools: []` is the same as none; with a `tool_choice` other than none it is 400. A model whose "
    "template knows no "
    "tools gets them as a system text, and its calls are read in the Hermes format: never ignored.",
    "A-25": "A schema that cannot be followed in full is 400 with the keyword named.",
    "A-36": "An unknown field is 400 with the nearest known name, on all endpoints. An explicit null is an absent "
    "field.",
    "A-39": 'An empty prompt ("", [], [[]]) is 400: on tokenizers without bos it has no tokens.',
}

ENDPOINTS: tuple[tuple[str, str, str], ...] = (
    ("POST /v1/completions", "a completion", SAME),
    ("POST /v1/chat/completions", "a chat", SAME),
    ("GET /v1/models", "names that are served; 503 while no replica is up", "without `permission`"),
    ("GET /v1/models/{name}", "one of them, 404, or 503 while no replica is up", NONE),
    ("POST /tokenize", "text or messages to token ids", SAME),
    ("POST /detokenize", "token ids to text", SAME),
    ("GET /health", "200, or 503 when no replica is up; says how many are, and what the others do", "empty body"),
    ("GET, POST /ping", "the same", SAME),
    ("GET /version", "", SAME),
    ("GET /load", "requests in this router", "only when switched on"),
    ("GET /metrics", "[docs/metrics.md](metrics.md)", "fewer of the cluster"),
    ("GET /status", "what this router knows of its replicas", NONE),
    ("POST /reset_prefix_cache", "[docs/http.md](http.md); only when switched on", "in development mode"),
    ("GET /debug/requests", "[docs/why.md](why.md); only when switched on", NONE),
    ("GET /debug/requests/{request_id}", "the same", NONE),
    ("GET /openapi.json", "what is accepted here, by the limits of this server", SAME),
)
