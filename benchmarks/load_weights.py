"""How fast a checkpoint is read, and in how much memory: `python -m benchmarks.load_weights [--gib 1] [--rounds 5]`.

A synthetic checkpoint with the shapes of a Llama (bfloat16, two files with an index). Every measurement is a process
of its own, the files dropped from the page cache before it (posix_fadvise; the `disk` figures say whether that worked).
Compared with reading the same files from end to end into one buffer of 1 MiB, in a process of its own as well.

In a virtual machine free memory goes back to the host after about two seconds, and taking it again costs the reader
about 0.6 s of CPU a GiB, whatever it is for. So all processes that measure together use and free as much memory as they
will need at the last moment. With imports between that and the start, two ranks at once took 2 to 3 times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

HIDDEN, INTER, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 8, 32000
_LAYER = {
    "self_attn.q_proj": ((HIDDEN, HIDDEN), 0),
    "self_attn.k_proj": ((HIDDEN // HEADS * KV_HEADS, HIDDEN), 0),
    "self_attn.v_proj": ((HIDDEN // HEADS * KV_HEADS, HIDDEN), 0),
    "self_attn.o_proj": ((HIDDEN, HIDDEN), 1),
    "mlp.gate_proj": ((INTER, HIDDEN), 0),
    "mlp.up_proj": ((INTER, HIDDEN), 0),
    "mlp.down_proj": ((HIDDEN, INTER), 1),
    "input_layernorm": ((HIDDEN,), None),
    "post_attention_layernorm": ((HIDDEN,), None),
}


class Loaded(msgspec.Struct, frozen=True):
    """What one process measured of one load."""

    seconds: float
    #: bytes of the tensors that it holds afterwards
    shard_bytes: int
    #: most resident memory while loading, mapped pages included, over what was resident before
    peak_bytes: int
    #: bytes that this process had the disk fetch
    disk_bytes: int
    #: of this process, in the kernel too: what remains comparable on a busy machine
    cpu_seconds: float


def shapes(num_layers: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Shape of each tensor, and the dimension along which ranks share it."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {"model.embed_tokens.weight": ((VOCAB, HIDDEN), 0)}
    for i in range(num_layers):
        found.update({f"model.layers.{i}.{name}.weight": value for name, value in _LAYER.items()})
    return found | {"model.norm.weight": ((HIDDEN,), None)}


def write_checkpoint(folder: Path, gib: float) -> int:
    """Random weights of about `gib` in two files, and a config.json. Returns the bytes of the weight files."""
    import torch
    from safetensors.torch import save_file

    num_layers = max(2, math.ceil((gib * 2**30 - 2 * VOCAB * HIDDEN) / 90_186_000))
    generator = torch.Generator().manual_seed(0)
    named = shapes(num_layers)
    names = list(named)
    owners: dict[str, str] = {}
    for number, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file_name = f"model-0000{number + 1}-of-00002.safetensors"
        tensors = {name: torch.randn(named[name][0], generator=generator).mul_(0.02).bfloat16() for name in half}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        owners |= dict.fromkeys(half, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    (folder / "config.json").write_text(json.dumps(_config(num_layers)))
    os.sync()
    return _size(folder)


def _config(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }


def weight_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_paths(folder))


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the weight files. They are clean: `write_checkpoint` synced them."""
    for path in weight_paths(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(folder: Path) -> float:
    """Seconds to read the weight files from end to end, as `cat` does."""
    buffer = bytearray(1 << 20)
    started = time.perf_counter()
    for path in weight_paths(folder):
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    return time.perf_counter() - started


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _disk_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def touch_memory(num_bytes: int) -> None:
    """Use this much memory and give it back. In a virtual machine the first use of a page costs its host a page fault,
    which took 2 s and more of a GiB here (0.2 s the second time), whoever asks for the page and whatever for.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    piece = bytes(1 << 20)
    while memory.tell() + len(piece) <= num_bytes:
        memory.write(piece)
    memory.close()


def load_here(folder: Path, rank: int, size: int, is_checked: bool) -> Loaded:
    """In this process: the tensors of one rank, all held at the end."""
    from replica import checkpoint
    from replica.shard import Shard

    if not is_checked:
        checkpoint._is_finite = lambda values, dtype: True
    dims = {name: dim for name, (_, dim) in shapes(200).items()}
    shard = Shard(rank, size)
    before, disk_before = _status("VmRSS"), _disk_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    started, cpu_before = time.perf_counter(), time.process_time()
    weights = checkpoint.Checkpoint(folder)
    held = []
    for name in weights:
        dim = dims[name]
        part = slice(None) if dim is None else shard.part(weights.shape(name)[dim])
        held.append(weights.read(name, part, dim or 0))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    num_bytes = sum(tensor.nbytes for tensor in held)
    return Loaded(seconds, num_bytes, _status("VmHWM") - before, _disk_bytes() - disk_before, cpu)


def load_replica(folder: Path, rank: int, size: int) -> Loaded:
    """In this process what one of `size` ranks does: read, pack for the kernels. No KV pool to speak of, and no peers:
    loading says nothing to them.
    """
    from replica.collective import NoPeers
    from replica.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from replica.model_runner import TorchModelRunner
    from replica.shard import Shard

    config = EngineConfig(
        model=ModelConfig(dtype="bfloat16"), cache=CacheConfig(num_blocks=16), parallel=ParallelConfig(num_threads=1)
    )
    before, disk_before = _status("VmRSS"), _disk_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    started, cpu_before = time.perf_counter(), time.process_time()
    runner = TorchModelRunner(config, folder, self_test=False, shard=Shard(rank, size), collective=NoPeers())
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    loaded = Loaded(seconds, _size(folder) // size, _status("VmHWM") - before, _disk_bytes() - disk_before, cpu)
    runner.close()
    return loaded


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that will measure; its imports are done."""
    command = [sys.executable, "-m", "benchmarks.load_weights", "--child", str(folder), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "imported\n"
    return process


def finish(folder: Path, processes: list[subprocess.Popen[str]], is_cold: bool = True) -> list[Loaded]:
    """Let them touch their memory together and then begin together; what they measured."""
    _tell(processes)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "touched\n"
    if is_cold:
        drop_cache(folder)
    _tell(processes)
    return [msgspec.json.decode(process.communicate()[0], type=Loaded) for process in processes]


def _tell(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def run(folder: Path, *processes: tuple[str, ...], is_cold: bool = True) -> list[Loaded]:
    """What processes with these arguments measure, all at once."""
    return finish(folder, [start(folder, *arguments) for arguments in processes], is_cold)


def measure(folder: Path, rounds: int, is_cold: bool = True) -> dict[str, float]:
    """Alternating rounds. Times are the best of each, since others on the machine only ever add to them; memory is the
    worst.
    """
    kinds: dict[str, list[tuple[str, ...]]] = {
        "plain": [("plain",)],
        "one": [("read", "0", "1")],
        "unchecked": [("read", "0", "1", "--unchecked")],
        "both": [("read", "0", "2"), ("read", "1", "2")],
        "replica": [("replica", "0", "1")],
        "ranks": [("replica", "0", "2"), ("replica", "1", "2")],
    }
    runs: dict[str, list[list[Loaded]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, processes in kinds.items():
            runs[name].append(run(folder, *processes, is_cold=is_cold))
    size = _size(folder)
    seconds = {name: [max(loaded.seconds for loaded in run) for run in of_one] for name, of_one in runs.items()}
    best, median = min(seconds["plain"]), statistics.median(seconds["plain"])
    found = {"gib": size / 2**30, "plain_gb_s": size / best / 1e9}
    for name, of_one in runs.items():
        found[f"share_{name}"] = best / min(seconds[name])
        found[f"median_{name}"] = median / statistics.median(seconds[name])
        found[f"peak_{name}"] = max(loaded.peak_bytes / loaded.shard_bytes for run in of_one for loaded in run)
        found[f"cpu_{name}"] = statistics.median(sum(loaded.cpu_seconds for loaded in run) for run in of_one)
        found[f"disk_{name}"] = statistics.median(sum(loaded.disk_bytes for loaded in run) for run in of_one) / size
    return found


def measure_here(folder: Path, kind: str, rank: int, size: int, is_checked: bool) -> Loaded:
    """What a process started by `start` does."""
    if kind == "replica":
        return load_replica(folder, rank, size)
    if kind == "read":
        return load_here(folder, rank, size, is_checked)
    disk_before, cpu_before = _disk_bytes(), time.process_time()
    seconds = read_plainly(folder)
    return Loaded(seconds, _size(folder), 0, _disk_bytes() - disk_before, time.process_time() - cpu_before)


def run_child(folder: Path, kind: str, is_checked: bool, rank: int = 0, size: int = 1) -> None:
    """The life of a process started by `start`."""
    import torch

    import replica.model_runner  # noqa: F401  # imports are no part of the measurement, nor is compiling
    from replica.native import builder, library

    torch.set_num_threads(1)
    torch.ones(10).sum()
    with contextlib.suppress(builder.NativeUnavailableError):
        library.load()
    print("imported", flush=True)
    sys.stdin.readline()
    touch_memory(_size(folder) // size)
    print("touched", flush=True)
    sys.stdin.readline()
    print(msgspec.json.encode(measure_here(folder, kind, rank, size, is_checked)).decode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--unchecked", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, kind, *numbers = options.child
        run_child(Path(folder), kind, not options.unchecked, *map(int, numbers))
        return 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DIR")) as folder_name:
        write_checkpoint(Path(folder_name), options.gib)
        print(f"load average {os.getloadavg()[0]:.1f}")
        for figure, value in measure(Path(folder_name), options.rounds, not options.warm).items():
            print(f"{figure:<16} {value:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
