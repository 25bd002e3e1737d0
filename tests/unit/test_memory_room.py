"""What a cluster needs of this machine's memory, against what there is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cluster import ray_start
from cluster.config import load
from cluster.memory_room import MIB, Needs, available_bytes, kv_bytes, memory_shortage, needs, weight_bytes
from replica.config import Hardware, resolve
from replica.errors import ConfigError

HARDWARE = Hardware(2, 16 << 30, True)


def model_folder(folder: Path, tensors: dict[str, list[int]]) -> Path:
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_tied_embedding_of_several_ranks_counts_twice(tmp_path: Path) -> None:
    tied = model_folder(tmp_path, {"model.embed_tokens.weight": [100, 8], "model.layers.0.mlp": [50, 10]})
    assert weight_bytes(tied, 2) == 2 * (800 + 500)
    assert weight_bytes(tied, 4, ranks=3) == 4 * (800 + 500 + 800)
    untied = model_folder(tmp_path, {"model.embed_tokens.weight": [100, 8], "lm_head.weight": [100, 8]})
    assert weight_bytes(untied, 2) == 2 * 1600
    assert weight_bytes(untied, 2, ranks=2) == 2 * 1600


def test_kv_is_what_is_asked_for_in_either_unit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"w": [1]})
    engine = resolve(load({"kv_cache": {"kv_cache_gib": 0.5}}).engine_config(), HARDWARE)
    assert kv_bytes(folder, engine) == 512 * MIB
    blocks = load({"kv_cache": {"num_blocks": 10, "block_size": 16}, "dtype": "float32"})
    assert kv_bytes(folder, resolve(blocks.engine_config(), HARDWARE)) == 10 * 16 * 2 * 3 * 2 * 8 * 4


def test_processes_are_counted_by_what_they_import(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"w": [MIB]})

    def processes(**keys: object) -> int:
        config = load(keys)
        return needs(config, resolve(config.engine_config(), HARDWARE), folder).processes // MIB

    assert processes(runner="fake") == 660 + 140 + 90
    assert processes() == 660 + 140 + 300
    assert processes(tensor_parallel_size=3, **{"replicas.both": 2}) == 660 + 140 + 2 * (90 + 3 * 230)
    config = load({"runner": "fake"})
    assert needs(config, resolve(config.engine_config(), HARDWARE), folder).kv == 0, "the fake runner holds no KV"


def test_a_shortage_names_asked_for_available_and_the_knob() -> None:
    config = load({"replicas.both": 4, "kv_cache.kv_cache_gib": 2})
    engine = resolve(config.engine_config(), HARDWARE, 4)
    wanted = Needs(2048 * MIB, 1024 * MIB, 8192 * MIB)
    assert memory_shortage(config, engine, wanted, wanted.total) == ""
    assert memory_shortage(config, engine, wanted, wanted.total - 1) == (
        "memory: 4 replica(s) and 1 router(s) need 11.0 GiB: 2.0 for processes, 1.0 for weights, 8.0 for KV "
        "(kv_cache.kv_cache_gib=2 each); available are 11.0. Lower replicas.both or what KV takes"
    )


def test_the_tightest_limit_around_this_process_counts(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    inner = cgroups / "pod" / "container"
    inner.mkdir(parents=True)
    assert available_bytes(proc, cgroups) == 1 << 62, "not Linux"
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    assert available_bytes(proc, cgroups) == 8000 << 10
    for folder, limit in ((inner, "max"), (cgroups / "pod", str(3 * MIB))):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(str(2 * MIB))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\n")
    assert available_bytes(proc, cgroups) == 2 * MIB
    old = cgroups / "memory" / "docker"
    old.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/docker\n1:cpu:/\n0::/\n")
    (old / "memory.limit_in_bytes").write_text(str(4 * MIB))
    (old / "memory.usage_in_bytes").write_text(str(5 * MIB))
    (old / "memory.stat").write_text(f"total_inactive_file {2 * MIB}\n")
    assert available_bytes(proc, cgroups) == MIB


def test_processes_may_share_cores_within_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_start, "available_cores", lambda: 2)
    ray_start.refuse_oversubscription(load({"replicas.both": 2}))
    assert capsys.readouterr().err == ""
    ray_start.refuse_oversubscription(load({"tensor_parallel_size": 3}))
    assert capsys.readouterr().err == "shoal: 3 ranks share 2 cores: they will wait for each other\n"
    with pytest.raises(ConfigError) as refused:
        ray_start.refuse_oversubscription(load({"replicas.both": 64, "tensor_parallel_size": 3}))
    assert str(refused.value) == (
        "resources: asked for 64 replica(s) of 4 CPU in 4 bundles on one node (rank_placement: STRICT_PACK): 1 CPU for "
        "itself, 1 CPU a rank; there is room for 8. Free: this machine has 32 of 32 CPU (2 cores, each shared by at "
        "most 16 processes); lower replicas.both or tensor_parallel_size, or what each reserves "
        "(num_cpus_per_replica, num_cpus_per_rank)"
    )
    ray_start.refuse_oversubscription(load({"replicas.both": 64, "num_cpus_per_replica": 0.5, "runner": "fake"}))


def test_an_arena_counts_and_is_named(tmp_path: Path) -> None:
    config = load({"kv_cache": {"host_tier_gib": 2, "num_blocks": 10}})
    engine = resolve(config.engine_config(), HARDWARE)
    wanted = needs(config, engine, model_folder(tmp_path, {"model.layers.0.mlp": [50, 10]}))
    assert wanted.tier == (2048 + 90) * MIB
    short = memory_shortage(config, engine, wanted, 1 << 30)
    assert "2.1 for kv_cache.host_tier_gib; available are 1.0" in short
