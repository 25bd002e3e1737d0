"""`make claims [ONLY=prefix] [FULL=1]`: measure again what the README says, one line a claim.

    line.kill          0 errors (<= 0) ok

`ok`, `short` (measured, and the bound is missed) or `skipped: why`. The exit code is 1 if anything is short. Short
forms fit a minute each; FULL=1 runs what the issue asks for in full.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec


class Skip(Exception):
    """A claim that cannot be measured here; the text says why."""


class Measured(msgspec.Struct, frozen=True):
    """One figure. `bound` is what was promised; `at_most` says on which side of it `value` has to be. None: only
    told.
    """

    value: float
    unit: str
    bound: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def is_ok(self) -> bool:
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound


#: measures one or several figures: (suffix, figure); an empty suffix is the claim itself
Measure = Callable[[bool], Iterator[tuple[str, Measured]]]
CLAIMS: dict[str, Measure] = {}


def claim(name: str) -> Callable[[Measure], Measure]:
    """Register a measurement under a dotted name."""

    def register(measure: Measure) -> Measure:
        assert name not in CLAIMS, f"two claims are called {name}"
        CLAIMS[name] = measure
        return measure

    return register


def format_line(name: str, measured: Measured) -> str:
    """The line for one figure."""
    sign = "" if measured.bound is None else f" ({'<=' if measured.at_most else '>='} {measured.bound:g})"
    value = f"{measured.value:.4g}" if abs(measured.value) < 1000 else f"{measured.value:.0f}"
    verdict = "ok" if measured.is_ok else "short"
    note = f"   # {measured.note}" if measured.note else ""
    return f"{name:<28} {value} {measured.unit}{sign} {verdict}{note}"


def run(only: str, full: bool) -> int:
    """Measure all claims whose name begins with `only`. Returns the number that are short."""
    names = [name for name in CLAIMS if name.startswith(only)]
    if not names:
        groups = sorted({name.partition(".")[0] for name in CLAIMS})
        print(f"no claim begins with {only!r}; there are: {', '.join(groups)}", file=sys.stderr)
        return 1
    num_short = 0
    for name in names:
        started = time.monotonic()
        try:
            for suffix, measured in CLAIMS[name](full):
                print(format_line(f"{name}.{suffix}" if suffix else name, measured), flush=True)
                num_short += not measured.is_ok
        except Skip as reason:
            print(f"{name:<28} skipped: {reason}", flush=True)
        except Exception:  # a claim that cannot be measured is not kept
            traceback.print_exc()
            print(f"{name:<28} short   # raised, see above", flush=True)
            num_short += 1
        print(f"  {name} took {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return num_short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="prefix of the names, e.g. line or line.kill")
    parser.add_argument("--full", action="store_true", help="the long form of each")
    options = parser.parse_args()
    import benchmarks.claims_admission
    import benchmarks.claims_api
    import benchmarks.claims_drain
    import benchmarks.claims_engine
    import benchmarks.claims_findings
    import benchmarks.claims_k8s
    import benchmarks.claims_kv
    import benchmarks.claims_line
    import benchmarks.claims_load
    import benchmarks.claims_models
    import benchmarks.claims_pd
    import benchmarks.claims_recovery
    import benchmarks.claims_tp  # noqa: F401  # they register on import

    return 1 if run(options.only, options.full) else 0


if __name__ == "__main__":
    # the module that registers imports this one by its real name; a second copy called __main__ would stay empty
    from benchmarks.claims import main as real_main

    raise SystemExit(real_main())
