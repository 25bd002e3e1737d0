"""A small tokenizer, a scripted backend and a direct ASGI driver for the tests of the HTTP edge."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from replica.errors import ShoalError
from replica.messages import FinishReason, GenerateRequest, SequenceInput, TokenLogprobs
from router.app import create_app
from router.app_settings import AppSettings
from router.backend import GenerationStream, Health, TokenEvent
from router.chat_template import ChatTemplate
from router.event_buffer import join
from router.journal import Journal
from router.tokenizer import Tokenizer

CORPUS = [
    "Count: one two three four five six seven",
    "The capital of France is Paris. The sky is blue.",
    "a b c d e f",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


#: of a model that thinks, as Qwen3's
THINKING_TEMPLATE = TEMPLATE + "{# the answer begins with <think>, and </think> ends the thought #}"


@functools.cache
def byte_level_bpe(more_special: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """About 350 tokens: three special ones (and `more_special`), the 256 bytes, some merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in (*SPECIAL, *more_special)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def small_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_level_bpe(), ChatTemplate(template))


class Gate(asyncio.Event):
    """Opened by the test; `reached` tells the test that the stream waits at it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()


class FakeStream:
    """Gives `steps` one by one. `gate` (if any) is awaited before each step, `error` raised after the last."""

    served_by = "replica-0@127.0.0.1:7001"

    def __init__(
        self,
        steps: list[list[TokenEvent]],
        error: Exception | None = None,
        gates: dict[int, Gate] | None = None,
    ) -> None:
        self._steps = steps
        self._error = error
        self._gates = gates or {}
        self.finished: list[int] = []
        self.num_aborts = 0
        self.num_given = 0

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        for position, step in enumerate(self._steps):
            if position in self._gates:
                self._gates[position].reached.set()
                await self._gates[position].wait()
            self.num_given += 1
            yield step
        if self._error is not None:
            raise self._error

    def finish(self, index: int) -> None:
        self.finished.append(index)

    def abort(self) -> None:
        self.num_aborts += 1


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """A function of the token alone. An even token is the likeliest, an odd one is beaten by `num_top` others."""
    num_tokens = small_tokenizer().num_tokens
    if token_id % 2:
        top = [(token_id + 1 + other) % num_tokens for other in range(num_top)]
        return TokenLogprobs(-9.25 - token_id, num_top + 1, top, [-0.5 * (1 + other) for other in range(num_top)])
    top = [(token_id + other) % num_tokens for other in range(num_top)]
    return TokenLogprobs(-0.25, 1, top, [-0.25 - other for other in range(num_top)])


def with_logprobs(
    sequences: list[SequenceInput],
    steps: list[list[TokenEvent]],
    tell: Callable[[int, int], TokenLogprobs],
    tells_prompts: bool,
) -> list[list[TokenEvent]]:
    """What each sequence asked for, put into its events."""
    by_index = {sequence.index: sequence for sequence in sequences}
    begun: set[int] = set()

    def filled(event: TokenEvent) -> TokenEvent:
        sequence = by_index[event.index]
        num_top, num_prompt = sequence.sampling.num_logprobs, sequence.sampling.num_prompt_logprobs
        if num_top is not None:
            told = [tell(token_id, num_top) for token_id in event.token_ids]
            event = msgspec.structs.replace(event, logprobs=told)
        if num_prompt is not None and event.index not in begun and tells_prompts:
            told = [tell(token_id, num_prompt) for token_id in sequence.prompt_token_ids[1:]]
            event = msgspec.structs.replace(event, prompt_logprobs=told)
        begun.add(event.index)
        return event

    return [[filled(event) for event in step] for step in steps]


def regrouped(steps: list[list[TokenEvent]], sizes: Sequence[int]) -> list[list[TokenEvent]]:
    """The same tokens in other steps: `sizes[0]` of the given ones in the first, and so on; the rest in the last."""
    waiting, result = list(steps), []
    for size in [*sizes, len(steps)]:
        joined: dict[int, TokenEvent] = {}
        for event in [event for step in waiting[:size] for event in step]:
            joined[event.index] = join(joined[event.index], event) if event.index in joined else event
        del waiting[:size]
        if joined:
            result.append(list(joined.values()))
    return result


def one_token_steps(sequences: list[SequenceInput], token_ids: list[int], end_with_eos: bool) -> list[list[TokenEvent]]:
    """Every sequence gives `token_ids`, one a step, cut at its max_tokens; then eos if there is room."""
    steps: list[list[TokenEvent]] = []
    for sequence in sequences:
        ids = token_ids + ([EOS] if end_with_eos else [])
        limit = sequence.sampling.max_tokens
        ids = ids[:limit]
        for position, token_id in enumerate(ids):
            reason = None
            if position == len(ids) - 1:
                is_eos = end_with_eos and position == len(token_ids)
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
            while len(steps) <= position:
                steps.append([])
            steps[position].append(TokenEvent(sequence.index, [token_id], reason, None, num_cached_tokens=4))
    return steps


class FakeBackend:
    """Answers every request with `text` (token by token, with the logprobs asked for), unless told otherwise. `sizes`:
    how many tokens come together.
    """

    def __init__(self, text: str = " one two three", end_with_eos: bool = True) -> None:
        self.token_ids = small_tokenizer().encode(text)
        self.end_with_eos = end_with_eos
        self.requests: list[GenerateRequest] = []
        self.streams: list[FakeStream] = []
        self.refusal: ShoalError | None = None
        self.full: ShoalError | None = None
        self.error: Exception | None = None
        self.gates: dict[int, Gate] = {}
        self.sizes: Sequence[int] | None = None
        self.tell = fake_logprobs
        self.tells_prompts = True
        self.make_steps: Callable[[GenerateRequest], list[list[TokenEvent]]] | None = None
        self.is_ok = True
        self.admissions: list[int] = []
        self.journal = Journal()

    async def generate(self, request: GenerateRequest) -> GenerationStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.make_steps is not None:
            steps = self.make_steps(request)
        else:
            steps = one_token_steps(request.sequences, self.token_ids, self.end_with_eos)
        steps = with_logprobs(request.sequences, steps, self.tell, self.tells_prompts)
        if self.sizes is not None:
            steps = regrouped(steps, self.sizes)
        stream = FakeStream(steps, self.error, self.gates)
        self.streams.append(stream)
        return stream

    def may_admit(self, num_sequences: int, priority: int = 0, tenant: str = "", tenant_weight: float = 1.0) -> None:
        self.admissions.append(num_sequences)
        if self.full is not None:
            raise self.full

    def health(self) -> Health:
        return Health(self.is_ok, {"replicas": 1 if self.is_ok else 0})

    def load(self) -> int:
        return 7

    async def reset_prefix_cache(self, timeout_s: float) -> int:
        if self.refusal is not None:
            raise self.refusal
        return 2

    async def explain(self, name: str, timeout_s: float) -> dict[str, object] | None:
        return {"request_id": name, "timeout_s": timeout_s} if name == "known" else None

    async def living(self, limit: int, timeout_s: float) -> dict[str, object]:
        return {"limit": limit}

    def metrics_text(self) -> bytes:
        return b"# TYPE replica_thing gauge\nreplica_thing 1\n"

    def status(self) -> dict[str, object]:
        return {}


def settings(**changes: Any) -> AppSettings:
    given = {"served_model_names": ("m", "alias"), "max_model_len": 256, "vocab_size": small_tokenizer().num_tokens}
    return AppSettings(**{**given, **changes})


class Edge:
    """An application with its fake backend, called in process. One event loop per call."""

    def __init__(self, backend: FakeBackend | None = None, template: str = TEMPLATE, **changes: Any) -> None:
        self.backend = backend or FakeBackend()
        self.app = create_app(settings(**changes), small_tokenizer(template), self.backend)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def complete(self, **body: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json={"prompt": "The sky", **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.request(
            "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Say"}], **body}
        )


def events(response: httpx.Response) -> list[Any]:
    """Parsed `data:` lines; "[DONE]" stays a string. Checks the framing."""
    text = response.text
    assert text.endswith("\n\n"), text[-80:]
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The response is an OpenAI-shaped error; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert len(body["error"]["message"]) <= 1000
    assert not any(word in body["error"]["message"] for word in ("Traceback", "Error(", "TypeError", "pydantic"))
    if param is not None:
        assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code, body
    return str(body["error"]["message"])
