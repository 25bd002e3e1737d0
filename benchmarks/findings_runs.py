"""PURE. The two scenarios of `docs/findings.md` in virtual time: a long document among chats (A), a burst (B), and
block sizes. Production dispatcher and engine core; only the time of a step is a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

from cluster.simulation.event_queue import Rank
from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.workloads import engine
from replica.config import EngineConfig
from replica.fake_runner import CostModel
from replica.step import StepPlan

Knobs = dict[str, object]
Figures = dict[str, float]

DOCUMENT_TOKENS = 8000
#: of `CHUNKING`, for several documents at once
LANES = ("budget 256 (default)", "threshold 64", "threshold 64, lane 1")
POLICIES: dict[str, Knobs] = {"fcfs": {}, "sjf": {"policy": "sjf"}, "priority": {"policy": "priority"}}
WATERMARKS = (0.0, 0.01, 0.05, 0.2)
BLOCK_SIZES = (8, 16, 32)
#: KV slots of a replica: of scenario B's watermarks, and of the block sizes
TIGHT_POOL_TOKENS, POOL_TOKENS = 4800, 16384


class PairCost(CostModel, frozen=True):
    """The default model's cost with attention counted for each computed token, not once a sequence: a chunk reads all
    before it for every token it has. 8,000 tokens in one step take 14.6 s; measured live: 16.4 s. `CostModel` says 1.8.
    """

    def step_s(self, plan: StepPlan) -> float:
        pairs = sum(
            count * (start + count / 2) for start, count in zip(plan.num_computed, plan.num_scheduled, strict=True)
        )
        return (
            self.base_s
            + self.per_token_s * plan.num_tokens
            + self.per_sequence_s * len(plan.seq_ids)
            + self.per_context_token_s * pairs
        )


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))] if ordered else float("nan")


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


class Range(msgspec.Struct, frozen=True):
    """A figure over seeds: median, least, most."""

    median: float
    least: float
    most: float

    def text(self, digits: int = 0, scale: float = 1.0) -> str:
        """`median (least to most)`; only the median where they do not differ."""
        middle, least, most = (f"{scale * value:,.{digits}f}" for value in (self.median, self.least, self.most))
        return middle if least == most else f"{middle} ({least} to {most})"


def over_seeds(run: Callable[[int], Figures], seeds: Iterable[int]) -> dict[str, Range]:
    """Each figure of `run` as a range."""
    found = [run(seed) for seed in seeds]
    return {
        name: Range(percentile(v, 0.5), min(v), max(v)) for name in found[0] for v in [[one[name] for one in found]]
    }


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


# --- A: a long document among chats -----------------------------------------------------------------------------------

#: name -> knobs beside the default budget of 256
CHUNKING: dict[str, Knobs] = {
    "no chunks": {"enable_chunked_prefill": False},
    "budget 8,192": {"max_num_batched_tokens": 8192},
    "budget 2,048": {"max_num_batched_tokens": 2048},
    "budget 512": {"max_num_batched_tokens": 512},
    "budget 256 (default)": {},
    "budget 64": {"max_num_batched_tokens": 64},
    "budget 2,048, threshold 2,048": {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 2048},
    "budget 2,048, threshold 64": {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 64},
    "threshold 64": {"long_prefill_token_threshold": 64},
    "threshold 64, lane 1": {"long_prefill_token_threshold": 64, "max_long_partial_prefills": 1},
    "TPOT target 100 ms": {"tpot_target_ms": 100.0},
}


def documents_among_chats(seed: int, num_documents: int) -> list[SimRequest]:
    """Nine chats talk when the documents come, and another short question (20 tokens out) comes each second."""
    rng = random.Random(seed)
    chats = [SimRequest(f"chat-{i}", 0.01 * i, _words(rng, rng.randint(30, 60)), 400) for i in range(9)]
    documents = [
        SimRequest(f"document-{i}", 0.5 + 0.01 * i, _words(rng, DOCUMENT_TOKENS), 20) for i in range(num_documents)
    ]
    questions = [
        SimRequest(f"question-{i}", 0.6 + i + 0.5 * rng.random(), _words(rng, rng.randint(20, 60)), 20)
        for i in range(10 * num_documents)
    ]
    return sorted([*chats, *documents, *questions], key=lambda request: request.arrival_s)


def scenario_a(knobs: Knobs, seed: int, num_documents: int = 1) -> Figures:
    """Seconds: gaps of the nine chats while a document has no first token yet, TTFT of questions and documents."""
    cluster = SimCluster(SimConfig(engine=engine(cap=1000, **knobs), num_blocks=4096), PairCost())
    records = cluster.run(documents_among_chats(seed, num_documents))
    _check(cluster, records)

    def of(kind: str) -> list[SimRecord]:
        return [record for record in records if record.request.request_id.startswith(kind)]

    until = max(record.token_times_s[0] for record in of("document"))
    gaps = []
    for record in of("chat"):
        gaps += [b - a for a, b in pairwise(record.token_times_s) if b > 0.5 and a < until]
    questions = [_ttft(record) for record in of("question")]
    return {
        "gap_p50": percentile(gaps, 0.5),
        "gap_p99": percentile(gaps, 0.99),
        "gap_max": max(gaps),
        "question_ttft_p50": percentile(questions, 0.5),
        "question_ttft_max": max(questions),
        "document_ttft": mean(_ttft(record) for record in of("document")),
        "last_document_ttft": max(_ttft(record) for record in of("document")),
    }


# --- B: a burst -------------------------------------------------------------------------------------------------------


def scenario_b(watermark: float, seed: int, cap: int) -> Figures:
    """200 requests in three seconds at two replicas whose pools hold about a third of what `max_num_seqs` would use."""
    rng = random.Random(seed)
    requests = [
        SimRequest(f"q{i}", 3.0 * rng.random(), _words(rng, rng.randint(40, 200)), rng.randint(40, 300))
        for i in range(200)
    ]
    config = engine(cap=cap, watermark=watermark, max_num_seqs=48)
    cluster = SimCluster(SimConfig(engine=config, num_replicas=2, num_blocks=TIGHT_POOL_TOKENS // 16), PairCost())
    records = cluster.run(requests)
    _check(cluster, records)
    served = [record for record in records if record.token_times_s]
    counters = [replica.core.scheduler.counters for replica in cluster.replicas.values()]
    ended = max(record.token_times_s[-1] for record in served)
    return {
        "served": len(served),
        "preemptions": sum(one.preemptions for one in counters),
        "recomputed": sum(one.recomputed_tokens for one in counters),
        "tokens_per_s": sum(len(record.token_ids) for record in served) / ended,
        "ttft_p50": percentile(map(_ttft, served), 0.5),
        "ttft_p99": percentile(map(_ttft, served), 0.99),
        "gap_p99": percentile((gap for record in served for gap in record.gaps_s), 0.99),
        "gap_max": max(gap for record in served for gap in record.gaps_s),
    }


def mixed_burst(seed: int, num_requests: int = 200) -> list[SimRequest]:
    """So many in three seconds: four short ones for each long one. `priority` 0 marks the short ones."""
    rng = random.Random(seed)
    requests = []
    for number in range(num_requests):
        is_long = number % 5 == 0
        prompt = rng.randint(400, 1500) if is_long else rng.randint(20, 100)
        output = rng.randint(100, 300) if is_long else rng.randint(10, 60)
        requests.append(
            SimRequest(f"q{number}", 3.0 * rng.random(), _words(rng, prompt), output, priority=int(is_long))
        )
    return requests


def order_of_service(knobs: Knobs, seed: int, num_replicas: int = 2) -> Figures:
    """Seconds, for the short and the long ones of a mixed burst of 100 a replica; nobody is refused, eight run at
    each replica.
    """
    config = engine(cap=1000, max_num_seqs=8, **knobs)
    cluster = SimCluster(SimConfig(engine=config, num_replicas=num_replicas), PairCost())
    records = cluster.run(mixed_burst(seed, 100 * num_replicas))
    _check(cluster, records)
    figures: Figures = {"tokens_per_s": sum(len(r.token_ids) for r in records) / max(r.ended_s for r in records)}
    classes = {
        "all": records,
        "short": [record for record in records if not record.request.priority],
        "long": [record for record in records if record.request.priority],
    }
    for name, some in classes.items():
        figures[f"{name}_ttft_mean"] = mean(map(_ttft, some))
        figures[f"{name}_ttft_p99"] = percentile(map(_ttft, some), 0.99)
        figures[f"{name}_e2e_mean"] = mean(r.ended_s - r.request.arrival_s for r in some)
        figures[f"{name}_e2e_p99"] = percentile((r.ended_s - r.request.arrival_s for r in some), 0.99)
    return figures


def ttfts(knobs: Knobs, seed: int) -> dict[str, list[float]]:
    """Of the same burst, each request's TTFT in seconds, by class."""
    cluster = SimCluster(SimConfig(engine=engine(cap=1000, max_num_seqs=8, **knobs), num_replicas=2), PairCost())
    records = cluster.run(mixed_burst(seed))
    return {
        name: sorted(_ttft(r) for r in records if bool(r.request.priority) == is_long)
        for name, is_long in (("short", False), ("long", True))
    }


# --- block sizes ------------------------------------------------------------------------------------------------------


def conversations(seed: int) -> list[SimRequest]:
    """40 conversations of three turns behind one of four system texts; prompts of 520 to 1,600 tokens, each turn goes
    on where the last prompt ended. Lengths fall anywhere between block borders.
    """
    rng = random.Random(seed)
    systems = [_words(rng, rng.randint(200, 300)) for _ in range(4)]
    requests = []
    for number in range(40):
        prompt, at = rng.choice(systems) + _words(rng, rng.randint(320, 700)), 20.0 * rng.random()
        for turn in range(3):
            requests.append(SimRequest(f"c{number}-{turn}", at, list(prompt), rng.randint(40, 160)))
            prompt += _words(rng, rng.randint(60, 300))
            at += 10 + 10 * rng.random()
    return sorted(requests, key=lambda request: request.arrival_s)


def block_sizes(block_size: int, seed: int) -> Figures:
    """A pool of as many tokens, whatever the size of its blocks."""
    config = engine(cap=1000)
    cache = config.cache.model_copy(update={"block_size": block_size})
    sized: EngineConfig = config.model_copy(update={"cache": cache})
    cluster = SimCluster(SimConfig(engine=sized, num_blocks=POOL_TOKENS // block_size), PairCost())
    (replica,) = cluster.replicas.values()
    wasted: list[float] = []

    def probe() -> None:
        running = list(replica.core.scheduler.running)
        # of a prompt, blocks are reserved at once: slots behind its end are wasted, slots not computed yet are not
        if slots := sum(len(sequence.block_ids) for sequence in running) * block_size:
            wasted.append(1 - sum(sequence.num_tokens for sequence in running) / slots)

    for tick in range(1, 100):
        cluster.events.at(0.5 * tick, Rank.TIMER, probe)
    records = cluster.run(conversations(seed))
    _check(cluster, records)
    counters = replica.core.scheduler.counters
    return {
        "hit_share": counters.cached_prompt_tokens / counters.prompt_tokens,
        "wasted_share": mean(wasted),
        "preemptions": counters.preemptions,
        "tokens_per_s": sum(len(r.token_ids) for r in records) / max(r.ended_s for r in records),
        "ttft_p50": percentile(map(_ttft, records), 0.5),
        "ttft_p99": percentile(map(_ttft, records), 0.99),
    }


def _ttft(record: SimRecord) -> float:
    return record.token_times_s[0] - record.request.arrival_s


def _check(cluster: SimCluster, records: list[SimRecord]) -> None:
    """Nothing is lost: else the figures would mean nothing."""
    cluster.validate()
    assert all(record.num_ends == 1 and not record.failure for record in records)
