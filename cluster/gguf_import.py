"""ASYNC (imports numpy-only tools, no torch). A GGUF file as a plain HF-style folder with bf16 weights.

Runs once per file; `cluster/model_store.py` decides when. Heavy imports are inside the functions, since every router
and replica imports the store and only one process converts. Goes through the file some rows at a time, so its memory
does not grow with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cluster.gguf_families import ROPE_TABLES, Family, config_json, family_of
from cluster.gguf_file import GgufFile, GgufTensor
from cluster.gguf_tokenizer import Vocabulary, build, tokenizer_config
from replica.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: raise it whenever a conversion would come out differently
CONVERSION_VERSION = 2
#: dequantised at once; the dequantisation needs a few times as much
_VALUES_AT_ONCE = 1 << 20


def convert(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights of `source` into the empty `folder`.

    Raises ModelLoadError for a file that is damaged, or of an architecture or with a tokenizer that is not known.
    """
    file = GgufFile(source)
    meta = file.metadata
    family = family_of(meta)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{source}: tensor token_embd.weight is missing")
    vocabulary = Vocabulary(meta)
    with source.open("rb") as data:
        tables = {name: _table(file, data, tensors.pop(name)) for name in ROPE_TABLES if name in tensors}
        config = config_json(meta, tensors, tables)
        if len(vocabulary.names) > config["vocab_size"]:
            raise ModelLoadError(
                f"{source}: {len(vocabulary.names)} tokens and an embedding of {config['vocab_size']} rows"
            )
        _write_json(folder / "config.json", {**config, **vocabulary.token_ids()})
        _write_json(folder / "generation_config.json", vocabulary.token_ids())
        build(vocabulary).save(str(folder / "tokenizer.json"))
        _write_json(
            folder / "tokenizer_config.json",
            {**tokenizer_config(vocabulary), "model_max_length": config["max_position_embeddings"]},
        )
        with (folder / "model.safetensors").open("wb") as target:
            names = {name: family.hf_name(name) for name in tensors}
            target.write(_safetensors_header({names[name]: tensor.shape for name, tensor in tensors.items()}))
            for tensor in tensors.values():
                for values in _converted(file, data, tensor, family, config):
                    target.write(_to_bfloat16(values).tobytes())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _table(file: GgufFile, data: BinaryIO, tensor: GgufTensor) -> list[float]:
    return [float(value) for value in file.rows(data, tensor, 0, tensor.num_rows).reshape(-1)]


def _converted(
    file: GgufFile, data: BinaryIO, tensor: GgufTensor, family: Family, config: Mapping[str, Any]
) -> Iterator[NDArray[np.float32]]:
    """The tensor's rows in order, as Hugging Face has them, some at a time."""
    at_once = max(1, _VALUES_AT_ONCE // tensor.shape[-1])
    parts = tensor.name.split(".")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(parts[-2], 0)
    is_ordered = family.has_rope_order and heads > 0
    if is_ordered and len(tensor.shape) == 1:  # a bias: one row that holds all heads
        yield _undo_rope_order(file.rows(data, tensor, 0, 1).reshape(-1, 1), heads).reshape(-1)
        return
    if is_ordered:  # whole heads, since rows change places within one
        width = tensor.num_rows // heads
        if width * heads != tensor.num_rows or width % 2:
            raise ModelLoadError(f"{file.path}: tensor {tensor.name} has {tensor.num_rows} rows for {heads} heads")
        at_once = max(1, at_once // width) * width
    for first in range(0, tensor.num_rows, at_once):
        values = file.rows(data, tensor, first, min(at_once, tensor.num_rows - first))
        if is_ordered:
            values = _undo_rope_order(values, len(values) // width)
        elif family.has_shifted_norms and parts[-2].endswith("norm"):
            values = values - 1
        yield values


def _undo_rope_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF pairs dims (0, 1), (2, 3), ... for RoPE; Hugging Face pairs (0, half), (1, half + 1), ... of each head."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _safetensors_header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A length and a JSON header for bf16 tensors that follow in this order."""
    import math

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
