"""PURE. What one phase of the trace soak is made of: a random engine, and the trace's requests as clients send them.
Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from cluster.simulation.traces import PromptText, TraceRequest, shifted
from cluster.simulation.workloads import engine
from replica.config import EngineConfig, SchedulerConfig
from replica.fake_runner import CostModel
from replica.messages import GenerateRequest, RequestId, RouterId, SamplingParams, SequenceInput

VOCAB = 49152
#: about what a mid-size model on one GPU takes: 40,000 prompt tokens/s, 8 ms for a step of 64 decodes
COST = CostModel(base_s=5e-3, per_token_s=2.5e-5, per_sequence_s=3e-5, per_context_token_s=4e-9)
PRIORITIES = 3


class Shape(msgspec.Struct, frozen=True):
    """One phase. `load` is the share of the device's time that the arrivals ask for, by estimate."""

    seed: int
    engine: EngineConfig
    num_blocks: int
    load: float
    #: configurations that the engine changes to in the course of the phase, if it can
    changes: list[SchedulerConfig] = []

    @property
    def title(self) -> str:
        """The knobs on one line."""
        s = self.engine.scheduler
        return (
            f"{s.policy}, {self.num_blocks} blocks, watermark {s.watermark}, budget {s.max_num_batched_tokens}, "
            f"seqs {s.max_num_seqs}, cap {self.engine.admission.max_queued_requests}, victim {s.preemption_victim}, "
            f"guesses {s.num_speculative_tokens}, load {self.load}"
        )

    @property
    def may_pass(self) -> int | None:
        """By how many later requests one that waits may be overtaken beyond its policy; None: nobody promises."""
        s = self.engine.scheduler
        has_lanes = s.enable_chunked_prefill and (s.max_partial_prefills or s.max_long_partial_prefills)
        return None if has_lanes or self.changes else s.max_head_passes

    def key_span_s(self, request: GenerateRequest) -> float:
        """So much later may a request arrive and still go first (`replica/order.py`)."""
        s = self.engine.scheduler
        if s.policy == "priority":
            return request.order_key[1] * s.priority_ageing_s
        if s.policy == "sjf":
            work = max(len(one.prompt_token_ids) + one.sampling.max_tokens for one in request.sequences)
            return work / s.sjf_ageing_tokens_per_s
        return 0.0


class Client(msgspec.Struct, frozen=True):
    """One request, and when its client goes away. `num_output_tokens`: per sequence, when it says its end token."""

    request: GenerateRequest
    router_id: RouterId
    arrival_s: float
    num_output_tokens: int
    abort_at_s: float | None = None


def random_shape(seed: int, longest_tokens: int, mean_tokens: float) -> Shape:
    """A pool is between 1.2 times the longest request and 256 mean ones: from thrashing to roomy."""
    rng = random.Random(f"shape {seed}")
    block_size = 16
    least = int(1.2 * longest_tokens) // block_size
    num_blocks = max(least, int(rng.choice([8, 24, 64, 256]) * mean_tokens / block_size))
    knobs = _random_knobs(rng)
    config = engine(cap=rng.choice([32, 128, 512]), **knobs)
    changes = []
    if rng.random() < 0.25:
        changes = [engine(**_random_knobs(rng)).scheduler for _ in range(8)]
    return Shape(seed, config, num_blocks, rng.choice([0.6, 0.8, 0.9, 1.05]), changes)


def _random_knobs(rng: random.Random) -> dict[str, Any]:
    threshold = rng.choice([0, 0, 256])
    return {
        "policy": rng.choice(["fcfs", "priority", "sjf"]),
        "priority_ageing_s": rng.choice([2.0, 20.0]),
        "sjf_ageing_tokens_per_s": rng.choice([100.0, 1000.0]),
        "max_num_seqs": rng.choice([32, 128, 256]),
        "max_num_batched_tokens": rng.choice([512, 2048, 8192]),
        "enable_chunked_prefill": rng.random() < 0.9,
        "long_prefill_token_threshold": threshold,
        "max_long_partial_prefills": rng.choice([0, 2]) if threshold else 0,
        "watermark": rng.choice([0.0, 0.01, 0.05]),
        "preemption_victim": rng.choice(["policy", "cost"]),
        "max_preemptions": rng.choice([2, 8]),
        "admission_look_past": rng.choice([0, 8]),
        "shed_above_queued_tokens": rng.choice([0, 0, 100_000]),
        "num_speculative_tokens": rng.choice([0, 0, 0, 4]),
        "speculative_max_step_tokens": 256,
        "tpot_target_ms": rng.choice([0.0, 0.0, 20.0]),
    }


def clients(shape: Shape, rows: list[TraceRequest], scale: float, *, with_end_token: bool = True) -> Iterator[Client]:
    """In order of arrival. 5 % go away early, one in ten has a deadline, one in twenty wants two to four answers; half
    of the others name a limit that is longer than their answer, unless `with_end_token` is false.
    """
    rng = random.Random(f"clients {shape.seed}")
    text = PromptText(shape.seed, VOCAB)
    speed = _speed(rows, scale, shape.load)
    for number, row in enumerate(shifted(rows, shape.seed)):
        arrival = row.arrival_s / speed
        num_output = max(1, int(row.num_output_tokens * scale))
        has_end = with_end_token and rng.random() < 0.5
        limit = num_output + rng.randrange(1, 64) if has_end else num_output
        prompt = text.prompt(number, row, scale)
        sequences = [
            SequenceInput(i, prompt, SamplingParams(limit, temperature=0.0, seed=num_output, ignore_eos=not has_end))
            for i in range(rng.randint(2, 4) if rng.random() < 0.05 else 1)
        ]
        request = GenerateRequest(
            RequestId(f"{shape.seed}-{number}"),
            sequences,
            order_key=(0.0, rng.randrange(PRIORITIES), arrival),
            deadline_s=arrival + rng.choice([2.0, 30.0]) if rng.random() < 0.1 else None,
        )
        abort_at = arrival + rng.expovariate(0.5) if rng.random() < 0.05 else None
        yield Client(request, RouterId(f"router-{number % 2}"), arrival, num_output, abort_at)


def _speed(rows: list[TraceRequest], scale: float, load: float) -> float:
    """How much faster than recorded they come, so that the device has `load` times what it can do: all prompts but a
    quarter that the cache holds, and decode steps of 32.
    """
    prompts = scale * sum(row.num_prompt_tokens for row in rows)
    outputs = scale * sum(row.num_output_tokens for row in rows)
    per_output = COST.per_token_s + COST.per_sequence_s + COST.base_s / 32
    busy_s = 0.75 * prompts * COST.per_token_s + outputs * per_output
    speed: float = load * max(row.arrival_s for row in rows) / busy_s
    return speed
