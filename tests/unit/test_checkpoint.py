"""Tensors of a folder, whole and in parts; and files that lie about themselves."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from replica import checkpoint
from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.file_digest import file_digest

TENSORS = {
    "rows": torch.arange(40 * 7).reshape(40, 7).bfloat16(),
    "experts": torch.arange(3 * 8 * 6).reshape(3, 8, 6).float(),
    "wide": torch.arange(6 * 10_000).reshape(6, 10_000).float(),  # parts of rows above _ALONE_BYTES
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "ids": torch.arange(10),
    "half": torch.tensor([65504.0, -65504.0, 6e-8], dtype=torch.float16),
    "eight": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    save_file(TENSORS, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", sorted(TENSORS))
@pytest.mark.parametrize("piece_bytes", [1 << 20, 64])
def test_every_part_along_every_dimension(
    folder: Path, name: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", piece_bytes)
    whole = TENSORS[name]
    weights = Checkpoint(folder)
    assert weights.shape(name) == tuple(whole.shape)
    read = weights.read(name)
    assert read.dtype == whole.dtype
    assert torch.equal(read.view(torch.uint8) if name == "eight" else read, _comparable(whole, name))
    for dim in range(whole.dim() if name != "eight" else 0):
        length = whole.shape[dim]
        for part in (
            slice(0, length // 2),
            slice(length // 3, length),
            slice(length, length),
            slice(1, 2),
            slice(9, 99),
        ):
            found = weights.read(name, part, dim)
            assert torch.equal(found, whole[(slice(None),) * dim + (part,)]), (dim, part)
            assert found.is_contiguous()


def _comparable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.view(torch.uint8) if name == "eight" else tensor


def test_a_large_tensor_lies_in_memory_of_its_own(tmp_path: Path) -> None:
    whole = torch.arange(2 << 20).reshape(1024, 2048).float()
    save_file({"x": whole}, tmp_path / "model.safetensors")
    read = Checkpoint(tmp_path).read("x", slice(0, 1000), 1)
    read += 1  # it is ours
    assert torch.equal(read, whole[:, :1000] + 1)


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    weights = Checkpoint(folder)
    assert "rows" in weights
    assert "nothing" not in weights
    assert sorted(weights) == sorted(TENSORS)
    with pytest.raises(ModelLoadError, match="tensor nothing is missing"):
        weights.read("nothing")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_inf_and_nan_are_found_and_nothing_else(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    top = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, top.max, top.min, top.tiny, -top.smallest_normal], dtype=dtype)
    save_file(
        {"fine": values, "bad": torch.cat([values, torch.tensor([bad], dtype=dtype)])}, tmp_path / "m.safetensors"
    )
    weights = Checkpoint(tmp_path)
    assert torch.equal(weights.read("fine"), values)
    with pytest.raises(ModelLoadError, match=r"m\.safetensors: tensor bad holds inf or NaN"):
        weights.read("bad")
    assert torch.equal(weights.read("bad", slice(0, 6)), values)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def one(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


#: one name for two tensors: whoever believes the last one leaves the bytes of the first to nobody
TWICE = b'{"a":' + json.dumps(one()).encode() + b',"a":' + json.dumps(one(offsets=[8, 16])).encode() + b"}"


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"[]", b"", "header is not what"),
        (b"\xff{}", b"", "header is not what"),
        (b"not json", b"", "header is not what"),
        (b'{"a":' * 100_000, b"", "header is not what"),
        ({"a": 3}, b"", "header is not what"),
        ({"a": {"dtype": "F32"}}, b"", "header is not what"),
        ({"a": one(shape=["2"])}, b"12345678", "header is not what"),
        ({"a": one(offsets=[0, 8, 9])}, b"12345678", "header is not what"),
        ({"a": one(shape=[-2])}, b"12345678", "which no tensor has"),
        ({"a": one(shape=[1] * 99, offsets=[0, 4])}, b"1234", "which no tensor has"),
        ({"a": one("Q4_9")}, b"12345678", "dtype 'Q4_9'; known are"),
        ({"a": one(offsets=[0, 4])}, b"1234", "8 bytes, and gets 4"),
        ({"a": one(offsets=[8, 0])}, b"12345678", "and gets -8"),
        ({"a": one(shape=[1 << 40], offsets=[0, 4 << 40])}, b"12345678", "cut short: tensor a ends at byte"),
        ({"a": one(shape=[1 << 40, 1 << 40], offsets=[0, 4 << 80])}, b"12345678", "cut short|header is not"),
        ({"a": one(), "b": one(offsets=[4, 12])}, b"x" * 12, "overlaps another"),
        ({"a": one(), "b": one()}, b"x" * 8, "overlaps another"),
        ({"a": one(offsets=[4, 12])}, b"x" * 12, "leaves a hole"),
        ({"a": one(offsets=[-8, 0])}, b"x" * 12, "overlaps another"),
        ({"a": one()}, b"x" * 12, "4 bytes behind the last tensor"),
        (TWICE, b"x" * 16, "hole"),
        ({"a" * 2000: one()}, b"x" * 8, "name has 2000 characters"),
    ],
)  # fmt: skip
def test_a_header_that_lies(tmp_path: Path, header: Any, data: bytes, sentence: str) -> None:
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        Checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cut short or no safetensors file: it has 0 bytes"),
        (b"1234", "it has 4 bytes"),
        (struct.pack("<Q", 1 << 62) + b"{}", "claims 4611686018427387904 bytes; at most 100000000"),
        (struct.pack("<Q", 99_000_000) + b"{}", "cut short: its header claims 99000000 bytes"),
        (b"\x80\x02}q\x00." + b"x" * 100, "no safetensors file|cut short"),  # a pickle by another name
    ],
)
def test_a_length_that_lies(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=sentence):
        Checkpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100_000)}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelLoadError, match="cut short while it was read"):
        weights.read("x")


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_only_files_that_the_index_names_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    (tmp_path / "stray.safetensors").write_bytes(b"damaged, and not named")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert sorted(Checkpoint(tmp_path)) == ["a", "b"]


def test_a_link_that_the_owner_made_is_followed(tmp_path: Path) -> None:
    """The cache of huggingface_hub consists of them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0a1b")
    (tmp_path / "model" / "one.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    index(tmp_path / "model", {"a": "one.safetensors"})
    assert "a" in Checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    [
        "../one.safetensors",
        "/etc/passwd",
        "sub/one.safetensors",
        "..",
        "a\\b.safetensors",
        "one.bin",
        "x\0.safetensors",
        3,
    ],
)
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model").mkdir()
    index(tmp_path / "model", {"a": name})
    with pytest.raises(ModelLoadError, match="allowed are names of"):
        Checkpoint(tmp_path / "model")


def test_an_index_and_files_that_disagree(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    for weight_map, sentence in (
        ({"a": "gone.safetensors"}, r"gone\.safetensors, which is not there"),
        ({"b": "one.safetensors"}, "index says tensor b is in"),
        ({}, "weight_map is no object"),
        (["a"], "weight_map is no object"),
    ):
        index(tmp_path, weight_map)
        with pytest.raises(ModelLoadError, match=sentence):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ModelLoadError, match="is not JSON"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_and_two_sets_of_weights(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelLoadError, match="tensor a is in two files"):
        Checkpoint(tmp_path)
    index(tmp_path, {"a": "one.safetensors"})
    assert "a" in Checkpoint(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="two sets of weights"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ModelLoadError, match=rf"pickle only \({name}\).*save_pretrained"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("at", [0, 1, 70_000_001, 150_000_000 - 1])
def test_any_byte_of_a_file_changes_its_hash(at: int, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(150_000_000)  # a hole: three pieces
    before = file_digest(path, tmp_path / "kept")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    assert file_digest(path, tmp_path / "kept") != before


def test_a_hash_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "weights", tmp_path / "kept"
    path.write_bytes(b"some weights")
    monkeypatch.setattr("replica.file_digest._PIECE_BYTES", 4)
    first = file_digest(path, kept)
    reads: list[Path] = []

    def digest(path: Path, size: int) -> str:
        reads.append(path)
        return "other"

    monkeypatch.setattr("replica.file_digest._digest", digest)
    assert file_digest(path, kept) == "other", "a file that has just changed is not believed"
    (record,) = kept.glob("*.json")
    record.write_bytes(record.read_bytes().replace(b"other", first.encode()))
    os.utime(record, (path.stat().st_mtime + 60,) * 2)
    assert file_digest(path, kept) == first
    os.utime(path, (1, 1))  # as `touch -d` and rsync do
    assert file_digest(path, kept) == "other"
    record.write_bytes(b"{")
    assert file_digest(path, kept) == "other"
    assert len(reads) == 3


def test_the_digest_follows_the_weights(tmp_path: Path) -> None:
    save_file({"a": torch.from_numpy(np.ones(100_000, np.float32))}, tmp_path / "model.safetensors")
    first = Checkpoint(tmp_path).digest()
    assert Checkpoint(tmp_path).digest() == first
    save_file({"a": torch.full((100_000,), 1.5)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).digest() != first
