"""ASYNC. `shoal why`: where the time of a request went, drawn in text, and which knob to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from cluster.status import fetch_json
from replica.stages import STAGES

_BAR = 40


def why(host: str, port: int, request_id: str | None, api_key: str | None = None, *, limit: int = 50) -> dict[str, Any]:
    """Ask the router behind `host:port`. Raises ShoalError with a sentence."""
    path = f"/debug/requests?limit={limit}" if request_id is None else f"/debug/requests/{quote(request_id, safe='')}"
    return fetch_json(host, port, path, api_key)


def format_living(told: Mapping[str, Any]) -> str:
    """One line a request, the oldest first."""
    lines = [f"{'request':<42} {'router':<8} {'replica':<12} {'age':>8} {'tokens':>6}  state"]
    lines += map(_living, told["requests"])
    if not told["requests"]:
        lines.append("no request is unfinished")
    return "\n".join([*lines, *_silent(told)])


def format_request(told: Mapping[str, Any]) -> str:
    """The timeline of one request."""
    head = f"{told['request_id']}: {_state(told)}"
    if told.get("outcome"):
        head += f", {told['outcome']}"
    lines = [head]
    if "age_s" in told:
        lines.append(f"router {told['router_id'][:8]}, arrived {_seconds(told['age_s'])} ago")
        lines += [f"  +{_seconds(event['after_s']):<9} {_event(event)}" for event in told["events"]]
        if told["events_left_out"]:
            lines.append(f"  ({told['events_left_out']} events in between are not kept)")
    else:
        owner = told["sequences"][0]["router_id"][:8]
        lines.append(f"of router {owner}; the one that answered, {told['router_id'][:8]}, has only the replicas' word")
    for sequence in told["sequences"]:
        lines += _sequence(sequence)
    lines.append("where to look:" if told["findings"] else "nothing took long")
    for finding in told["findings"]:
        knobs = f" -> {', '.join(finding['knobs'])}" if finding["knobs"] else ""
        lines.append(f"  {_seconds(finding['seconds']):>8}  {finding['what']}{knobs}")
    return "\n".join([*lines, *_silent(told)])


def _living(request: Mapping[str, Any]) -> str:
    replica = request["replica_id"] or "-"
    return (
        f"{request['request_id'][:42]:<42} {request['router_id'][:8]:<8} {replica[:12]:<12} "
        f"{_seconds(request['age_s']):>8} {request.get('output_tokens', 0):>6}  {_state(request)}"
    )


def _sequence(sequence: Mapping[str, Any]) -> Iterable[str]:
    """A bar a stage, in the place that it has in the whole."""
    reason = f", {sequence['finish_reason']}" if sequence.get("finish_reason") else ""
    yield f"sequence {sequence['index']} at {sequence['replica_id'][:12]}: {sequence['state']}{reason}"
    whole, before = sequence["total_s"], 0.0
    for stage in STAGES:
        if (seconds := sequence["stages_s"].get(stage)) is None:
            continue
        start, end = (round(_BAR * edge / whole) if whole else 0 for edge in (before, before + seconds))
        bar = " " * start + "#" * max(end - start, 1 if seconds else 0)
        yield f"  {stage:<8} {_seconds(seconds):>8} |{bar[:_BAR]:<{_BAR}}| {_of_stage(stage, sequence)}".rstrip()
        before += seconds
    if waits := sequence["waits_s"]:
        lacked = ", ".join(f"{cause} {_seconds(seconds)}" for cause, seconds in waits.items())
        yield f"  lacked {lacked}{' (while put back as well)' if sequence['num_preemptions'] else ''}"
    for preemption in sequence["preemptions"]:
        at = f" at +{_seconds(preemption['after_s'])}" if "after_s" in preemption else ""
        yield f"  put back{at} for {preemption['by'] or 'itself'}, {preemption['lost_tokens']} tokens given up"


def _of_stage(stage: str, sequence: Mapping[str, Any]) -> str:
    match stage:
        case "queued" if sequence["grammar_s"]:
            return f"grammar {_seconds(sequence['grammar_s'])}"
        case "prefill" if "prompt_tokens" in sequence:
            tokens = f"{sequence['prompt_tokens']} tokens, {sequence['cached_tokens']} cached"
            return f"{tokens}, {sequence['num_chunks']} pieces"
        case "decode" if "output_tokens" in sequence:
            return f"{sequence['output_tokens']} tokens"
    return ""


def _state(told: Mapping[str, Any]) -> str:
    if told["waits_for"] is None:
        return str(told["state"])
    return f"{told['state']}, waits {_seconds(told['since_s'])} for {told['waits_for']}"


def _event(event: Mapping[str, Any]) -> str:
    """In words; what was seen of the replicas behind it."""
    details = {key: value for key, value in event.items() if key not in ("after_s", "what", "replica", "replicas")}
    text = str(event["what"]) + (f" at {event['replica'][:12]}" if event.get("replica") else "")
    text += "".join(f", {key.replace('_', ' ')} {value}" for key, value in details.items() if value != "")
    if seen := event.get("replicas"):
        text += "; saw " + ", ".join(map(_seen, seen))
    return text


def _seen(replica: Mapping[str, Any]) -> str:
    name = replica["replica"][:12]
    load = ""
    if "outstanding_tokens" in replica:
        load = f"{replica['outstanding_tokens']} tokens, queue {replica['queued']}/{replica['cap']}"
    return f"{name} ({', '.join(filter(None, [load, replica.get('not', '')]))})"


def _silent(told: Mapping[str, Any]) -> list[str]:
    silent = told["silent_replicas"]
    return (
        [f"no answer from {', '.join(name[:12] for name in silent)}: what it knows is missing here"] if silent else []
    )


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
