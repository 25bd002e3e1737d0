"""`ClusterConfig` and the command line: one sentence per mistake, with field, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from cluster.cli import _parser, config_overrides, main
from cluster.config import ClusterConfig, load
from replica.config import (
    CacheConfig,
    EngineConfig,
    FrozenModel,
    Hardware,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    resolve,
)
from replica.errors import ConfigError

LAPTOP = Hardware(num_cores=2, memory_bytes=24 << 30, has_bfloat16=True)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"modle": "x"}, "modle: unknown key; did you mean 'model'?"),
        ({"scheduler": {"max_num_seq": 4}}, "scheduler.max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ({"replicas": {"both": -1}}, "replicas.both: .*greater than or equal to 0.*got -1"),
        (
            {"replicas": {"both": 0}},
            "replicas.both and replicas.decode are 0 .*nobody would decode; allowed: at least",
        ),
        ({"replicas": {"prefill": 2}}, r"\(and replicas.prefill is 2\): nobody would decode"),
        ({"replicas": {"prefil": 2}}, "replicas.prefil: unknown key; did you mean 'prefill'?"),
        (
            {"replicas": {"prefill": 1, "decode": 1}, "disaggregation": {"decode": {"block_size": 32}}},
            "disaggregation.decode: block_size is 32 here, .*they have one size; allowed: kv_cache.block_size",
        ),
        (
            {"replicas": {"prefill": 1, "decode": 1}, "kv_cache": {"enable_prefix_caching": False}},
            "kv_cache.enable_prefix_caching is false, .*allowed: true, or no prefill replica",
        ),
        (
            {"replicas": {"prefill": 1, "decode": 1}, "autoscaling": {"max_replicas": 3}},
            "autoscaling.max_replicas is 3 and replicas.both is 0, .*allowed: auto",
        ),
        ({"scheduler": {"watermark": 1}}, "scheduler.watermark: .*less than 1.*got 1"),
        ({"dtype": "float16"}, "dtype: .*'auto', 'bfloat16' or 'float32'.*got 'float16'"),
        ({"model": " "}, "model: is empty"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size: .*less than or equal to 64.*got 65"),
        ({"kv_cache": {"block_size": 0}}, "kv_cache.block_size: "),
        ({"router": {"policy": "magic"}}, "router.policy: .*'least-tokens'.*got 'magic'"),
    ],
)
def test_a_mistake_is_named_with_its_field_and_value(data: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(data)


def _numbers(model: type[FrozenModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, FrozenModel):
            yield from _numbers(field.annotation, f"{path}{name}.")
        elif {int, float} & {field.annotation, *get_args(field.annotation)}:
            yield path + name


@pytest.mark.parametrize("key", list(_numbers(ClusterConfig)))
def test_no_number_is_infinite_or_none_at_all_or_beyond_what_arrays_hold(key: str) -> None:
    """`scheduler.priority_ageing_s=inf` made 0 * inf = NaN of an order key: a queue lost who stood in it, and each
    message about it cut the link to a replica.
    """
    for value in (math.inf, -math.inf, math.nan):
        with pytest.raises(
            ConfigError, match=rf"^{key}: Input should be a finite number; allowed: .+ \(got -?(inf|nan)\)$"
        ):
            load({}, {key: value})
    with pytest.raises(ConfigError, match=f"^{key}: Input should be .*(less than or equal to|at most|less than) "):
        load({}, {key: 1 << 70})


@pytest.mark.parametrize(
    ("text", "number"), [("4", 4), ("010", 10), ("+3", 3), ("1e2", 100), ("0x10", None), ("1:30", None)]
)
def test_numbers_are_decimal(tmp_path: Path, text: str, number: int | None) -> None:
    """To YAML 1.1 010 is 8, and 1:30 is 90."""
    path = tmp_path / "shoal.yaml"
    path.write_text(f"scheduler: {{max_num_seqs: {text}}}")
    if number is None:
        with pytest.raises(ConfigError, match=r"scheduler\.max_num_seqs: .*; allowed: a whole number, at least 1 "):
            load(path)
    else:
        assert load(path).scheduler.max_num_seqs == number


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("scheduler.max_num_seqs", "auto", "allowed: a whole number, at least 1 (got 'auto')"),
        ("scheduler.watermark", None, "allowed: a number, at least 0, below 1 (got None)"),
        ("threads_per_replica", "x", "allowed: auto or a whole number, at least 1 (got 'x')"),
        ("scheduler.max_num_seqs", True, "allowed: a whole number, at least 1 (got True)"),
        ("http.api_keys", ["a", 3], "allowed: a list of texts (got 3)"),
        ("http.admin_endpoints", "maybe", "allowed: true or false (got 'maybe')"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_what_is_allowed(key: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {key: value})
    assert str(caught.value).startswith(f"{key}")
    assert str(caught.value).endswith(sentence)


def test_auto_is_what_it_is_by_default() -> None:
    data = {"threads_per_replica": "auto", "max_model_len": "auto", "scheduler": {"max_num_batched_tokens": "auto"}}
    assert load(data) == ClusterConfig()
    with pytest.raises(ConfigError, match="max_num_seqs"):
        load({"scheduler": {"max_num_seqs": "auto"}})


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"modle": 1, "dtype": "int3"})
    assert len(str(caught.value).splitlines()) == 2


def test_yaml_round_trip_is_stable(tmp_path: Path) -> None:
    config = load({"model": "m.gguf", "replicas": {"both": 3}, "scheduler": {"watermark": 0.05}})
    path = tmp_path / "shoal.yaml"
    path.write_text(config.to_yaml())
    assert load(path) == config
    assert config.served_name == "m"


def test_keys_are_not_shown() -> None:
    assert "secret" not in load({"http": {"api_keys": ["secret"]}}).to_yaml()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not YAML"),
        ("model: a\nmodel: b", "'model' is given twice"),
        ("http: {max_body_mib: 1, max_body_mib: 2}", "given twice"),
        (None, "No such file"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "shoal.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("")
    assert load(path) == ClusterConfig()


def test_every_field_is_described() -> None:
    def check(model: type[FrozenModel]) -> None:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, FrozenModel):
                check(annotation)
            else:
                assert field.description, f"{model.__name__}.{name} has no description"

    check(ClusterConfig)
    check(EngineConfig)


def test_resolve_fills_every_auto_and_keeps_what_was_set() -> None:
    config = resolve(EngineConfig(), LAPTOP, replicas_on_node=2)
    assert config.model.dtype == "bfloat16"
    assert config.parallel.num_threads == 1
    assert config.scheduler.max_num_batched_tokens == 256
    assert config.cache.kv_cache_gib == pytest.approx(1.0)
    assert resolve(config, LAPTOP, replicas_on_node=2) == config
    cut = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=3))
    assert resolve(cut, Hardware(16, 24 << 30, True), replicas_on_node=2).parallel.num_threads == 2
    assert resolve(cut, LAPTOP, replicas_on_node=2).parallel.num_threads == 1
    own = EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(kv_cache_gib=3),
        scheduler=SchedulerConfig(max_num_batched_tokens=77),
    )
    kept = resolve(own, LAPTOP)
    assert (kept.model.dtype, kept.cache.kv_cache_gib, kept.scheduler.max_num_batched_tokens) == ("float32", 3, 77)
    old = Hardware(num_cores=1, memory_bytes=1 << 30, has_bfloat16=False)
    assert resolve(EngineConfig(), old).model.dtype == "float32"


def test_flags_and_set_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("replicas: {both: 4}\nscheduler: {max_num_seqs: 9}\n")
    arguments = [
        "serve",
        "--config",
        str(path),
        "--replicas",
        "2",
        "--set",
        "scheduler.watermark=0.03",
        "--api-key",
        "k",
    ]
    assert main([*arguments, "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["replicas"]["both"] == 2
    assert (shown["scheduler"]["max_num_seqs"], shown["scheduler"]["watermark"]) == (9, 0.03)
    assert shown["dtype"] in ("bfloat16", "float32")
    assert shown["scheduler"]["max_num_batched_tokens"] > 0
    assert shown["http"]["api_keys"] == ["***"]


def test_print_config_can_be_used_as_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config"]) == 0
    path = tmp_path / "shoal.yaml"
    path.write_text(capsys.readouterr().out)
    assert load(path).model == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--set", "nonsense", "--print-config"], "expected KEY=VALUE"),
        (["serve", "--set", "replicas.both.x=1", "--replicas", "2", "--print-config"], "both is not a section"),
        (["serve", "--replicas", "0", "--print-config"], "replicas.both"),
        (["serve", "--port", "70000"], "allowed are 1 to 65535"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_status_of_nothing_is_an_error_that_names_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--port", "1"]) == 1
    assert "http://127.0.0.1:1/status" in capsys.readouterr().err


def test_overrides_come_only_from_what_was_given() -> None:
    assert config_overrides(_parser().parse_args(["serve"])) == {}


@pytest.mark.parametrize("key", ["scheduler.max_num_seqs", "scheduler.watermark", "router.admission_wait_ms"])
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: true and false are no values of it"):
        load(None, {key: True})
