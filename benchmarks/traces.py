"""Public request traces as lists of arrivals and lengths, and a synthetic one where they are not at hand.

Lengths are divided by `SCALE`, as suits a model with a context of 8,192: of Mooncake's conversations (up to 126,195
tokens of prompt, 512 tokens a prefix block) and of Azure's (up to 14,050, no prefixes).
"""

from __future__ import annotations

import csv
import json
import random
from datetime import datetime
from pathlib import Path

import msgspec

SCALE = 16
#: tokens of a prefix block, scaled
BLOCK_TOKENS = 512 // SCALE


class TraceRequest(msgspec.Struct, frozen=True):
    """One request. `blocks` are ids of prefix blocks: equal ids are equal text, behind equal ids before them."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: list[int] = []


def read_mooncake(path: Path) -> list[TraceRequest]:
    """`mooncake_conversation_trace.jsonl`."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.append(
            TraceRequest(
                row["timestamp"] / 1000,
                max(1, row["input_length"] // SCALE),
                max(1, row["output_length"] // SCALE),
                row["hash_ids"],
            )
        )
    return found


def read_azure(path: Path) -> list[TraceRequest]:
    """`AzureLLMInferenceTrace_conv_2023.csv`."""
    found: list[TraceRequest] = []
    first: datetime | None = None
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            arrival = (at - first).total_seconds()
            prompt, output = int(row["ContextTokens"]) // SCALE, int(row["GeneratedTokens"]) // SCALE
            found.append(TraceRequest(arrival, max(1, prompt), max(1, output)))
    return found


def synthetic(count: int, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, 3 a second; log-normal lengths with the medians and spreads of the two traces; half of the
    requests go on with one of 200 conversations, whose blocks they share.
    """
    rng = random.Random(seed)
    found, now, next_block = [], 0.0, 0
    conversations: list[list[int]] = [[] for _ in range(200)]
    for _ in range(count):
        now += rng.expovariate(3.0)
        prompt = max(1, min(8000, int(rng.lognormvariate(4.6, 1.3))))
        output = max(1, min(500, int(rng.lognormvariate(2.4, 0.8))))
        blocks: list[int] = []
        if rng.random() < 0.5:
            conversation = conversations[rng.randrange(len(conversations))]
            num_blocks = -(-prompt // BLOCK_TOKENS)
            while len(conversation) < num_blocks:
                conversation.append(next_block)
                next_block += 1
            blocks = conversation[:num_blocks]
        found.append(TraceRequest(now, prompt, output, blocks))
    return found


def load(folder: Path | None, seed: int = 0) -> dict[str, list[TraceRequest]]:
    """The traces in `folder` that are there; without any, 20,000 synthetic requests."""
    readers = {
        "mooncake": ("mooncake_conversation_trace.jsonl", read_mooncake),
        "azure": ("AzureLLMInferenceTrace_conv_2023.csv", read_azure),
    }
    found = {}
    for name, (file, read) in readers.items():
        if folder is not None and (folder / file).exists():
            found[name] = read(folder / file)
    return found or {"synthetic": synthetic(20_000, seed)}
