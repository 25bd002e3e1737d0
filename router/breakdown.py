"""PURE. Where the time of a finished request went, in parts that add up to all of it.

    held             until it was placed for the last time: read, tokenized, held
    queued           for a seat, at each of its replicas
    prefill          its prompt was computed
    transfer_waited  the first token was here, and the decode replica waited for KV
    decode           everything behind that
    stalls           put back, at a replica that was lost, at a prefill replica that gave nothing
    messages         the rest: between processes, and until their event loops came to it

`transfer_hidden` is the part of the transfer that went on beside `prefill`, so it is in no sum. Of several sequences
the one that took longest counts. Durations come from each replica's own clock, the whole from the router's.
"""

from __future__ import annotations

from replica.messages import Stages
from router.journal import GIVEN_BACK, LOST, TAKEN_AWAY, Entry

PARTS = ("held", "queued", "prefill", "transfer_waited", "decode", "stalls", "messages")
_LEFT = (LOST, GIVEN_BACK, TAKEN_AWAY)


def breakdown(entry: Entry, end: float) -> dict[str, float]:
    """Seconds by part, `total` and `transfer_hidden`. `end`: when its last token was here. Empty: nothing was told."""
    if not entry.stages:
        return {}
    index, (_, stages) = max(entry.stages.items(), key=lambda item: sum(item[1][1].by_stage().values()))
    parts = dict.fromkeys(PARTS, 0.0)
    placed_at = _before_placement(entry, parts)
    parts["stalls"] += stages.put_back_s + _failed_legs_s(entry, placed_at)
    parts["queued"] = stages.queued_s or 0.0
    own_s = max(0.0, (stages.prefill_s or 0.0) - stages.away_s - stages.transfer_wait_s)
    if (leg := _leg(entry, index, placed_at)) is not None:
        parts["queued"] += leg.queued_s or 0.0
        parts["prefill"] = leg.prefill_s or 0.0
        parts["decode"] = own_s
    else:
        parts["prefill"] = own_s
    parts["transfer_waited"] = stages.transfer_wait_s
    total = end - entry.opened_at
    if stages.decode_s is None:  # ended by a stop string, or with its first token: no replica told of more
        parts["decode"] += max(0.0, total - sum(parts.values()))
    else:
        parts["decode"] += stages.decode_s
    for name in ("decode", "prefill"):  # where it was put back, the stages went on
        taken = min(parts[name], stages.put_back_s)
        parts[name] -= taken
        if taken:
            break
    parts["messages"] = total - sum(parts.values())
    return {**parts, "transfer_hidden": stages.transfer_hidden_s, "total": total}


def end_of(entry: Entry) -> float | None:
    """When its last token was here; None: it is not over, or did not end well."""
    return next((event.at for event in reversed(entry.events) if event.what == "all tokens here"), None)


def _before_placement(entry: Entry, parts: dict[str, float]) -> float:
    """Fills in what came before the last placement, and returns when that was."""
    since, is_placed = entry.opened_at, False
    for event in entry.events:
        if event.what == "placed" or (event.what == "held" and is_placed):
            parts["held"] += event.at - since
            since, is_placed = event.at, event.what == "placed"
        elif event.what in _LEFT and is_placed:
            parts["stalls"] += event.at - since
            since, is_placed = event.at, False
    return since


def _failed_legs_s(entry: Entry, placed_at: float) -> float:
    spent, began = 0.0, placed_at
    for event in entry.events:
        if event.at < placed_at:
            continue
        if event.what == "prefill placed":
            began = event.at
        elif event.what == "prefill failed":
            spent += event.at - began
    return spent


def _leg(entry: Entry, index: int, placed_at: float) -> Stages | None:
    """What the prefill replica told of the sequence; None: its decode replica computed the prompt."""
    told = entry.prefill_stages.get(index)
    return None if told is None or told[2] < placed_at else told[1]
