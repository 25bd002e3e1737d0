"""ASYNC. `shoal why`: where the time of a request went, drawn in text, and which knob to look at."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from cluster.status import NotFoundError, fetch_json
from replica.errors import ConfigError
from replica.stages import STAGES
from router.breakdown import PARTS

_BAR = 40
#: of what a client may send as X-Request-Id; ids of our own are shorter
_MAX_ID_CHARS = 128
#: what the router gives at most
_MAX_LIMIT = 1000
#: with two routers, who are asked at random, one question in a thousand fails then; with four one in eighteen
_MOST_QUESTIONS, _PATIENCE_S = 10, 3.0


def why(host: str, port: int, request_id: str | None, api_key: str | None = None, *, limit: int = 50) -> dict[str, Any]:
    """Ask the router behind `host:port`: for a list, or for a request by its id or its X-Request-Id. Raises ShoalError
    with a sentence.
    """
    if request_id is None:
        return fetch_json(host, port, f"/debug/requests?limit={limit}", api_key, needs=("requests", "silent_replicas"))
    if not (0 < len(request_id) <= _MAX_ID_CHARS and request_id.isascii() and request_id.isprintable()):
        raise ConfigError(
            f"{request_id[:60]!a} is no id of a request; allowed: 1 to {_MAX_ID_CHARS} printable ASCII characters, "
            "or none at all for a list"
        )
    return _ask_routers(host, port, f"/debug/requests/{quote(request_id, safe='')}", api_key)


def _ask_routers(host: str, port: int, path: str, api_key: str | None) -> dict[str, Any]:
    """Behind a proxy each question reaches one router, and only that of the request knows all of it. A fresh
    connection may reach another one.
    """
    best: dict[str, Any] | None = None
    unknown: NotFoundError | None = None
    until = time.monotonic() + _PATIENCE_S
    for _ in range(_MOST_QUESTIONS):
        try:
            best = fetch_json(host, port, path, api_key, needs=("sequences", "silent_replicas"))
        except NotFoundError as error:
            unknown = error
        if (best is not None and "age_s" in best) or time.monotonic() > until:
            break
    if best is None:
        assert unknown is not None
        raise unknown
    return best


def format_living(told: Mapping[str, Any]) -> str:
    """One line a request, the oldest first; with a word on those that are left out."""
    lines = [f"{'request':<42} {'router':<8} {'replica':<12} {'age':>8} {'tokens':>6}  state"]
    lines += map(_living, told["requests"])
    num_shown, num_all = len(told["requests"]), told.get("num_requests", 0)
    if not told["requests"]:
        lines.append("no request is unfinished")
    elif num_shown < num_all:
        more = f"--limit {min(num_all, _MAX_LIMIT)} shows " + ("all" if num_all <= _MAX_LIMIT else "the most there is")
        lines.append(f"the oldest {num_shown} of {num_all} unfinished requests; {more}")
    return "\n".join([*lines, *_silent(told)])


def format_request(told: Mapping[str, Any]) -> str:
    """The timeline of one request."""
    head = f"{told['request_id']}: {_state(told)}"
    if told.get("outcome"):
        head += f", {told['outcome']}"
    lines = [head]
    if "age_s" in told:
        header_id = f", X-Request-Id {told['x_request_id']}" if told.get("x_request_id") else ""
        lines.append(f"router {told['router_id'][:8]}, arrived {_seconds(told['age_s'])} ago{header_id}")
        if others := told.get("same_x_request_id"):
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            lines.append(f"the client gave other requests the same X-Request-Id: {', '.join(others[:3])}{more}")
        lines += [f"  +{_seconds(event['after_s']):<9} {_event(event)}" for event in told["events"]]
        if told["events_left_out"]:
            lines.append(f"  ({told['events_left_out']} events in between are not kept)")
    elif told["sequences"]:
        owner = told["sequences"][0]["router_id"][:8]
        lines.append(f"of router {owner}; the one that answered, {told['router_id'][:8]}, has only the replicas' word")
    if parts := told.get("parts_s"):
        lines.append(_parts(parts))
    for sequence in told["sequences"]:
        lines += _sequence(sequence)
    lines.append("where to look:" if told["findings"] else "nothing took long")
    for finding in told["findings"]:
        knobs = f" -> {', '.join(finding['knobs'])}" if finding["knobs"] else ""
        lines.append(f"  {_seconds(finding['seconds']):>8}  {finding['what']}{knobs}")
    return "\n".join([*lines, *_silent(told)])


def _parts(parts: Mapping[str, float]) -> str:
    """They add up to the whole; what of a transfer was hidden lies beside the others."""
    whole = parts["total"]
    named = [f"{name.replace('_', ' ')} {_seconds(parts[name])}" for name in PARTS if parts[name] >= 0.0005]
    hidden = f" (transfer hidden {_seconds(parts['transfer_hidden'])})" if parts["transfer_hidden"] else ""
    return f"{_seconds(whole)} in all: {', '.join(named)}{hidden}"


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
    whole = _seconds(told["since_s"])
    # what it lacks now may not be what it lacked first
    lately = None if told.get("lacks_since_s") is None else _seconds(told["lacks_since_s"])
    last = "" if lately in (None, whole) else f", the last {lately}"
    return f"{told['state']}, waits {whole}{last} for {told['waits_for']}"


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
        if sent := replica.get("unanswered"):  # not in its queue yet, and perhaps never: so beside the cap
            load += f" and {sent} sent there without an answer yet"
        if node := replica.get("kv_node"):
            load += f", KV of node {node[:12]}"
    return f"{name} ({', '.join(filter(None, [load, replica.get('not', '')]))})"


def _silent(told: Mapping[str, Any]) -> list[str]:
    silent = told["silent_replicas"]
    return (
        [f"no answer from {', '.join(name[:12] for name in silent)}: what it knows is missing here"] if silent else []
    )


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
