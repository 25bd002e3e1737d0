"""PURE. What took a request's time, and which knob to look at: from the data of `router/why.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from router.journal import LOST

#: what took less than this share of the whole is not worth a sentence, nor is less than this many seconds
_LEAST_SHARE, _LEAST_S = 0.1, 0.02

#: by what a sequence lacked: the sentence, and the keys of the configuration that change it
_LACKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "blocks": (
        "waited for KV blocks",
        ("kv_cache.kv_cache_gib", "kv_cache.num_blocks", "scheduler.watermark", "scheduler.max_num_seqs"),
    ),
    "seats": ("waited because max_num_seqs sequences were running", ("scheduler.max_num_seqs", "replicas.both")),
    "budget": (
        "waited because the tokens of the step were spent",
        ("scheduler.max_num_batched_tokens", "scheduler.tpot_target_ms"),
    ),
    "lane": (
        "waited because as many prompts were under way as may be",
        ("scheduler.max_long_partial_prefills", "scheduler.max_partial_prefills"),
    ),
    "load": (
        "waited for KV that was computed before to be brought back",
        ("scheduler.preemption_mode", "kv_cache.kv_cache_gib"),
    ),
}
_QUEUED = ("replicas.both", "scheduler.policy", "router.max_queued_requests_per_replica")
_PREFILL = ("scheduler.max_num_batched_tokens", "scheduler.long_prefill_token_threshold")
_DECODE = ("scheduler.max_num_seqs", "scheduler.max_num_batched_tokens", "scheduler.tpot_target_ms")
_PUT_BACK = ("kv_cache.kv_cache_gib", "scheduler.max_num_seqs", "scheduler.watermark", "scheduler.max_preemptions")
#: by somebody more urgent, or of a tenant with fewer places
_DISPLACED = ("scheduler.policy", "scheduler.priority_ageing_s", "scheduler.max_preemptions")
_HELD = ("router.max_queued_requests_per_replica", "router.admission_wait_ms", "replicas.both")

#: a "held" at which no replica could be chosen for a reason of its own, and a "placed" that came to nothing
_NOBODY_UP, _UNANSWERED = "held, nobody up", "placed and lost"

#: event of the journal -> what went on until the next one
_AT_ROUTER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("arrived", "read, parsed and tokenized", ()),
    ("held", "held by the router: no replica had room in its queue", _HELD),
    (_NOBODY_UP, "held by the router: no replica was up", ("replicas.both",)),
    (_UNANSWERED, "at a replica that was lost or fell silent", ("replicas.both",)),
    (LOST, "lost with its replica, and not yet placed elsewhere", ("replicas.both",)),
    ("all tokens here", "its last bytes waited for a client that reads slowly", ()),
)

Finding = tuple[float, str, tuple[str, ...]]


def findings(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What took time, the longest first. What it lacked while put back is told twice: by cause, and as a whole."""
    found = list(_of_router(told.get("events", [])))
    sequences = told["sequences"]
    if sequences:
        found += _of_sequence(max(sequences, key=lambda sequence: float(sequence["total_s"])))
    whole = max([told.get("age_s", 0.0) if told.get("outcome") is None else 0.0, *(s["total_s"] for s in sequences)])
    least_s = max(_LEAST_S, _LEAST_SHARE * whole)
    return [
        {"seconds": seconds, "what": what, "knobs": list(knobs)}
        for seconds, what, knobs in sorted(found, key=lambda finding: -finding[0])
        if seconds >= least_s
    ]


def all_knobs() -> set[str]:
    """Every key that a finding may name; a test holds them to the configuration."""
    groups = [knobs for _, knobs in _LACKS.values()]
    return {key for keys in (*groups, _QUEUED, _PREFILL, _DECODE, _PUT_BACK, _DISPLACED, _HELD) for key in keys}


def _of_router(events: list[dict[str, Any]]) -> Iterator[Finding]:
    """Time from one event to the next, by what it was."""
    spent_s: dict[str, float] = {}
    for event, following in pairwise(events):
        what = event["what"]
        if what == "placed" and following["what"] == LOST:
            what = _UNANSWERED
        elif what == "held" and "replicas" in event and not any("cap" in replica for replica in event["replicas"]):
            what = _NOBODY_UP
        spent_s[what] = spent_s.get(what, 0.0) + following["after_s"] - event["after_s"]
    for what, sentence, knobs in _AT_ROUTER:
        if what in spent_s:
            yield spent_s[what], sentence, knobs


def _of_sequence(sequence: Mapping[str, Any]) -> Iterator[Finding]:
    stages, waits = sequence["stages_s"], sequence["waits_s"]
    grammar_s = sequence["grammar_s"]
    if grammar_s:
        yield grammar_s, "its grammar was compiled", ()
    if queued_s := stages.get("queued", 0.0) - grammar_s:
        yield queued_s, "queued behind others", _QUEUED
    for cause, seconds in waits.items():
        what, knobs = _LACKS[cause]
        needed = sequence.get("blocks_needed") if cause == "blocks" else None
        yield seconds, f"{what} (it needs {needed})" if needed else what, knobs
    if "prefill" in stages:
        what = f"computed its prompt in {sequence['num_chunks']} pieces"
        if "prompt_tokens" in sequence:
            what += f", {sequence['prompt_tokens'] - sequence['cached_tokens']} tokens"
        yield stages["prefill"], what, _PREFILL
    if "decode" in stages:
        decode_s = max(0.0, stages["decode"] - sequence["put_back_s"])
        yield decode_s, _decode(sequence, decode_s), _DECODE
    if put_back_s := sequence["put_back_s"]:
        is_displaced = any(preemption["cause"] == "displaced" for preemption in sequence["preemptions"])
        lost = sum(preemption["lost_tokens"] for preemption in sequence["preemptions"])
        what = f"put back {sequence['num_preemptions']}x, {lost} computed tokens given up"
        yield put_back_s, what, _DISPLACED if is_displaced else _PUT_BACK


def _decode(sequence: Mapping[str, Any], seconds: float) -> str:
    count = sequence.get("output_tokens", 0)
    return f"decoded, {1000 * seconds / (count - 1):.1f} ms a token" if count > 1 else "decoded"
