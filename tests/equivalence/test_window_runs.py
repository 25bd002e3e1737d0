"""Busy engines with windows, to their end: small pools, common beginnings, guesses, aborts, knobs turned on the way.
The fake runner looks at all that each token sees, so a block that was given back too early, or found without what it
needs before it, raises.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from replica.fake_runner import FakeModelRunner, expected_output
from replica.messages import RequestId
from tests.unit.engine_harness import ROUTER, Harness

BLOCK = 4
VOCAB = 3  # texts repeat themselves, so guesses come true
MAX_LEN = 160


def knobs(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": rng.choice([2, 5, 9, 16, 24]),
        "enable_chunked_prefill": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 6]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "watermark": rng.choice([0.0, 0.1]),
        "policy": rng.choice(["fcfs", "priority", "sjf"]),
        "preemption_victim": rng.choice(["policy", "cost"]),
        "max_preemptions": rng.choice([0, 2, 100]),
        "num_speculative_tokens": rng.choice([0, 0, 4]),
        "speculative_ngram": rng.choice([1, 2]),
    }


class BusyEngine:
    """One run from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.window = rng.choice([2, 3, 4, 5, 8, 9, 13, 30])
        num_blocks = math.ceil((self.window - 1) / BLOCK) + 1 + rng.randrange(14)
        self.settings = knobs(rng)
        self.turns = rng.random() < 0.4
        self.most = self.bound(self.settings)
        runner = FakeModelRunner(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            eos_token_ids=(),
            window=self.window,
        )
        harness = Harness(num_blocks=num_blocks, cap=100, caching=rng.random() < 0.7, **self.settings)
        self.harness = harness.over(runner)
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.seen: Counter[str] = Counter()

    def bound(self, settings: dict[str, Any]) -> float:
        """Blocks that one sequence may hold."""
        if not settings["enable_chunked_prefill"]:
            return math.inf
        budget = settings["max_num_batched_tokens"]
        chunk = max(min(budget, settings["long_prefill_token_threshold"] or budget), 5)
        return math.ceil((self.window + chunk) / BLOCK) + 1

    def run(self) -> Counter[str]:
        harness, rng = self.harness, self.rng
        texts = [[rng.randrange(VOCAB) for _ in range(MAX_LEN)] for _ in range(rng.choice([1, 3]))]
        for number in range(14):
            self.submit(str(number), rng.choice(texts))
            for _ in range(rng.randrange(12)):
                self.step()
            if rng.random() < 0.15:
                self.aborted.add(name := str(rng.randrange(number + 1)))
                harness.core.abort(ROUTER, RequestId(name), harness.now)
            if self.turns and rng.random() < 0.3:
                self.settings |= knobs(rng)
                self.most = max(self.most, self.bound(self.settings))
                harness.configure(**self.settings)
            if rng.random() < 0.05:
                harness.core.reset_prefix_cache()
        for _ in range(3000):
            if not self.step():
                break
        assert harness.core.num_unfinished == 0, "it never came to its end"
        assert harness.core.blocks.num_free == harness.core.blocks.num_blocks
        for name, prompt in self.prompts.items():
            told = harness.tokens.get(name, [])
            assert told == expected_output(prompt, len(told), vocab_size=VOCAB)
            assert name in self.aborted or name in harness.ends
        counters = harness.core.scheduler.counters
        self.seen["preemptions"] += counters.preemptions
        self.seen["accepted guesses"] += counters.accepted_tokens
        return self.seen

    def submit(self, name: str, text: list[int]) -> None:
        length = self.rng.choice([3, 15, 40, 90, 140])
        prompt = text[:length] if self.rng.random() < 0.6 else text[-length:]
        assert self.harness.submit(name, prompt, self.rng.randrange(1, 60), priority=self.rng.randrange(2)) is None
        self.prompts[name] = prompt

    def step(self) -> bool:
        harness, blocks = self.harness, self.harness.core.blocks
        before = {s.seq_id for s in harness.core.scheduler.running if s.num_passed_blocks}
        plan = harness.plan()
        if plan is None:
            return False
        self.seen["put back with passed blocks"] += len(before & {s.seq_id for s in harness.core.scheduler.returning})
        for new in plan.new:
            self.seen["hits without their beginning"] += new.block_ids[0] < 0
            self.seen["longer than the pool"] += len(new.token_ids) > blocks.capacity_tokens
        for sequence in harness.core.scheduler.running:
            assert len(sequence.held_blocks) <= self.most
            self.seen["without room"] += blocks.room(sequence) == 0 and sequence.num_uncomputed_tokens > 1
        harness.finish(plan)
        return True


@pytest.mark.parametrize("part", range(4))
def test_busy_engines_say_what_they_should(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30 * part, 30 * part + 30):
        seen.update(BusyEngine(seed).run())
    print(seen)
    for what in (
        "preemptions",
        "accepted guesses",
        "put back with passed blocks",
        "longer than the pool",
        "hits without their beginning",
    ):
        assert seen[what] >= 10, f"too few {what}: {seen}"
