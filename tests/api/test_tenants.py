"""Tenants through HTTP, router and engines: whose key it is, 429 with a reason, priorities within a range, tenants that
change while it runs; and whatever ends a request, its place is free again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig, load
from cluster.tenant_file import in_force, parse
from router.tenant_desk import TenantDesk
from router.tenant_source import TenantRules, TenantSource
from router.tenants import hashed
from tests.api.harness import ApiUnderTest, fake_api
from tests.cluster.harness import until

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
CONFIG = load(
    {
        "http": {"api_keys": ["operator"]},
        "tenants": {
            "named": {
                "small": {"keys": [hashed("k-small")], "max_concurrent_requests": 1, "weight": 0.5},
                "metered": {"keys": [hashed("k-metered")], "tokens_per_minute": 1},
                "urgent": {"keys": [hashed("k-urgent")], "priority": [-2, 3]},
            }
        },
    }
)


def desk_of(config: ClusterConfig) -> TenantDesk:
    start = config.model_dump()
    return TenantDesk(in_force(start, {}, {}), config.tenants.needs_keys(config.http.api_keys))


@pytest.fixture(scope="module")
def _api() -> Iterator[ApiUnderTest]:
    with fake_api(
        tenants=desk_of(CONFIG), scheduler={"policy": "priority"}, policy="priority", admin_endpoints=True
    ) as a:
        yield a


@pytest.fixture
def api(_api: ApiUnderTest) -> Iterator[ApiUnderTest]:
    yield _api
    _api.check_idle()


@pytest.fixture
def gated() -> Iterator[ApiUnderTest]:
    """Steps wait for the runner's gate."""
    with fake_api(tenants=desk_of(CONFIG), is_open=False) as found:
        yield found


def asked(api: ApiUnderTest, key: str | None, **changes: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return api.http.post("/v1/completions", json=BODY | changes, headers=headers)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


class Client(threading.Thread):
    """One streaming request of a tenant on a thread of its own. `leave`: closes the connection."""

    def __init__(self, api: ApiUnderTest, key: str, **changes: Any) -> None:
        super().__init__()
        self._api, self._body, self._key = api, BODY | {"stream": True} | changes, key
        self.text = ""
        self.status = 0
        self.start()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        with self._api.client() as client:
            answer = client.post("/v1/completions", json=self._body, headers=headers)
            self.status, self.text = answer.status_code, answer.text


def running(api: ApiUnderTest, tenant: str) -> int:
    return api.peek(lambda: api.tenants.figures()[tenant].num_running)


def wait_for_running(api: ApiUnderTest, tenant: str, number: int) -> None:
    api.until(lambda: api.tenants.figures()[tenant].num_running == number)


@pytest.mark.parametrize("key", [None, "wrong", hashed("k-small"), "K-SMALL"])
def test_a_wrong_key_is_401(api: ApiUnderTest, key: str | None) -> None:
    answer = asked(api, key)
    assert code(answer) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "k-small" not in answer.text


def test_each_key_counts_for_its_tenant(api: ApiUnderTest) -> None:
    before = {name: figures.num_prompt_tokens for name, figures in api.peek(api.tenants.figures).items()}
    for key in ("operator", "k-small", "k-small", "k-urgent"):
        answer = asked(api, key)
        assert answer.status_code == 200
    usage = answer.json()["usage"]
    for tenant, number in (("default", 1), ("small", 2), ("urgent", 1)):
        gained = api.metric("shoal_tenant_prompt_tokens_total", tenant=tenant) - before[tenant]
        assert gained == number * usage["prompt_tokens"], tenant
        assert api.metric("shoal_tenant_generation_tokens_total", tenant=tenant) >= number * 4
        assert api.metric("shoal_tenant_requests_running", tenant=tenant) == 0


def test_429_at_the_limit_of_requests_says_when_to_come_again(gated: ApiUnderTest) -> None:
    api = gated
    client = Client(api, "k-small")
    wait_for_running(api, "small", 1)
    answer = asked(api, "k-small")
    assert code(answer) == (429, "tenant_concurrency")
    assert answer.json()["error"]["type"] == "rate_limit_exceeded"
    assert "'small' has 1 requests under way; allowed: 1." in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    others = Client(api, "k-urgent")  # nobody else is refused for it
    wait_for_running(api, "urgent", 1)
    api.replicas[0].runner.open()
    for each in (client, others):
        each.join(30)
        assert each.status == 200
        assert each.text.endswith("data: [DONE]\n\n")
    assert asked(api, "k-small").status_code == 200
    assert api.metric("shoal_tenant_refusals_total", tenant="small", reason="tenant_concurrency") == 1
    assert api.metric("vllm:admission_rejections_total", reason="tenant_concurrency") == 1


def test_a_client_that_leaves_gives_its_place_back(gated: ApiUnderTest) -> None:
    api = gated

    async def come_and_go() -> None:
        async with api.async_client() as client:
            headers = {"Authorization": "Bearer k-small"}
            request = client.build_request("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers)
            task = asyncio.create_task(client.send(request, stream=True))
            await until(lambda: api.tenants.figures()["small"].num_running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    api.run(come_and_go())
    wait_for_running(api, "small", 0)
    api.replicas[0].runner.open()
    assert asked(api, "k-small").status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0.5}, {"prompt": "x " * 20_000}, {"model": "other"}, {"stop": ["x"] * 99}, {"top_p": 9}],
)
def test_mistakes_take_no_place(api: ApiUnderTest, wrong: dict[str, Any]) -> None:
    assert 400 <= asked(api, "k-small", **wrong).status_code < 500
    assert running(api, "small") == 0
    assert asked(api, "k-small").status_code == 200


def test_tokens_of_a_minute_are_used_up(api: ApiUnderTest) -> None:
    first = asked(api, "k-metered")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == "0"
    answer = asked(api, "k-metered")
    assert code(answer) == (429, "tenant_tokens")
    used = first.json()["usage"]["total_tokens"]
    # a minute a token, and it may be full again before that of the debt is
    assert 60 * (used - 1) <= int(answer.headers["retry-after"]) <= 60 * used
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
    assert asked(api, "operator").headers.get("x-ratelimit-limit-tokens") is None


def test_a_priority_outside_of_the_range_is_400(api: ApiUnderTest) -> None:
    answer = asked(api, "k-urgent", priority=4)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
    assert answer.json()["error"]["message"] == "priority is 4; allowed for the tenant 'urgent': -2 to 3."
    assert asked(api, "k-urgent", priority=-2).status_code == 200
    assert asked(api, "operator", priority=99).status_code == 200


def test_a_tenants_key_does_not_open_what_concerns_all(api: ApiUnderTest) -> None:
    headers = {"Authorization": "Bearer k-urgent"}
    assert code(api.http.post("/reset_prefix_cache", headers=headers)) == (403, "operator_key_needed")
    assert code(api.http.get("/debug/requests", headers=headers)) == (403, "operator_key_needed")
    assert api.http.get("/v1/models", headers=headers).status_code == 200
    assert api.http.get("/debug/requests", headers={"Authorization": "Bearer operator"}).status_code == 200


def test_the_journal_says_whose_request_it_was(api: ApiUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        served = asked(api, "k-urgent").json()["id"]
        asked(api, "k-urgent-wrong")
    told = api.http.get(f"/debug/requests/{served}", headers={"Authorization": "Bearer operator"}).json()
    assert told["events"][0] == {"after_s": 0.0, "what": "arrived", "tenant": "urgent"}
    assert "k-urgent" not in caplog.text + json.dumps(told)


# ---- the file ----


def write(folder: Path, version: int, text: str) -> None:
    """As a Kubernetes Secret is written: another folder, and the symlink to it replaced."""
    target = folder / f"..{version}"
    target.mkdir()
    (target / "tenants.yaml").write_text(text)
    link = folder / "..data.new"
    link.symlink_to(target.name)
    link.rename(folder / "..data")


def test_a_replaced_symlink_and_a_broken_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, f"one: {{keys: ['{hashed('k-one')}']}}")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    config = load({"tenants": {"file": str(tmp_path / "tenants.yaml"), "named": {"one": {"weight": 3}}}})
    desk = TenantDesk((), config.tenants.needs_keys(()))
    source = TenantSource(desk, TenantRules(parse, in_force), config.model_dump(), config.tenants.file)
    source.load()
    with fake_api(tenants=desk) as api:
        assert [asked(api, key).status_code for key in ("k-one", "k-two", None)] == [200, 401, 401]
        assert api.peek(lambda: desk.tenant("one").weight) == 3  # type: ignore[union-attr]

        write(tmp_path, 2, f"one: {{keys: ['{hashed('k-one')}']}}\ntwo: {{keys: ['{hashed('k-two')}'], weight: 2}}")
        api.run(source.look())
        assert [asked(api, key).status_code for key in ("k-one", "k-two")] == [200, 200]

        for version, broken in ((3, "one: {keys: ['k-secret']}"), (4, "one: [")):
            write(tmp_path, version, broken)
            api.run(source.look())
            api.run(source.look())
        assert [asked(api, key).status_code for key in ("k-one", "k-two")] == [200, 200]
        assert api.metric("shoal_tenant_file_ok") == 0
        assert api.metric("shoal_tenant_file_failures_total") == 2  # each once, however often it is looked at
        assert "one.keys: number 1 is no hash of a key; allowed: sha256:<64 hex digits>" in caplog.text
        assert "k-secret" not in caplog.text

        write(tmp_path, 5, f"two: {{keys: ['{hashed('k-two')}']}}")
        api.run(source.look())
        assert [asked(api, key).status_code for key in ("k-one", "k-two")] == [401, 200]
        assert api.metric("shoal_tenant_file_ok") == 1


def test_limits_that_change_while_a_stream_runs(gated: ApiUnderTest) -> None:
    api = gated
    client = Client(api, "k-urgent")
    wait_for_running(api, "urgent", 1)
    start = CONFIG.model_dump()
    source = TenantSource(api.tenants, TenantRules(parse, in_force), start, None)
    overlay = {"tenants": {"named": {"urgent": {"max_concurrent_requests": 1, "weight": 4}}}}
    api.peek(lambda: source.lay(overlay))
    assert code(asked(api, "k-urgent")) == (429, "tenant_concurrency")
    api.replicas[0].runner.open()
    client.join(30)
    assert client.status == 200
    assert client.text.endswith("data: [DONE]\n\n")
    wait_for_running(api, "urgent", 0)
    assert asked(api, "k-urgent").status_code == 200
