"""PURE. Puts together what the router remembers of a request and what replicas tell of it, and says what it waited for.

Times of the router count from the request's arrival there; those of a sequence from its submission at the replica, on
the replica's own clock: only differences are told, so clocks that disagree do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from replica.messages import ReplicaId, SequenceAccount, SequenceState, Stages, WaitCause
from router.breakdown import breakdown, end_of
from router.findings import findings
from router.journal import GIVEN_BACK, LOST, TAKEN_AWAY, Entry

Accounts = Mapping[ReplicaId, list[SequenceAccount]]

_LACKS = {
    WaitCause.BLOCKS: "KV blocks",
    WaitCause.LANE: "a place among the prompts under way",
    WaitCause.BUDGET: "tokens of a step",
    WaitCause.SEATS: "a seat in the batch",
    WaitCause.LOAD: "KV that was computed before",
}
#: of a sequence whose replica has not answered, while the router still waits for it
UNKNOWN = "unknown"
#: how far a request is: that of its sequence that is furthest behind
_ORDER = (UNKNOWN, *SequenceState)
#: what a request does, what it waits for, since when it waits and, of that, how long it has lacked what it lacks now
_Standing = dict[str, Any]


def explain(entry: Entry | None, accounts: Accounts, now: float, wall_now: float) -> dict[str, Any] | None:
    """Everything about one request, as JSON data. None: nobody knows it."""
    sequences = _sequences(entry, accounts)
    if entry is None and not sequences:
        return None
    told: dict[str, Any] = {}
    if entry is not None:
        told = {
            "x_request_id": entry.header_id,
            "age_s": now - entry.opened_at,
            "arrived_at": wall_now - (now - entry.opened_at),
            "outcome": entry.outcome,
            "events": [
                {"after_s": event.at - entry.opened_at, "what": event.what, **event.detail} for event in entry.events
            ],
            "events_left_out": entry.num_dropped_events,
        }
        if (end := end_of(entry)) is not None:
            told["parts_s"] = breakdown(entry, end)
    first = min(sequences, key=lambda s: _ORDER.index(s["state"]), default=None)
    told |= _standing(entry, first, now) | {"sequences": sequences}
    return told | {"findings": findings(told)}


def living(
    entries: Iterable[Entry], accounts: Accounts, router_id: str, now: float, limit: int
) -> list[dict[str, Any]]:
    """One line of data for each unfinished request, the `limit` oldest: of all routers where replicas have accepted it,
    of this one where not.
    """
    own: dict[str, Entry] = {entry.request_id: entry for entry in entries}
    by_request: dict[str, list[tuple[ReplicaId, SequenceAccount]]] = {}
    for replica_id, told in accounts.items():
        for account in told:
            by_request.setdefault(account.request_id, []).append((replica_id, account))
    lines: list[dict[str, Any]] = []
    for request_id, held in by_request.items():
        replica_id, account = min(held, key=lambda pair: _ORDER.index(pair[1].state))
        # one that was moved is older than its time at this replica, but only its router knows
        entry = own.get(request_id)
        lines.append(
            {
                "request_id": request_id,
                "x_request_id": "" if entry is None else entry.header_id,
                "router_id": account.router_id,
                "replica_id": replica_id,
                "sequences": len(held),
                "age_s": max(a.at - a.submitted_at for _, a in held) if entry is None else now - entry.opened_at,
                **_standing_at_replica(sequence_data(replica_id, account)),
                "num_ahead": account.num_ahead,
                "output_tokens": sum(a.num_output_tokens for _, a in held),
            }
        )
    for entry in own.values():
        # what a replica holds and did not tell of is younger than what it told
        if entry.request_id not in by_request and _replica_of(entry) not in accounts:
            here: dict[str, Any] = {"request_id": entry.request_id, "x_request_id": entry.header_id}
            here |= {"router_id": router_id, "replica_id": None, "sequences": 0, "age_s": now - entry.opened_at}
            lines.append(here | _standing_at_router(entry, now))
    return sorted(lines, key=_oldest_first)[:limit]


def num_living(entries: Iterable[Entry], counts: Mapping[ReplicaId, int]) -> int:
    """How many requests are unfinished: `counts` by the replicas that answered, and what none of those holds."""
    return sum(counts.values()) + sum(_replica_of(entry) not in counts for entry in entries)


def _replica_of(entry: Entry) -> ReplicaId | None:
    """The replica that has accepted it, if one has."""
    decision = entry.last_decision
    return decision.detail["replica"] if decision is not None and decision.what == "accepted" else None


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
        "waiting_s": None if account.waiting_since is None else account.at - account.waiting_since,
        "num_ahead": account.num_ahead,
        "turn_lacks": None if account.turn_lacks is None else account.turn_lacks.value,
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
        "away_s": stages.away_s,
        "transfer_wait_s": stages.transfer_wait_s,
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


def _standing(entry: Entry | None, sequence: dict[str, Any] | None, now: float) -> _Standing:
    """Of a living request the router's word counts where it is with no replica, whatever those say that had it."""
    if sequence is None:
        return _standing_at_router(entry, now)
    has_left = sequence["state"] in (UNKNOWN, SequenceState.ENDED)
    if has_left and entry is not None and entry.outcome is None and _replica_of(entry) is None:
        return _standing_at_router(entry, now)
    return _standing_at_replica(sequence)


def _standing_at_replica(sequence: dict[str, Any]) -> _Standing:
    state = sequence["state"]
    if state == SequenceState.GRAMMAR:
        return _waits(state, "its grammar to be compiled", sequence["total_s"])
    if state == SequenceState.LOADING:
        return _waits(state, "KV that was computed before to be brought back", None)
    if state not in (SequenceState.QUEUED, SequenceState.RETURNING):
        return _waits(state, None, None)
    since_s = sequence["total_s"] if sequence["waiting_s"] is None else sequence["waiting_s"]
    if not sequence["num_preemptions"]:
        since_s -= sequence["grammar_s"]  # that was another wait, and it is over
    if sequence["lacks"] is not None:
        return _waits(state, _LACKS[WaitCause(sequence["lacks"])], since_s, sequence["lacks_since_s"])
    if not (ahead := sequence["num_ahead"]):
        return _waits(state, "the next step", since_s)
    what = f"its turn, {ahead} before it"
    if sequence["turn_lacks"] is not None:
        what += f"; the first of them lacks {_LACKS[WaitCause(sequence['turn_lacks'])]}"
    return _waits(state, what, since_s)


def _standing_at_router(entry: Entry | None, now: float) -> _Standing:
    if entry is None or entry.outcome is not None:
        return _waits("ended", None, None)
    event = entry.last_decision
    if event is None or event.what in ("arrived", "submitted"):
        return _waits("arrived", "the router to place it", now - entry.opened_at)
    since_s = now - event.at
    if event.what == "held":
        left = (LOST, GIVEN_BACK, TAKEN_AWAY)
        came_back = any(earlier.what in left for earlier in entry.events if earlier.at == event.at)
        return _waits("held", "another replica" if came_back else "a replica with room in its queue", since_s)
    return _waits("placed", "the replica's answer" if event.what == "placed" else None, since_s)


def _waits(state: str, what: str | None, since_s: float | None, lacks_since_s: float | None = None) -> _Standing:
    return {"state": str(state), "waits_for": what, "since_s": since_s, "lacks_since_s": lacks_since_s}
