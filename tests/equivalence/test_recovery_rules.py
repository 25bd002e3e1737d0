"""Streams that lose their replica at any output position, where logits matter: penalties, bias, grammars, logprobs. A
small random model; the next replica computes prompt and output so far in one piece, which gives the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replica.config import CacheConfig, DType, EngineConfig, ModelConfig, ParallelConfig
from replica.model_runner import TorchModelRunner
from router.tokenizer import Tokenizer
from tests.cluster.recovery import CHAT, COMPLETIONS, Case, RecoveryPlane, by_choice, recovery_plane, uncached

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = {"prompt": "The sky is", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "temperature": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]{12,20}$"},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 99},
            "minItems": 6,
            "maxItems": 9,
        },
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
WORD = {"type": "object", "properties": {"word": {"type": "string", "pattern": "^[a-z]{30,40}$"}}, "required": ["word"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": WORD}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
#: the end token of the default model; of the small one it is 257
DEFAULT_EOS = 2
#: with so much the end token is chosen soon
ENDS = {"logit_bias": {"257": 9}}
CASES = [
    Case("seeded", COMPLETIONS, {**PROMPT, **SEEDED}),
    Case(
        "penalties",
        COMPLETIONS,
        {
            **PROMPT,
            "presence_penalty": 1.5,
            "frequency_penalty": 0.9,
            "repetition_penalty": 1.4,
            "logit_bias": {"70": 3},
        },
    ),
    Case(
        "seeded penalties", CHAT, {**HELLO, **SEEDED, "frequency_penalty": 1.5, "ignore_eos": True, "stop": "no such"}
    ),
    Case("logprobs", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}),
    Case("completion logprobs", COMPLETIONS, {**PROMPT, "logprobs": 4, "echo": True, "return_token_ids": True}),
    Case("min_tokens", COMPLETIONS, {**PROMPT, **SEEDED, "ignore_eos": False, "min_tokens": 50, **ENDS}, 51),
    Case("schema", CHAT, {**HELLO, **SEEDED, "response_format": FORMAT}, 40),
    Case("required tool", CHAT, {**HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 90}, 60),
    Case("tool if it likes", CHAT, {**HELLO, **SEEDED, "tools": [TOOL], "ignore_eos": True}),
    Case("copies", CHAT, {**HELLO, **SEEDED, "n": 2, "ignore_eos": True, "max_tokens": 24}, 24),
]
#: `make claims ONLY=admission.recover FULL=1` sets it: every case whole and streamed, every kind of loss, and the
#: default model
IS_FULL = bool(os.environ.get("RECOVERY_FULL"))
WHOLE = [case for case in CASES if IS_FULL or case.name in ("seeded penalties", "schema", "required tool")]
CLEAN: dict[str, int] = {}
LOST_MESSAGE = {"num_lost_steps": 1}
LOST_TWICE = {"again_after": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks import tiny_models

    return tiny_models.make(tmp_path_factory.mktemp("recovery"), "llama", max_position_embeddings=2048)


def model_runner(folder: Path, dtype: DType = "float32", num_blocks: int = 8192) -> Callable[[], TorchModelRunner]:
    config = EngineConfig(
        model=ModelConfig(dtype=dtype, max_model_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=num_blocks),
        parallel=ParallelConfig(num_threads=1 if dtype == "float32" else None),
    )
    return lambda: TorchModelRunner(config, folder, self_test=False)


async def check(plane: RecoveryPlane, case: Case, losses: Sequence[dict[str, int]]) -> None:
    """The same bytes at every position, whatever gets lost."""
    told, num_tokens = await plane.undisturbed(case)
    assert num_tokens >= case.num_tokens, json.dumps(told)[-600:]
    in_order = by_choice if case.body.get("n", 1) > 1 and case.is_streamed else list
    for loss in losses:
        readers, positions = await plane.staggered(case, num_tokens, **loss)
        assert {position for choices in positions for position in choices} >= set(range(num_tokens))
        for reader, at in zip(readers, positions, strict=True):
            expected, read = in_order(told), in_order(reader.told())
            if not any(at):
                expected, read = uncached(expected), uncached(read)
            assert read == expected, f"{loss}: cut after {at} tokens"


@pytest.mark.parametrize("case", [case.streamed() for case in CASES] + WHOLE, ids=lambda case: case.name)
async def test_every_position_gives_the_bytes_of_an_undisturbed_run(case: Case, folder: Path) -> None:
    losses = [LOST_MESSAGE] if case.is_streamed else [LOST_TWICE]
    async with recovery_plane(model_runner(folder), Tokenizer.from_folder(folder), vocab_size=272) as plane:
        await check(plane, case, [CLEAN, LOST_MESSAGE, LOST_TWICE] if IS_FULL else losses)


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_FULL, reason="takes minutes: make claims ONLY=admission.recover FULL=1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_default_model_in_bfloat16(case: Case, model_folder: Path) -> None:
    codec = Tokenizer.from_folder(model_folder)
    body = json.loads(json.dumps(case.body).replace('"257"', f'"{DEFAULT_EOS}"'))
    runner = model_runner(model_folder, "bfloat16", 6000)
    async with recovery_plane(runner, codec, vocab_size=codec.num_tokens, num_batched_tokens=1024) as plane:
        await check(plane, Case(case.name, case.path, body, 8).streamed(), [LOST_MESSAGE])
