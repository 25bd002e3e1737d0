"""A matrix of several tensors, whole and in pieces; the native kernels' layout; what is told while weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replica import weight_matrix
from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.load_progress import EVERY_S, LoadProgress
from replica.models.panels import PANEL, pack, packed_bytes
from replica.native import library
from replica.native.builder import NativeUnavailableError
from replica.weight_matrix import Matrix, Source

A = torch.arange(70 * 12).reshape(70, 12) / 8 - 50
B = -torch.arange(48 * 12).reshape(48, 12) / 8
WHOLE = slice(0, 12)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"], scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("weights")
    save_file({"a": A.to(request.param), "b": B.to(request.param)}, folder / "model.safetensors")
    return Checkpoint(folder)


def forget(num_bytes: int) -> None:
    """For who does not count."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [WHOLE, slice(4, 8), slice(8, 12)])
@pytest.mark.parametrize("piece_bytes", [1, 200, 2 << 20])
def test_whole_and_in_pieces(
    checkpoint: Checkpoint, dtype: torch.dtype, columns: slice, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_matrix, "_PIECE_BYTES", piece_bytes)
    sources = (
        Source("a", slice(3, 64), columns),
        Source("b", slice(0, 48), columns),
        Source("b", slice(9, 9), columns),
    )
    read: list[int] = []
    matrix = Matrix(checkpoint, sources, dtype, read.append, num_zeros=2)
    through_file = [x.to(checkpoint.dtype("a")).to(dtype)[:, columns] for x in (A, B)]
    expected = torch.cat(
        [through_file[0][3:64], through_file[1], torch.zeros(2, through_file[0].shape[1], dtype=dtype)]
    )
    assert matrix.shape == expected.shape
    found = matrix.read()
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert sum(read) == expected[:-2].nbytes
    pieces = [(row, piece.clone()) for row, piece in matrix.pieces(sources[0], 16)]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), expected[:61])
    assert [row for row, _ in pieces] == [sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]
    assert all(len(piece) % 16 == 0 for _, piece in pieces[:-1])
    assert len(pieces) == (1 if piece_bytes > 200 else 4), "pieces are as small as they may be"


def test_a_piece_with_nan_is_refused(tmp_path: Path) -> None:
    bad = A.clone()
    bad[50, 3] = torch.nan
    save_file({"a": bad}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for columns in (WHOLE, slice(2, 4)):
        matrix = Matrix(checkpoint, [Source("a", slice(0, 70), columns)], torch.float32, forget)
        with pytest.raises(ModelLoadError, match="tensor a holds inf or NaN"):
            matrix.read()
    assert not Matrix(checkpoint, [Source("a", slice(0, 70), slice(4, 6))], torch.float32, forget).read().isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_bytes", [1, 2 << 20])
def test_panels(checkpoint: Checkpoint, dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Element by element against what native/gemm.h says of them."""
    monkeypatch.setattr(weight_matrix, "_PIECE_BYTES", piece_bytes)
    try:
        native = library.load()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    step = 4 // dtype.itemsize

    def element(packed: torch.Tensor, row: int, k: int) -> float:
        return float(packed[row // PANEL, k // step, row % PANEL, k % step])

    below = Matrix(checkpoint, [Source("a", slice(0, 64), WHOLE), Source("b", slice(0, 40), WHOLE)], dtype, forget)
    beside = Matrix(checkpoint, [Source("a", slice(0, 48), WHOLE), Source("b", slice(0, 48), WHOLE)], dtype, forget)
    for matrix, interleaved in ((below, False), (beside, True)):
        memory = torch.full((packed_bytes(matrix.shape, dtype.itemsize),), 77, dtype=torch.uint8)
        pack(native, matrix, memory, interleaved)
        packed = memory.view(dtype).view(-1, 12 // step, PANEL, step)
        whole = matrix.read()
        for row in range(len(packed) * PANEL):
            turn, place = divmod(row, 32)
            source = row if not interleaved else 16 * turn + place % 16 + (48 if place >= 16 else 0)
            for k in range(12):
                expected = float(whole[source, k]) if source < len(whole) else 0.0
                assert element(packed, row, k) == expected, (interleaved, row, k)


def test_a_long_load_tells_where_it_is() -> None:
    progress = LoadProgress(1, 2, 30, now=100.0)
    assert progress.add(1 << 30, 100.0 + EVERY_S / 2) is None
    progress.at_layer(11)
    told = progress.add(1 << 30, 110.0)
    assert told == "rank 1 of 2: loading weights, 2048 MiB in 10.0 s (0.21 GB/s), layer 12 of 30"
    assert progress.add(1, 110.0 + EVERY_S - 1) is None
    assert progress.end(120.0) == "rank 1 of 2: weights loaded, 2048 MiB in 20.0 s (0.11 GB/s)"
    alone = LoadProgress(0, 1, 30, now=5.0)
    assert alone.end(5.0).startswith("weights loaded, 0 MiB in 0.0 s")
