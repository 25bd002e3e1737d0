"""PURE. What the names and dtypes of a checkpoint's tensors say before any is read.

The scales of a quantized one lie beside the weights under names that no decoder asks for, so without a look at them the
weights would be taken as they are. GPTQ and AWQ have qweight, qzeros, scales, g_idx; compressed-tensors and FP8
weight_scale, weight_scale_inv, weight_packed and more; bitsandbytes absmax, quant_map, SCB, quant_state; MLX scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from replica.errors import ModelLoadError

FLOATS = ("F64", "F32", "F16", "BF16")
_LAST_PARTS = {
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_packed",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "absmax",
    "nested_absmax",
    "quant_map",
    "nested_quant_map",
    "SCB",
}
#: gpt-oss keeps MXFP4 under names of their own
_LAST_PARTS |= {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"}


def refuse_quantized(tensors: Iterable[tuple[str, str]]) -> None:
    """Of each (name, dtype as safetensors writes it). Raises ModelLoadError with the first that only a quantized
    checkpoint has. Integers under other names than weights pass: some models keep masks and positions.
    """
    for name, dtype in tensors:
        last = name.rpartition(".")[2]
        if last in _LAST_PARTS or ".quant_state." in name:
            raise ModelLoadError(f"tensor {name} belongs to a quantized checkpoint{_WHAT_TO_DO}")
        if dtype.startswith("F8_") or (last == "weight" and dtype not in FLOATS):
            raise ModelLoadError(f"tensor {name} has dtype {dtype}, so the checkpoint is quantized{_WHAT_TO_DO}")


_WHAT_TO_DO = ", and dequantizing is not offered; take the model's float32, float16 or bfloat16 weights"


def told_of_unread(folder: Path, names: Sequence[str]) -> str:
    """One sentence on tensors that change nothing, because nobody reads them."""
    first = ", ".join(name[:100] for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{folder.name}: this model does not read {len(names)} tensors of its files: {first}{more}"
