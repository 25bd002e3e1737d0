"""Claims of the queue cap on a live cluster: never passed, used while requests are refused; what refusing costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from benchmarks import flood, flood_streams, refusal_cost
from benchmarks.claims import Measured, claim
from replica.permits import LEASE_S

#: in the long form
FULL_CLIENTS = 2000
FULL_SECONDS = 60.0


def _flooded(name: str, full: bool) -> Iterator[tuple[str, Measured]]:
    shape = flood.SHAPES[name]
    if full and shape.num_clients >= 500:
        shape = msgspec.structs.replace(shape, num_clients=FULL_CLIENTS, seconds=FULL_SECONDS)
    found = flood.measure(shape)
    broken = {code: count for code, count in found.codes.items() if code not in (200, 503)}
    note = f"{shape.num_clients} clients on {shape.num_routers} routers; answers {found.codes}"
    yield "queued", Measured(found.most_queued, "queued at most", shape.cap, note=note)
    yield "places", Measured(found.most_places, "queued and reserved at most", shape.cap)
    note = (
        f"of each replica {', '.join(f'{replica.use:.4f}' for replica in found.replicas)} over {found.span_s:.1f} s; "
        f"longest time without a refusal {found.longest_without_s:.2f} s"
    )
    yield "used", Measured(found.least_use, "of the cap queued on average", 0.95, at_most=False, note=note)
    wrong = found.wrong_answers + found.without_retry_after
    if not shape.kills_router:  # the dead one's clients see their connection break, or a 500 of Serve's proxy
        wrong += sum(broken.values())
    yield "wrong", Measured(wrong, "answers wrong, or refusals without Retry-After", 0, note=f"others: {broken}")
    note = f"longest answer {found.max_wait_s:.1f} s"
    yield "hanging", Measured(found.num_hanging, "clients without an answer", 0, note=note)
    yield "left", Measured(found.left + found.permits_left, "sequences, blocks or permits left behind", 0)
    if shape.kills_router:
        # and a second for the readings, which come through the flooded proxy
        bound = LEASE_S + 1.0
        yield "back", Measured(found.permits_back_s, "s until every place was queued again", bound)
    if shape.num_blocks < 100:
        fewest = min(replica.preemptions for replica in found.replicas)
        yield "preemptions", Measured(fewest, "preemptions at each replica", 20, at_most=False)


@claim("admission.cap")
def cap(full: bool) -> Iterator[tuple[str, Measured]]:
    """Four routers, cap 64: the replicas' own maxima, and the share of the cap that is used while it refuses."""
    yield from _flooded("cap", full)


@claim("admission.one_router")
def one_router(full: bool) -> Iterator[tuple[str, Measured]]:
    """The same with all clients at one of the four routers, past Serve's proxy."""
    yield from _flooded("one_router", full)


@claim("admission.cap1")
def cap1(full: bool) -> Iterator[tuple[str, Measured]]:
    """The same with a cap of 1: fewer places than routers."""
    yield from _flooded("cap1", full)


@claim("admission.preempted")
def preempted(full: bool) -> Iterator[tuple[str, Measured]]:
    """The same with so few KV blocks that sequences are put back all the time."""
    yield from _flooded("preempted", full)


@claim("admission.router_killed")
def router_killed(full: bool) -> Iterator[tuple[str, Measured]]:
    """kill -9 of one of four routers in the flood: its permits are free again, every client gets an answer."""
    yield from _flooded("router_killed", full)


@claim("admission.refused_cpu")
def refused_cpu(full: bool) -> Iterator[tuple[str, Measured]]:
    """A refused request in the router's own code, in process, by body."""
    from cluster import model_store
    from router.tokenizer import Tokenizer

    codec = Tokenizer.from_folder(model_store.resolve("smollm2-135m-instruct"))
    found = asyncio.run(refusal_cost.measure(codec, 21 if full else 7, 2000 if full else 400))
    for name, cpu_us in found.items():
        yield name, Measured(cpu_us, "us CPU a refusal", 300)


@claim("admission.flood")
def streams(full: bool) -> Iterator[tuple[str, Measured]]:
    """Eight steady streams beside one client, then beside clients that send as fast as they are answered."""
    for name, is_direct in (("proxy", False), ("direct", True)):
        found = flood_streams.measure(is_direct, 2000 if full else 600)
        quiet, flooded = found.quiet.gap_ms, found.flooded.gap_ms
        note = f"p99 {quiet['p99']:.1f} -> {flooded['p99']:.1f} ms, p50 {quiet['p50']:.1f} -> {flooded['p50']:.1f}"
        yield f"{name}.gap", Measured(found.gap_ratio, "x gap p99 without flood", 1.2, note=note)
        note = (
            f"TTFT {1000 * found.flooded.ttft_s:.0f} ms on average, of it queued {1000 * found.flooded.queue_s:.0f} "
            f"and prefill {1000 * found.flooded.prefill_s:.0f}"
        )
        # held for `admission_wait_ms` at most before it is queued
        yield f"{name}.ttft", Measured(1000 * found.unexplained_s, "ms of TTFT not in the queue", 200, note=note)
        note = f"{found.codes}; Serve's proxy beside it {found.cpu_us('ProxyActor'):.0f} us"
        yield f"{name}.router", Measured(found.cpu_us(":Router"), "us CPU of the router process a refusal", note=note)
        failed = found.quiet.num_failed + found.flooded.num_failed
        yield f"{name}.failed", Measured(failed, "streams failed", 0)
