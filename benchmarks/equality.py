"""Bit-equality between our own ways of computing: the same requests through engine core and real runner, scheduled
differently.

A way's result is, for each request, its tokens and a digest of the logits that each token was sampled from. Two ways
are equal only if all digests are: one flipped bit anywhere shows.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from replica.attention_window import Window
from replica.config import (
    AdmissionConfig,
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from replica.engine_core import EngineCore
from replica.messages import (
    GenerateRequest,
    PreemptionCause,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceInput,
    TokenLogprobs,
)
from replica.model_runner import TorchModelRunner
from replica.progress import SchedulerCounters
from replica.step import StepPlan

ROUTER = RouterId("equality")


class Item(msgspec.Struct, frozen=True):
    """One request of the set."""

    prompt: list[int]
    sampling: SamplingParams


class Trace(msgspec.Struct):
    """What one request gave."""

    tokens: list[int] = []
    logits: list[bytes] = []
    #: what the client would be told beside the tokens
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class Tally(msgspec.Struct):
    """What a way went through, so that one that never came to its point shows."""

    preemptions: int = 0
    #: guesses that came true
    accepted_tokens: int = 0

    def add(self, counters: SchedulerCounters) -> None:
        self.preemptions += counters.preemptions
        self.accepted_tokens += counters.accepted_tokens


class Way(msgspec.Struct, frozen=True):
    """How to schedule: everything that must not matter."""

    name: str
    max_num_seqs: int = 64
    token_budget: int = 512
    #: blocks the core may use; the runner's pool is larger
    num_blocks: int | None = None
    prefix_caching: bool = False
    #: run the whole set before, so that every prefix is found
    warm: bool = False
    #: two cores with a runner each, requests dealt out in turn
    replicas: int = 1
    #: submit each request with this share of its output already there, as after the loss of a replica
    resume_at: float = 0.0
    #: every second request comes late, one in so many steps, and is urgent
    urgent_every: int = 0
    #: everybody who has a token more is put back before the next step: a preemption at every position
    puts_back: bool = False
    #: of the scheduler
    knobs: dict[str, Any] = {}


WAYS = (
    Way("one by one", max_num_seqs=1),
    Way("batched"),
    Way("32-token chunks", token_budget=32),
    Way("warm prefix cache", prefix_caching=True, warm=True),
    Way("preempted again and again", num_blocks=0, prefix_caching=True),
    Way("2 replicas", replicas=2, prefix_caching=True),
    Way("resumed half-way", resume_at=0.5, prefix_caching=True),
    Way(
        "displaced by urgent ones",
        max_num_seqs=1,
        urgent_every=20,
        prefix_caching=True,
        knobs={"policy": "priority", "max_preemptions": 100},
    ),
    Way(
        "shortest first, victims by cost",
        num_blocks=0,
        prefix_caching=True,
        knobs={"policy": "sjf", "preemption_victim": "cost"},
    ),
    Way("put back after every token", puts_back=True, prefix_caching=True),
    Way("guessed ahead", prefix_caching=True, knobs={"num_speculative_tokens": 8, "speculative_ngram": 1}),
    Way(
        "guessed ahead, preempted, in chunks",
        num_blocks=0,
        token_budget=200,
        prefix_caching=True,
        knobs={"num_speculative_tokens": 5, "speculative_ngram": 2},
    ),
    Way(
        "lanes",
        token_budget=64,
        knobs={"long_prefill_token_threshold": 24, "max_long_partial_prefills": 1, "max_partial_prefills": 2},
    ),
)


def make_items(num_prompts: int, num_tokens: int, seed: int = 11, vocab: tuple[int, int] = (1000, 40000)) -> list[Item]:
    """Varied prompts: lengths 1 to 300, some sharing long prefixes; half greedy, half sampled in different ways."""
    rng = random.Random(seed)
    shared = [rng.randrange(*vocab) for _ in range(160)]
    items = []
    for number in range(num_prompts):
        length = rng.choice([1, 3, 15, 16, 17, 40, 64, 100, 180, 300])
        own = [rng.randrange(*vocab) for _ in range(length)]
        prompt = shared[: rng.choice([48, 100, 160])] + own[:40] if number % 4 == 3 else own
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        if number % 2:
            sampling = SamplingParams(
                max_tokens=num_tokens,
                temperature=rng.choice([0.5, 0.8, 1.2]),
                top_k=rng.choice([0, 5, 50]),
                top_p=rng.choice([1.0, 0.9, 0.5]),
                seed=rng.getrandbits(63),
                ignore_eos=True,
            )
        items.append(Item(prompt, sampling))
    return items


def make_ruled_items(num_prompts: int, num_tokens: int, seed: int = 12) -> list[Item]:
    """As `make_items`, each with rules beside: penalties, bias, bans, a minimum length, logprobs, and grammars."""
    from llguidance import LLMatcher

    grammars = [
        LLMatcher.grammar_from_json_schema(_SCHEMA, overrides={"whitespace_flexible": False}),
        LLMatcher.grammar_from_regex(r"[A-Z][a-z]{2,9}( [a-z]{2,9}){3,40}\."),
        LLMatcher.grammar_from_lark('start: ("ha" | "ho" | " ")+ "!"'),
    ]
    rng = random.Random(seed)
    items = []
    for number, item in enumerate(make_items(num_prompts, num_tokens, seed)):
        changes: list[dict[str, Any]] = [
            {"repetition_penalty": 1.3, "presence_penalty": 0.4},
            {"frequency_penalty": 0.7, "num_logprobs": 5},
            {"logit_bias": {rng.randrange(49152): 4.0 for _ in range(20)}, "num_prompt_logprobs": 2},
            {"allowed_token_ids": tuple(rng.sample(range(49152), 300)), "min_p": 0.05},
            {"bad_words": tuple((rng.randrange(300, 900),) for _ in range(100)), "min_tokens": num_tokens // 2},
            {"grammar": grammars[number // 6 % 3], "num_logprobs": 0, "presence_penalty": 0.2},
        ]
        items.append(Item(item.prompt, msgspec.structs.replace(item.sampling, **changes[number % 6])))
    return items


_SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["name", "ages", "kind"], "properties": {
    "name": {"type": "string", "maxLength": 40}, "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 3},
    "kind": {"enum": ["large", "small", "odd"]}}}"""


def run_way(
    way: Way, items: Sequence[Item], runners: Sequence[TorchModelRunner], outputs: Sequence[list[int]] | None = None
) -> tuple[list[Trace], Tally]:
    """Traces of all items, and what it took. `outputs`: earlier tokens, for ways that resume."""
    traces = [Trace() for _ in items]
    tally = Tally()
    for part in range(way.replicas):
        mine = range(part, len(items), way.replicas)
        core = make_core(way, items, runners[part])
        if way.warm:
            _drive(core, runners[part], items, mine, [Trace() for _ in items], way, None)
        _drive(core, runners[part], items, mine, traces, way, outputs)
        core.validate()
        assert core.num_unfinished == 0
        tally.add(core.scheduler.counters)
    return traces, tally


def make_core(way: Way, items: Sequence[Item], runner: TorchModelRunner) -> EngineCore:
    """A core over `runner`; `num_blocks=0` gives a pool that holds only a bit more than the longest request, or two
    windows where requests hold no more than that.
    """
    num_blocks = way.num_blocks
    if num_blocks == 0:
        longest = max(len(item.prompt) + item.sampling.max_tokens for item in items)
        num_blocks = int(1.3 * longest / runner.info.block_size) + 1
        if runner.info.window is not None:
            num_blocks = min(num_blocks, 2 * Window(runner.info.window, runner.info.block_size).span(1))
    info = msgspec.structs.replace(runner.info, num_blocks=num_blocks or runner.info.num_blocks)
    config = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=way.prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=way.max_num_seqs, max_num_batched_tokens=way.token_budget, watermark=0.0, **way.knobs
        ),
        admission=AdmissionConfig(max_queued_requests=max(1, len(items))),
    )
    return EngineCore(config, info)


def _drive(
    core: EngineCore,
    runner: TorchModelRunner,
    items: Sequence[Item],
    mine: Iterable[int],
    traces: list[Trace],
    way: Way,
    outputs: Sequence[list[int]] | None,
) -> None:
    waiting = list(mine)
    late = waiting[1::2] if way.urgent_every else []
    for number in waiting:
        if number not in late:
            _submit(core, runner, items[number], number, way, outputs)
    runner.capture_logits = True
    num_steps = 0
    while True:
        if late and num_steps % way.urgent_every == 0:
            number = late.pop(0)
            _submit(core, runner, items[number], number, way, outputs, priority=-1)
        num_steps += 1
        if (plan := core.schedule(0.0)) is None and not late:
            return
        if plan is not None:
            _step(core, runner, plan, traces)
        if way.puts_back:
            for sequence in [s for s in core.scheduler.running if s.num_uncomputed_tokens == 1]:
                core.scheduler.preempt(sequence, PreemptionCause.BLOCKS, 0.0, by=sequence)


def _submit(
    core: EngineCore,
    runner: TorchModelRunner,
    item: Item,
    number: int,
    way: Way,
    outputs: Sequence[list[int]] | None,
    priority: int = 0,
) -> None:
    done = outputs[number][: int(way.resume_at * len(outputs[number]))] if outputs and way.resume_at else []
    sampling = msgspec.structs.replace(item.sampling, num_prompt_logprobs=None) if done else item.sampling
    sequence = SequenceInput(0, item.prompt, sampling, list(done))
    request = GenerateRequest(RequestId(str(number)), [sequence], order_key=(0.0, priority, float(number)))
    reply = core.submit(ROUTER, request, 0, 0.0)
    assert reply.refusal is None, reply.message
    for grammar in core.take_wanted_grammars():
        runner.prepare_grammar(grammar)
        core.grammar_compiled(grammar, None, 0.0)


def _step(core: EngineCore, runner: TorchModelRunner, plan: StepPlan, traces: list[Trace]) -> None:
    owner = {s.seq_id: int(s.request_id) for s in core.scheduler.running}
    result = runner.execute(plan)
    for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
        trace = traces[owner[seq_id]]
        trace.tokens += [token_id, *result.more.get(seq_id, [])]
        trace.logits += [hashlib.sha256(row.tobytes()).digest() for row in runner.last_logits[seq_id].numpy()]
    runner.last_logits.clear()
    assert not result.failed, result.failed
    for told in core.update(plan, result, 0.0).values():
        for output in told.outputs:  # plain tokens are in `result` already
            trace = traces[int(output.request_id)]
            trace.logprobs += output.logprobs
            trace.prompt_logprobs += output.prompt_logprobs


def differences(reference: Sequence[Trace], other: Sequence[Trace], way: Way) -> list[str]:
    """One line per request that differs in a token or in a bit of its logits."""
    lines = []
    for number, (a, b) in enumerate(zip(reference, other, strict=True)):
        skip = int(way.resume_at * len(a.tokens))
        if a.tokens[skip:] != b.tokens:
            lines.append(f"{way.name}: request {number}: tokens differ")
        elif a.logits[skip:] != b.logits:
            at = next(i for i, (x, y) in enumerate(zip(a.logits[skip:], b.logits, strict=True)) if x != y)
            lines.append(f"{way.name}: request {number}: logits differ from output position {skip + at} on")
        elif a.logprobs[skip:] != b.logprobs or (not skip and a.prompt_logprobs != b.prompt_logprobs):
            lines.append(f"{way.name}: request {number}: logprobs differ")
    return lines


def measure_ways(model: str, dtype: DType, items: Sequence[Item]) -> tuple[list[str], str]:
    """All ways with the built-in model `model`: the differences, and a line on what was compared."""
    from cluster import model_store

    folder = model_store.resolve(model)
    config = EngineConfig(
        model=ModelConfig(dtype=dtype),
        cache=CacheConfig(num_blocks=1500),
        parallel=ParallelConfig(num_threads=len(os.sched_getaffinity(0))),
    )
    runners = [TorchModelRunner(config, folder) for _ in range(2)]
    reference, _ = run_way(WAYS[0], items, runners)
    outputs = [trace.tokens for trace in reference]
    preemptions, accepted, different = 0, 0, list[str]()
    for way in WAYS[1:]:
        traces, tally = run_way(way, items, runners, outputs)
        different += differences(reference, traces, way)
        preemptions += tally.preemptions
        accepted += tally.accepted_tokens
    for runner in runners:
        runner.close()
    lengths = f"{len(items)} prompts x {max(len(tokens) for tokens in outputs)} tokens"
    took = f"{preemptions} preemptions, {accepted} tokens guessed rightly"
    return different, f"{lengths}, {len(WAYS)} ways, {took}"
