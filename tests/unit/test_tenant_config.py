"""The `tenants` section, the file, `shoal set` on both, and `shoal key`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from cluster import live_knobs
from cluster.cli import main
from cluster.config import ClusterConfig, load
from cluster.tenant_file import check_file, in_force, parse
from replica.errors import ConfigError
from router.tenant_source import MAX_FILE_BYTES, WatchedFile
from router.tenants import Tenant, hashed

HASH = hashed("k")
PLAIN = "sk-plain-and-secret"


def named(**tenants: Any) -> ClusterConfig:
    return load({"tenants": {"named": tenants}})


@pytest.mark.parametrize(
    ("tenants", "sentence"),
    [
        ({"a": {"keys": [HASH, PLAIN]}}, "tenants.named.a.keys: number 2 is no hash of a key; allowed: sha256:"),
        ({"a": {"keys": PLAIN}}, "tenants.named.a.keys: is no list; allowed: a list of sha256:"),
        ({"a": PLAIN}, "tenants.named.a: must be a section with the keys keys, weight"),
        ({"a": {"weight": 0}}, r"tenants.named.a.weight: .*greater than or equal to 0.001 \(got 0\)"),
        ({"a": {"priority": [3, 1]}}, r"priority: is no range of priorities; allowed: auto or a list of two whole"),
        ({"a": {"priority": [True, 1]}}, "is no range of priorities"),
        (
            {"a": {"tokens_per_minute": "x"}},
            r"allowed: auto or a number, at least 1, at most 2147483647 \(got 'x'\)",
        ),
        ({"a": {"wieght": 1}}, r"tenants.named.a.wieght: unknown key; did you mean 'weight'\?"),
        ({"a.b": {}}, "tenants.named: 'a.b' is no name of a tenant; allowed: 1 to 64 letters"),
        ({"a": {"keys": [HASH]}, "b": {"keys": [HASH.upper().replace("SHA", "sha")]}}, "'a' and 'b' have the same key"),
        ({"default": {"keys": [HASH]}}, "'default' has keys; allowed: none, it has those of http.api_keys"),
    ],
)
def test_mistakes_are_told_and_no_key_with_them(tenants: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        named(**tenants)
    assert PLAIN not in str(caught.value)


def test_a_key_of_the_operator_is_no_tenants() -> None:
    given = {"http": {"api_keys": ["k"]}, "tenants": {"named": {"a": {"keys": [HASH]}}}}
    with pytest.raises(ConfigError, match=r"the tenants 'default' and 'a' have the same key \(sha256:"):
        load(given)
    with pytest.raises(ConfigError, match=r"allow_anonymous is true, and http\.api_keys says that a key is needed"):
        load({"http": {"api_keys": ["k"]}, "tenants": {"allow_anonymous": True}})


def test_when_a_key_is_needed() -> None:
    def needed(**tenants: Any) -> bool:
        config = load({"tenants": tenants})
        return config.tenants.needs_keys(config.http.api_keys)

    assert not needed()
    assert not needed(named={"default": {"weight": 2}})
    assert needed(named={"a": {"keys": [HASH]}})
    assert needed(file="/there/it/is")  # whatever it holds: one without a key must not open the door
    assert not needed(file="/there/it/is", allow_anonymous=True)


def test_inline_lies_over_the_file_and_keys_add_up() -> None:
    config = named(a={"keys": [hashed("inline")], "weight": 3}, b={"priority": [0, 1]})
    file = parse(f"a: {{keys: ['{hashed('file')}'], weight: 2, tokens_per_minute: 70}}\nc: {{}}".encode())
    found = {tenant.name: tenant for tenant in in_force(config.model_dump(), {}, file)}
    assert found["a"].digests == {bytes.fromhex(hashed(key)[7:]) for key in ("inline", "file")}
    assert (found["a"].weight, found["a"].tokens_per_minute) == (3.0, 70.0)
    assert found["b"] == Tenant("b", priority=(0, 1))
    assert found["c"] == Tenant("c")
    assert set(found) == {"default", "a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"\xff", "is not text in UTF-8"),
        (b"- a", "expected tenants by name at the top, found list"),
        (b"a: [sk-plain-and-secret", "not YAML: expected ',' or ']'"),
        (b"a: {}\na: {}", "not YAML: 'a' is given twice, line 2, column 1"),
        (b"a: {weight: 0}\nb: {keys: [sk-plain-and-secret]}", "(?s)a.weight: .*\nb.keys: number 1 is no hash"),
        (b"a: {priority: 3}", "a.priority: is no range of priorities"),
    ],
)
def test_a_file_that_cannot_be_used(text: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse(text)
    assert PLAIN not in str(caught.value)


def test_the_example_of_the_documentation_is_one(repo_root: Path) -> None:
    page = (repo_root / "docs" / "tenants.md").read_text()
    found = parse(page.partition("```yaml\n")[2].partition("```")[0].encode())
    assert set(found) == {"search", "nightly", "default"}
    assert found["search"].keys == (hashed("test"),)


def test_a_file_is_checked_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    config = load({"tenants": {"file": str(path), "named": {"a": {"keys": [HASH]}}}})
    with pytest.raises(ConfigError, match=f"^tenants.file {path}: No such file"):
        check_file(config)
    path.write_text(f"b: {{keys: ['{HASH}']}}")
    with pytest.raises(ConfigError, match=f"^tenants.file {path}: the tenants 'b' and 'a' have the same key"):
        check_file(config)
    path.write_text("")
    check_file(config)


def test_the_configuration_goes_through_yaml_and_relative_files_are_found_from_anywhere() -> None:
    config = load({"tenants": {"file": "t.yaml", "named": {"a": {"keys": [HASH], "priority": [0, 2]}}}})
    assert config.tenants.file == os.path.join(os.getcwd(), "t.yaml")
    assert load(config.model_dump(mode="json")) == config
    assert config.tenants.without_keys().named["a"].keys == ()


# ---- shoal set ----


def test_set_reaches_named_tenants_and_goes_back() -> None:
    start = named(a={"keys": [HASH], "weight": 2})
    wanted = live_knobs.changed(start, {"tenants.named.a.weight": 5, "tenants.named.a.priority": [0, 4]})
    overlay = live_knobs.overlay_of(start, wanted)
    assert overlay == {"tenants": {"named": {"a": {"weight": 5, "priority": [0, 4]}}}}
    assert live_knobs.lay_over(start.model_dump(), overlay) == wanted
    assert start.tenants.named["a"].weight == 2  # what it lies over is as it was
    assert live_knobs.number_of(wanted) != live_knobs.number_of(start)
    assert live_knobs.told_changes(start, wanted, ["tenants.named.a.weight"]) == ["tenants.named.a.weight: 2.0 -> 5.0"]
    back = live_knobs.changed(wanted, {"tenants.named.a.weight": 2, "tenants.named.a.priority": "auto"})
    assert live_knobs.overlay_of(start, back) == {}
    assert live_knobs.number_of(back) == live_knobs.number_of(start)


def test_replicas_have_the_same_number_without_the_keys() -> None:
    config = named(a={"keys": [HASH], "weight": 2})
    told = config.model_copy(update={"tenants": config.tenants.without_keys()})
    overlay = {"tenants": {"named": {"a": {"weight": 3}}}}
    _, number = live_knobs.engine_settings(told.model_dump(), overlay)
    assert number == live_knobs.router_settings(config.model_dump(), overlay).number


def test_set_reaches_a_tenant_of_the_file_and_warns_that_it_must_be_there() -> None:
    start = load({"tenants": {"file": "/etc/tenants.yaml"}})
    wanted = live_knobs.changed(start, {"tenants.named.b.weight": 5})
    assert live_knobs.overlay_of(start, wanted) == {"tenants": {"named": {"b": {"weight": 5}}}}
    assert "it counts only if /etc/tenants.yaml has one of that name" in live_knobs.warnings(start, wanted)[0]
    found = {
        t.name: t for t in in_force(start.model_dump(), live_knobs.overlay_of(start, wanted), parse(b"b: {weight: 1}"))
    }
    assert found["b"].weight == 5
    back = live_knobs.changed(wanted, {"tenants.named.b.weight": "auto"})
    assert live_knobs.overlay_of(start, back) == {}
    assert live_knobs.number_of(back) == live_knobs.number_of(start)
    assert live_knobs.differences(start, wanted) == [("tenants.named.b.weight", None, 5)]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("tenants.named.a.keys", "needs a restart"),
        ("tenants.named.a.wait", "did you mean tenants.named.a.weight"),
        ("tenants.named.a", "is a section; its keys: tenants.named.a.keys"),
        ("tenants.named", "is a section; its keys: tenants.named.NAME.keys"),
        ("tenants.named.b.weight", "there is no tenant 'b'; allowed: a, default"),
        ("tenants.file", "needs a restart"),
    ],
)
def test_what_cannot_be_set(key: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*{sentence}"):
        live_knobs.changed(named(a={"keys": [HASH]}), {key: 1})


# ---- the file, again ----


def test_a_file_is_read_again_only_when_it_may_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    made_at = path.stat().st_ctime
    now = [made_at + 1]
    file = WatchedFile(str(path), lambda: now[0])
    assert file.look() == b"one"
    # so young that another change may have the same time: no stat tells it
    assert not file._is_sure
    now[0] = made_at + 10
    assert file.look() == b"one"
    assert file._is_sure
    other = tmp_path / "g"
    other.write_text("two")
    other.rename(path)
    assert file.look() == b"two"
    path.write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        file.look()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file.look()


# ---- shoal key ----


def test_a_new_key_is_shown_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(2):
        assert main(["key"]) == 0
        key, stored = (line.split()[1] for line in capsys.readouterr().out.splitlines())
        assert stored == hashed(key)
        assert len(key) > 40
        keys.add(key)
    assert len(keys) == 2


def test_the_hash_of_a_key_on_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("k\n"))
    assert main(["key", "--hash"]) == 0
    assert capsys.readouterr().out == HASH + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["key", "--hash"]) == 2
