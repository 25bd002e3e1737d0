"""PURE. Puts together what the router remembers of a request and what replicas tell of it, and says what it waited for.

Times of the router count from the request's arrival there; those of a sequence from its submission at the replica, on
the replica's own clock: only differences are told, so clocks that disagree do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from replica.messages import ReplicaId, SequenceAccount, SequenceState, Stages, WaitCause
from router.findings import findings
from router.journal import Entry

Accounts = Mapping[ReplicaId, list[SequenceAccount]]

_LACKS = {
    WaitCause.BLOCKS: "KV blocks",
    WaitCause.LANE: "a place among the prompts under way",
    WaitCause.BUDGET: "tokens of a step",
    WaitCause.SEATS: "a seat in the batch",
}
#: of a sequence whose replica has not answered, while the router still waits for it
UNKNOWN = "unknown"
#: how far a request is: that of its sequence that is furthest behind
_ORDER = (UNKNOWN, *SequenceState)


def explain(entry: Entry | None, accounts: Accounts, now: float, wall_now: float) -> dict[str, Any] | None:
    """Everything about one request, as JSON data. None: nobody knows it."""
    sequences = _sequences(entry, accounts)
    if entry is None and not sequences:
        return None
    told: dict[str, Any] = {}
    if entry is not None:
        told = {
            "age_s": now - entry.opened_at,
            "arrived_at": wall_now - (now - entry.opened_at),
            "outcome": entry.outcome,
            "events": [
                {"after_s": event.at - entry.opened_at, "what": event.what, **event.detail} for event in entry.events
            ],
            "events_left_out": entry.num_dropped_events,
        }
    first = min(sequences, key=lambda s: _ORDER.index(s["state"]), default=None)
    state, waits_for, since_s = _standing(entry, first, now)
    told |= {"state": state, "waits_for": waits_for, "since_s": since_s, "sequences": sequences}
    return told | {"findings": findings(told)}


def living(
    entries: Iterable[Entry], accounts: Accounts, router_id: str, now: float, limit: int
) -> list[dict[str, Any]]:
    """One line of data for each unfinished request, oldest first: of all routers where replicas have accepted it, of
    this one where not.
    """
    by_request: dict[str, list[tuple[ReplicaId, SequenceAccount]]] = {}
    for replica_id, told in accounts.items():
        for account in told:
            by_request.setdefault(account.request_id, []).append((replica_id, account))
    lines: list[dict[str, Any]] = []
    for request_id, held in by_request.items():
        replica_id, account = min(held, key=lambda pair: _ORDER.index(pair[1].state))
        sequence = sequence_data(replica_id, account)
        state, waits_for, since_s = _standing(None, sequence, now)
        lines.append(
            {
                "request_id": request_id,
                "router_id": account.router_id,
                "replica_id": replica_id,
                "sequences": len(held),
                "age_s": max(a.at - a.submitted_at for _, a in held),
                "state": state,
                "waits_for": waits_for,
                "since_s": since_s,
                "num_ahead": account.num_ahead,
                "output_tokens": sum(a.num_output_tokens for _, a in held),
            }
        )
    for entry in entries:
        if entry.request_id in by_request:
            continue
        state, waits_for, since_s = _standing(entry, None, now)
        age_s = now - entry.opened_at
        here = {"request_id": entry.request_id, "router_id": router_id, "replica_id": None, "age_s": age_s}
        lines.append({**here, "sequences": 0, "state": state, "waits_for": waits_for, "since_s": since_s})
    return sorted(lines, key=_oldest_first)[:limit]


def _oldest_first(line: Mapping[str, Any]) -> tuple[float, str]:
    return -line["age_s"], line["request_id"]


def sequence_data(replica_id: ReplicaId, account: SequenceAccount) -> dict[str, Any]:
    """One sequence, as JSON data."""
    stages = account.stages
    until = account.ended_at if account.ended_at is not None else account.at
    return {
        "index": account.index,
        "replica_id": replica_id,
        "router_id": account.router_id,
        "state": account.state.value,
        "finish_reason": account.finish_reason,
        "total_s": until - account.submitted_at,
        **_stage_data(stages, account.request_id, account.submitted_at),
        "lacks": None if account.lacks_since is None or stages.waited_for is None else stages.waited_for.value,
        "lacks_since_s": None if account.lacks_since is None else account.at - account.lacks_since,
        "num_ahead": account.num_ahead,
        "priority": account.priority,
        "prompt_tokens": account.num_prompt_tokens,
        "cached_tokens": account.num_cached_tokens,
        "output_tokens": account.num_output_tokens,
        "computed_tokens": account.num_computed_tokens,
        "blocks": account.num_blocks,
        "blocks_needed": account.num_blocks_needed,
    }


def _stage_data(stages: Stages, request_id: str, submitted_at: float | None) -> dict[str, Any]:
    preemptions: list[dict[str, Any]] = []
    for told in stages.preemptions:
        by = None if told.by == request_id else told.by
        preemptions.append({"cause": told.cause.value, "lost_tokens": told.num_lost_tokens, "by": by})
        if submitted_at is not None:
            preemptions[-1]["after_s"] = told.at - submitted_at
    return {
        "stages_s": stages.by_stage(),
        "waits_s": {cause.value: seconds for cause, seconds in stages.waits.items()},
        "waited_for": None if stages.waited_for is None else stages.waited_for.value,
        "grammar_s": stages.grammar_s,
        "put_back_s": stages.put_back_s,
        "num_preemptions": stages.num_preemptions,
        "preemptions": preemptions,
        "chunks": [[chunk.step, chunk.num_tokens] for chunk in stages.chunks],
        "num_chunks": stages.num_chunks,
        "passed_by": stages.num_passes,
    }


def _sequences(entry: Entry | None, accounts: Accounts) -> list[dict[str, Any]]:
    """By index, then by replica; of a replica that is gone or silent what it had told with its last word."""
    found = [sequence_data(replica_id, account) for replica_id, told in accounts.items() for account in told]
    known = {(sequence["index"], sequence["replica_id"]) for sequence in found}
    if entry is not None:
        for index, (replica_id, stages) in entry.stages.items():
            if (index, replica_id) not in known:
                found.append(_remembered(entry, index, replica_id, stages))
    return sorted(found, key=lambda sequence: (sequence["index"], sequence["replica_id"]))


def _remembered(entry: Entry, index: int, replica_id: ReplicaId, stages: Stages) -> dict[str, Any]:
    return {
        "index": index,
        "replica_id": replica_id,
        "state": UNKNOWN if entry.outcome is None else SequenceState.ENDED.value,
        "total_s": sum(stages.by_stage().values()),
        **_stage_data(stages, entry.request_id, None),
    }


def _standing(entry: Entry | None, sequence: dict[str, Any] | None, now: float) -> tuple[str, str | None, float | None]:
    """What it does, what it waits for, and for how long already."""
    if sequence is None:
        return _standing_at_router(entry, now)
    state = sequence["state"]
    if state == SequenceState.GRAMMAR:
        return state, "its grammar to be compiled", sequence["total_s"]
    if state not in (SequenceState.QUEUED, SequenceState.RETURNING):
        return state, None, None
    if sequence["lacks"] is not None:
        return state, _LACKS[WaitCause(sequence["lacks"])], sequence["lacks_since_s"]
    ahead = sequence["num_ahead"]
    return state, f"its turn, {ahead} before it" if ahead else "the next step", sequence["total_s"]


def _standing_at_router(entry: Entry | None, now: float) -> tuple[str, str | None, float | None]:
    if entry is None or entry.outcome is not None:
        return "ended", None, None
    event = entry.events[-1] if entry.events else None
    if event is None or event.what in ("arrived", "submitted"):
        return "arrived", "the router to place it", now - entry.opened_at
    waits_for = {"held": "a replica with room in its queue", "placed": "the replica's answer"}.get(event.what)
    return ("held" if event.what == "held" else "placed"), waits_for, now - event.at
