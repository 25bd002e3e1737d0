"""The same model on different numbers of ranks, through the whole cluster: tokens, and logits where tokens are forced.

One rank's greedy output is the reference. Another number of ranks adds in another order, so bits differ; every token of
the reference has to be within a thousandth of the best one there, and tokens may differ only where two are as near.
"""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import servers

#: of the greatest distance, in logprobs, of a token of the reference from the best one
NEAR = 1e-3
PROMPT_LEN, OUTPUT_LEN = 40, 24


class RankResult(msgspec.Struct, frozen=True):
    """One number of ranks. MiB of the ranks in turn; of one rank, which says none, empty."""

    num_ranks: int
    outputs: list[list[int]]
    #: the largest distance of a token of the reference from the best one
    farthest: float
    #: logprobs of the tokens of the reference, all outputs in turn
    logprobs: list[float]
    weights_mib: list[float]
    kv_mib: list[float]

    def num_different(self, reference: RankResult) -> int:
        """Outputs that are not the same tokens."""
        return sum(mine != its for mine, its in zip(self.outputs, reference.outputs, strict=True))

    def apart(self, reference: RankResult) -> float:
        """The largest difference of a logprob."""
        return max(abs(mine - its) for mine, its in zip(self.logprobs, reference.logprobs, strict=True))


def measure(model: str, sizes: tuple[int, ...], vocab_size: int, num_prompts: int) -> list[RankResult]:
    """`sizes` begins with 1, which is also run on a worker, so that it says what it holds."""
    rng = random.Random(5)
    prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_LEN)] for _ in range(num_prompts)]
    found: list[RankResult] = []
    for size in sizes:
        flags = ("--model", model, "--served-model-name", "m", "--dtype", "float32", "--set", "kv_cache.num_blocks=128")
        ranks = ("--tensor-parallel-size", str(size), "--set", "runner_placement=workers")
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.shoal(Path(folder), *flags, *ranks) as server,
            httpx.Client(base_url=server.url, timeout=300) as client,
        ):
            outputs = [_generate(client, prompt) for prompt in prompts]
            forced = found[0].outputs if found else outputs
            told = [one for p, o in zip(prompts, forced, strict=True) for one in _force(client, p, o)]
            description = client.get("/status").json()["replicas"][0]["description"]
        pairs = re.findall(r"([\d.]+)\+([\d.]+)", description.partition(";")[0])
        weights, kv = [float(w) for w, _ in pairs], [float(k) for _, k in pairs]
        farthest = max(best - logprob for best, logprob in told)
        found.append(RankResult(size, outputs, farthest, [logprob for _, logprob in told], weights, kv))
    return found


def _generate(client: httpx.Client, prompt: list[int]) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_LEN, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def _force(client: httpx.Client, prompt: list[int], output: list[int]) -> list[tuple[float, float]]:
    """Logprobs of the best token and of the one in `output`, whatever would have been chosen there."""
    body = {"model": "m", "prompt": prompt + output, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()
    told: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [
        (max(entry["logprob"] for entry in position.values()), position[str(token_id)]["logprob"])
        for position, token_id in zip(told, output, strict=True)
    ]
