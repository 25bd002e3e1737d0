"""Group G, the part that needs no Ray: health, metrics and logs of what is deployed. Named by case.

The others: G-03 and G-06 in tests/unit/test_k8s_probe.py; G-04 and G-07 for manifests in tests/unit/test_k8s.py, for
sizes in test_shard.py; G-10 in tests/cluster/test_drain.py and test_k8s_live.py; others in
tests/cluster/test_group_g.py. G-01 needs KubeRay's operator, which deploys again after a head without kept state.
"""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from router.dispatcher import DispatcherConfig
from tests.api.calls import COMPLETIONS, complete
from tests.api.harness import ApiUnderTest, fake_api

SECRET = "the prompt of somebody"


def series(api: ApiUnderTest) -> set[str]:
    """Names with labels of everything that is exported."""
    text = api.http.get("/metrics").text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def engines(api: ApiUnderTest) -> set[str]:
    return {found[1] for name in series(api) if (found := re.search('engine="([^"]*)"', name))}


def test_g09_a_dead_engine_makes_health_bad_and_lists_no_model() -> None:
    with fake_api(dispatcher=DispatcherConfig(resume_wait_s=0.0)) as api:
        assert api.http.get("/health").status_code == 200
        api.replicas[0].runner.num_failures = 1000
        assert complete(api, max_tokens=4).status_code >= 500
        api.until(lambda: not api.backend.health().ok)
        health = api.http.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"]
        with pytest.raises(Exception, match="steps failed"):
            api.peek(api.replicas[0].engine.check_health)  # by which Serve replaces it
        assert api.http.get("/v1/models").status_code == 503, "models that nobody can run are not listed"


def test_g09_no_traffic_comes_to_the_dead_one_of_two() -> None:
    with fake_api(num_replicas=2) as api:
        api.replicas[0].runner.num_failures = 1000
        for number in range(10):
            assert complete(api, prompt=f"number {number}", max_tokens=3).status_code == 200
        api.until(lambda: api.backend.health().detail["replicas_up"] == 1)
        steps = api.peek(lambda: len(api.replicas[0].runner.plans))
        for number in range(10):
            assert complete(api, prompt=f"later {number}", max_tokens=3).status_code == 200
        assert api.peek(lambda: len(api.replicas[0].runner.plans)) == steps


def test_g15_who_is_gone_has_no_series_and_requests_make_none() -> None:
    """The case scales five times and sends 100,000 requests; here two of three go, as Serve tells it, and 100."""
    with fake_api(num_replicas=3) as api:
        for name in ("replica-1", "replica-2"):
            assert complete(api, prompt=name).status_code == 200
        assert {f"replica-{number}" for number in range(3)} == engines(api)
        for each in api.replicas[1:]:
            api.run(each.die())
        api.peek(partial(api.cluster.publish_view, "replica-1", "replica-2"))
        api.until(lambda: len(api.backend.dispatcher.views) == 1)
        assert engines(api) == {"replica-0"}, "gone after one scrape"
        before = series(api)
        for number in range(100):
            assert complete(api, prompt=f"{SECRET} {number}", max_tokens=1, user=f"u{number}").status_code == 200
        after = series(api)
        assert after == before, "the number of series is that of replicas, not of requests"
        assert SECRET not in " ".join(after)


@pytest.mark.slow
def test_g16_a_flood_of_refusals_writes_less_than_a_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = DispatcherConfig(max_held_requests=1)
    with fake_api(is_open=False, cap=8, max_num_seqs=4, dispatcher=config) as api, ThreadPoolExecutor(60) as pool:
        body = {"prompt": SECRET, "max_tokens": 2}
        sent = [pool.submit(httpx.post, api.url + COMPLETIONS, json=body, timeout=60) for _ in range(60)]
        api.until(lambda: sum(each.done() for each in sent) >= 12, timeout_s=30)  # a fifth is refused
        caplog.clear()
        refused = sum(each.done() for each in sent)
        for _ in range(100):
            api.http.get("/health")
            api.http.get("/metrics")
        refusals = [httpx.post(api.url + COMPLETIONS, json=body, timeout=60).status_code for _ in range(50)]
        assert refusals == [503] * 50
        lines = [
            record for record in caplog.records if record.name.startswith(("router", "replica", "cluster", "shoal"))
        ]
        assert len(lines) <= 50
        assert SECRET not in caplog.text
        assert not [line for line in lines if "/health" in line.getMessage() or "/metrics" in line.getMessage()]
        kinds = [record.msg for record in lines if record.levelno >= logging.WARNING]
        assert len(kinds) == len(set(kinds)), "a repeated warning is rate limited"
        api.replicas[0].runner.open()
        answers = [each.result().status_code for each in sent]
        assert answers.count(200) + answers.count(503) == 60
        assert answers.count(503) >= refused - 1
