"""Claims of prefill/decode disaggregation: the decision for each request."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import pd_decision
from benchmarks.claims import Measured, claim


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
