"""Claims of the chart: how little it asks for, that what it gives is valid, and that what can not work is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks import k8s_live, scaling, servers
from benchmarks.claims import Measured, Skip, claim
from benchmarks.scaling_rival import ServeSettings

_CI = servers.ROOT / "k8s" / "chart" / "shoal" / "ci"


def _lines(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("#"))


@claim("k8s.lines")
def lines(full: bool) -> Iterator[tuple[str, Measured]]:
    """Lines of YAML that a person writes. Others, counted the same way: 34 to 90, and 62 to 210."""
    yield "replicas_tp2", Measured(float(_lines(_CI / "n-replicas-tp2.yaml")), "lines of values", 12)
    yield "disaggregated", Measured(float(_lines(_CI / "pd-1p2d.yaml")), "lines of values", 20)


def _tests(*arguments: str) -> tuple[int, int, str]:
    """Passed, everything else, pytest's verdict. Raises Skip if helm could not be had."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=servers.ROOT, capture_output=True, text=True, check=False)
    verdict = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    if "could not be fetched" in done.stdout:
        raise Skip("helm and kubectl could not be fetched")
    counts = {"passed": 0, "failed": 0, "error": 0, "errors": 0}
    words = verdict.replace(",", "").split()
    for number, word in pairwise(words):
        if word in counts:
            counts[word] = int(number)
    return counts["passed"], sum(counts.values()) - counts["passed"] + (done.returncode not in (0, 1)), verdict


@claim("k8s.render")
def render(full: bool) -> Iterator[tuple[str, Measured]]:
    """Every shape, by helm 3 and 4, against the CRD, three versions of Kubernetes, operator, Serve and our config."""
    passed, others, verdict = _tests("tests/k8s/test_chart.py", "tests/k8s/test_generated.py")
    yield "", Measured(float(others), "checks fail", 0, note=f"{passed} checks; {verdict}")


@claim("k8s.broken")
def broken(full: bool) -> Iterator[tuple[str, Measured]]:
    """Values that can not work: how many are not refused with the sentence that names what is needed."""
    number = len(list((_CI / "broken").glob("*.yaml")))
    _, others, verdict = _tests("tests/k8s/test_broken.py")
    yield "", Measured(float(others), "not refused", 0, note=f"{number} files; {verdict}")


@claim("k8s.scaling")
def scale(full: bool) -> Iterator[tuple[str, Measured]]:
    """Share of requests within both targets, ours minus Serve's default policy with the cheapest target that pays for
    at least as many replica-hours. The short form begins near the target that FULL=1 finds.
    """
    for name, near in (("step", 48.0), ("spike", 48.0), ("azure" if full else "azure-quarter", 32.0)):
        try:
            requests = scaling.requests_of(scaling.SCENARIOS[name]())
        except FileNotFoundError as error:
            raise Skip(f"the public trace is absent: {error.filename}") from None
        ours = scaling.simulate(requests, scaling.ours())
        first = scaling.TARGETS[0] if full else near
        *_, (target, rival) = scaling.rivals(requests, ours.replica_hours, ServeSettings(), first)
        note = (
            f"{100 * ours.in_time:.1f} % in {ours.replica_hours:.3f} h; Serve with target {target:g}: "
            f"{100 * rival.in_time:.1f} % in {rival.replica_hours:.3f} h"
        )
        is_fair = rival.replica_hours >= ours.replica_hours
        gain = 100 * (ours.in_time - rival.in_time)
        yield name, Measured(gain if is_fair else -100.0, "% of requests", 0, at_most=False, note=note)


def _live(bounds: dict[str, int], *arguments: str) -> Iterator[tuple[str, Measured]]:
    """`bounds`: figure -> streams that must have been on what was ended."""
    try:
        found = k8s_live.played(*arguments)
    except k8s_live.NotHere as why:
        raise Skip(str(why)) from None
    for name, least in bounds.items():
        one = found[name]
        note = (
            f"of {one['num_streams']} streams; {one['note']}; longest pause {one['pause_s']:.1f} s {one['errors'][:1]}"
        )
        suffix = name.partition(".")[2]
        yield f"{suffix}.errors", Measured(len(one["errors"]), "errors", 0, note=note)
        yield f"{suffix}.took", Measured(one["took_s"], "s until all was done")
        if least:
            yield f"{suffix}.streams", Measured(one["num_on_it"], "streams on it", least, at_most=False)


@claim("k8s.drain")
def drain(full: bool) -> Iterator[tuple[str, Measured]]:
    """A pod of the rendered RayService on Ray nodes is told to stop, as by the kubelet, under 32 streams; fake runner.
    In full: also a router's pod, and without a spare pod.
    """
    size = ("--tokens", "1500")
    yield from _live({"drain.replica": 10}, "drain", *k8s_live.SPARE, *size)
    if full:
        pods = ("--pods", '{"router": 2, "both": 2}', "--replicas", '{"router": 2, "both": 2}')
        for name, measured in _live({"drain.replica": 10, "drain.router": 0}, "drain", "router", *pods, *size):
            yield f"full_pods.{name}", measured


@claim("k8s.edit")
def edit(full: bool) -> Iterator[tuple[str, Measured]]:
    """`serveConfigV2` is changed under 32 streams: a live knob, then one for which every process is replaced."""
    yield from _live({"edit.live": 0, "edit.roll": 0}, "edit", "roll", *k8s_live.SPARE, "--tokens", "1500")


@claim("k8s.head")
def head(full: bool) -> Iterator[tuple[str, Measured]]:
    """SIGKILL to the head's pod, its state in Redis: streams on workers, and whether the new one can replace a pod."""
    yield from _live({"head.streams": 0, "head.drain_after": 10}, "head", *k8s_live.SPARE, "--tokens", "1500")
