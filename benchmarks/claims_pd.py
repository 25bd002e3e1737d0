"""Claims of prefill/decode disaggregation: the decision for each request, and what goes wrong at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from benchmarks import kv_kills, pd_decision, pd_faults
from benchmarks.claims import Measured, Skip, claim
from replica.arena_map import HAS_ARENAS


@claim("pd.decision")
def decision(full: bool) -> Iterator[tuple[str, Measured]]:
    """1P3D in virtual time, ten loads: mean TTFT of `auto` over the better of `always` and `never`."""
    for trace, scale in pd_decision.SCALES.items():
        try:
            rows = pd_decision.rows_of(trace, pd_decision.FOLDER, 500 if full else 100)
        except OSError:
            continue
        for point in pd_decision.points(rows, scale):
            note = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in point.ttft_s.items())
            note += f"; {100 * point.remote_share:.0f} % remote"
            yield f"{trace}.{point.load}", Measured(point.ratio, "x the better of both", 1.05, note=note)


@claim("pd.kills")
def kills(full: bool) -> Iterator[tuple[str, Measured]]:
    """A live 1P2D on two Ray nodes: `kill -9` of P, D and each connector at each step of a hand-over, at moments that
    are seen, a link that swallows, connectors that stand still. Each answer is right or a clear error, nothing is left.
    """
    if not HAS_ARENAS:
        raise Skip("arenas of KV blocks need Linux")
    names = list(pd_faults.PD_FAULTS) if full else list(pd_faults.PD_SHORT)
    found = asyncio.run(kv_kills.run_pd(names, 1))
    yield "wrong", Measured(len(found.wrong) + len(found.errors), "streams", 0, note=str(found))
    yield "left", Measured(len(found.left) + found.most_stranded, "things", 0)
    yield "missed", Measured(len(found.missed), "faults", 0)
