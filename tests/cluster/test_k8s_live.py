"""The rendered RayService on a Ray of several nodes, each in namespaces of its own, as KubeRay's operator would run it.
A slice: one router, two replicas, fewer and shorter streams; the rest is in `make claims ONLY=k8s`.
"""

from __future__ import annotations

import pytest

from benchmarks import k8s_live

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]


def test_a_drain_and_an_edit_break_no_stream() -> None:
    """G-10 on several nodes: a pod with streams is told to stop, then `serveConfigV2` is changed."""
    try:
        figures = k8s_live.played("drain", "edit", *k8s_live.SPARE, "--streams", "16", "--tokens", "400", timeout_s=200)
    except k8s_live.NotHere as why:
        pytest.skip(str(why))
    assert figures.keys() == {"up", "drain.replica", "edit.live"}
    for name, figure in figures.items():
        assert figure.get("errors", []) == [], name
    assert figures["drain.replica"]["num_on_it"] >= 4, "the pod that went had nothing to do"
