"""Which knobs are live, what lies over the configuration of the start, and what routers and replicas make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cluster import live_knobs
from cluster.allowed import allowed
from cluster.cli import main
from cluster.config import ClusterConfig, load
from cluster.process_sweep import record_children, running_drivers
from cluster.status import format_status
from cluster.tenant_config import TenantConfig
from replica.errors import ConfigError
from replica.messages import ReplicaId, ReplicaLoad, RequestId
from router.dispatcher import Dispatcher, DispatcherConfig
from router.instructions import Dispatch, Refuse
from router.placement import least_tokens, round_robin
from router.replica_view import ReplicaView
from tests.unit.http_fakes import Edge

START = load({"scheduler": {"watermark": 0.05}, "http": {"api_keys": ["secret"]}})


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("watermark", "watermark: unknown key; did you mean 'scheduler.watermark'?"),
        ("scheduler.max_num_seq", "did you mean 'scheduler.max_num_seqs'?"),
        ("router.max_queued_requests", "did you mean 'router.max_queued_requests_per_replica'?"),
        ("zzz", "zzz: unknown key; `shoal get` shows all of them"),
        ("scheduler", "scheduler: is a section; its keys: scheduler.policy, "),
        ("kv_cache.block_size", "kv_cache.block_size: needs a restart"),
        ("max_model_len", "max_model_len: needs a restart"),
        ("tensor_parallel_size", "needs a restart"),
        ("drain_s", "needs a restart"),
        ("http.api_keys", "needs a restart"),
    ],
)
def test_a_key_that_cannot_change_is_told_so(key: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked of a cluster: exit code 2."""
    assert main(["set", f"{key}=1", "--port", "1"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["set", "nonsense"], 2, "'nonsense': expected KEY=VALUE"),
        (["set", "scheduler.watermark=[", "--port", "1"], 2, "is not a YAML value"),
        (["set", "scheduler.watermark=0.1", "scheduler.watermark=0.2"], 2, "scheduler.watermark is given twice"),
        (["serve", "--print-config", "--set", "drain_s=1", "--set", "drain_s=2"], 2, "drain_s is given twice"),
        (["set", "scheduler.watermark=0.1", "--port", "1"], 1, "no `shoal serve` of this machine listens on port 1"),
        (["get", "scheduler.watermrk", "--port", "1"], 2, "did you mean 'scheduler.watermark'?"),
        (["get", "--port", "1"], 1, "no `shoal serve` of this machine listens on port 1"),
    ],
)
def test_wrong_usage(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(arguments) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"scheduler.watermark": 1.5}, "scheduler.watermark: .*less than 1.*got 1.5"),
        ({"scheduler.max_num_seqs": "many"}, "scheduler.max_num_seqs: .*integer.*got 'many'"),
        ({"scheduler.policy": "lifo"}, "scheduler.policy: .*got 'lifo'"),
        ({"scheduler.watermark": 0.1, "scheduler.max_long_partial_prefills": 2}, "long_prefill_token_threshold is 0"),
        ({"scheduler.watermark": "auto"}, "scheduler.watermark: .*got 'auto'"),
    ],
)
def test_the_whole_is_checked_and_a_rule_between_keys_does_not_print_the_section(
    values: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        live_knobs.changed(START, values)
    assert "admission_look_past" not in str(caught.value)


def test_an_overlay_holds_what_differs_and_gives_it_back() -> None:
    wanted = live_knobs.changed(
        START, {"scheduler.watermark": 0.03, "scheduler.max_num_batched_tokens": 64, "router.policy": "round-robin"}
    )
    overlay = live_knobs.overlay_of(START, wanted)
    assert overlay == {
        "scheduler": {"watermark": 0.03, "max_num_batched_tokens": 64},
        "router": {"policy": "round-robin"},
    }
    assert json.loads(json.dumps(overlay)) == overlay
    assert live_knobs.lay_over(START.model_dump(), overlay) == wanted
    back = live_knobs.changed(wanted, {"scheduler.max_num_batched_tokens": "auto", "scheduler.watermark": 0.05})
    assert live_knobs.overlay_of(START, back) == {"router": {"policy": "round-robin"}}
    assert START.http.api_keys == wanted.http.api_keys, "what was not named stays"


@pytest.mark.parametrize("overlay", [{"kv_cache": {"block_size": 8}}, {"scheduler": {"watermrk": 0}}, {"model": "x"}])
def test_an_overlay_from_a_file_is_checked_too(overlay: dict[str, object]) -> None:
    for settings in (live_knobs.engine_settings, live_knobs.router_settings):
        with pytest.raises(ConfigError):
            settings(START.model_dump(), overlay)


def test_routers_and_replicas_have_one_number_for_one_configuration() -> None:
    overlay = {"scheduler": {"policy": "priority", "priority_ageing_s": 5}, "router": {"admission_wait_ms": 250}}
    engine, number = live_knobs.engine_settings(START.model_dump(), overlay)
    live = live_knobs.router_settings(START.model_dump(), overlay)
    assert live.number == number != live_knobs.number_of(START)
    assert (engine.scheduler.policy, engine.scheduler.watermark) == ("priority", 0.05)
    assert engine.scheduler.max_num_batched_tokens is None, "auto is the replica's to fill"
    assert live.dispatcher == DispatcherConfig(admission_wait_s=0.25, priority_ageing_s=5)
    assert (live.placement, live.order_policy) == ("least-tokens", "priority")
    capped, _ = live_knobs.engine_settings(START.model_dump(), {"router": {"max_queued_requests_per_replica": 3}})
    assert capped.admission.max_queued_requests == 3
    others = START.model_copy(update={"model": "another", "drain_s": 1})
    assert live_knobs.number_of(others) == live_knobs.number_of(START), "only live values count"


def test_held_requests_are_sorted_by_the_new_policy_and_keep_their_time() -> None:
    dispatcher = Dispatcher(DispatcherConfig(admission_wait_s=1.0, max_held_requests=3), least_tokens)
    for number, priority in enumerate((2, 0, 1)):
        dispatcher.submit(
            RequestId(f"p{priority}"), 1, 10, float(number) / 10, order_key=(0.0, priority, float(number))
        )
    dispatcher.configure(
        DispatcherConfig(admission_wait_s=9.0, max_held_requests=1, priority_ageing_s=60.0), round_robin
    )
    dispatcher.validate()
    assert dispatcher.num_held == 3, "nobody is refused for a change"
    assert dispatcher.next_deadline() == 1.0
    (refused,) = dispatcher.submit(RequestId("late"), 1, 10, 0.5, order_key=(0.0, 3, 9.0))
    assert isinstance(refused, Refuse)
    view = ReplicaView(ReplicaId("a"), "address", "a")
    dispatcher.add_replica(view)
    dispatcher.on_load(view.replica_id, ReplicaLoad(queue_cap=8), 0.6)
    sent = dispatcher.on_connected(view.replica_id, 0.6)
    assert [one.request_id for one in sent if isinstance(one, Dispatch)] == ["p0", "p1", "p2"]
    dispatcher.validate()


def test_a_priority_is_allowed_as_soon_as_the_policy_is() -> None:
    client = Edge()

    def described() -> dict[str, Any]:
        fields = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
        return next(part for part in fields["priority"]["anyOf"] if part.get("type") == "integer")

    assert client.complete(max_tokens=1, priority=1).status_code == 400
    assert described()["maximum"] == 0
    client.app.state.edge.look_at_priorities("priority")
    assert client.complete(max_tokens=1, priority=1).status_code == 200
    assert described()["minimum"] < 0
    client.app.state.edge.look_at_priorities("sjf")
    answer = client.complete(max_tokens=1, priority=1)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "priority", "unsupported_value")
    assert described()["maximum"] == 0


def test_a_running_driver_is_found_by_what_it_said(tmp_path: Path) -> None:
    record_children({"port": 8123, "address": "127.0.0.1:5", "auth_mode": None}, tmp_path)
    (tmp_path / "old.json").write_text(json.dumps({"driver": [1, -1], "children": []}))
    (tmp_path / "dead.json").write_text(json.dumps({"driver": [1, -1], "children": [], "facts": {"port": 8123}}))
    (tmp_path / "half.json").write_text("{")
    assert running_drivers(tmp_path) == [{"port": 8123, "address": "127.0.0.1:5", "auth_mode": None}]


def test_status_says_who_goes_by_another_configuration() -> None:
    view = ReplicaView(ReplicaId("other"), "address", "a")
    view.load = ReplicaLoad(counters={"config_number": 0xABC})
    status = {"router_id": "r", "requests": 0, "held": 0, "config": "00000001", "replicas": [view.describe("", 0.0)]}
    assert "configuration 00000001, but 00000abc at other" in format_status(status)


# ---- docs/knobs.md ------------------------------------------------------------------------------------------------


def rows(root: Path) -> dict[str, tuple[str, str, str]]:
    """Key -> (allowed, default, live or not), from the tables of docs/knobs.md."""
    text = (root / "docs" / "knobs.md").read_text()
    found = re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]+) \| ([^|]+) \| (live|restart) \|$", text, flags=re.MULTILINE)
    assert len(found) == len({key for key, *_ in found}), "a knob stands there twice"
    return {key: (may_be, default, live) for key, may_be, default, live in found}


def test_every_knob_is_documented_with_what_it_may_be_its_default_and_whether_it_is_live(repo_root: Path) -> None:
    def written(value: object) -> str:
        return "auto" if value is None else json.dumps(value) if isinstance(value, bool | list) else str(value)

    def may_be(key: str) -> str:
        model: type[BaseModel] = ClusterConfig
        *sections, name = key.split(".")
        for section in sections:
            model = type(getattr(model(), section))
        return allowed(model, name)

    expected = {
        key: (may_be(key), written(value).removesuffix(".0"), "live" if key in live_knobs.LIVE else "restart")
        for key, value in live_knobs.flat_values(ClusterConfig())
    }
    expected |= {  # of each tenant, whatever its name
        f"tenants.named.NAME.{name}": (
            allowed(TenantConfig, name),
            written(value),
            "live" if live_knobs.is_live(f"tenants.named.NAME.{name}") else "restart",
        )
        for name, value in TenantConfig().model_dump(mode="json").items()
    }
    told = rows(repo_root)
    assert {
        key: (m, default.partition(" ")[0].strip("`"), live) for key, (m, default, live) in told.items()
    } == expected


def test_metrics_that_the_page_names_exist(repo_root: Path) -> None:
    named = set(re.findall(r"`((?:vllm:|shoal_|http_)\w+)`", (repo_root / "docs" / "knobs.md").read_text()))
    glossary = set(
        re.findall(r"^\| `([\w:]+)` \|", (repo_root / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    )
    assert len(named) > 10
    assert named <= glossary, named - glossary
