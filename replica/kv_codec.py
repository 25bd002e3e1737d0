"""PURE. Offloaded KV in 8 or 4 bits: a slab smaller in arena, on disk and on the wire, and not quite what it was.

A slab is `[kv_heads, layers, 2, block_size, head_dim]`. Scales are per head, layer, keys or values, and group of
channels, over the block's tokens: in keys a few channels are far larger than others at every token, so groups run
along tokens and are narrow in channels (KIVI, arXiv 2402.02750, finds the same for keys). Each head is coded by itself
and has equal bytes, so rank r's part is the r-th of equal parts as it is without compression.

Coded head: scales (float32 of every group; with 4 bits the least value of each as well), then the numbers.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class KVShape(msgspec.Struct, frozen=True):
    """Of the slab that one rank has; `is_bf16`: elements of 2 bytes, else float32."""

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    is_bf16: bool

    @property
    def slab_bytes(self) -> int:
        return self.kv_heads * self.layers * 2 * self.block_size * self.head_dim * (2 if self.is_bf16 else 4)


class KVCodec:
    """For slabs of one shape. Raises ValueError for a shape or a number of bits that cannot be."""

    def __init__(self, shape: KVShape, bits: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"{bits} bits; allowed are 4 and 8")
        self.shape = shape
        self.bits = bits
        #: channels of a group: 8 bits bear wide ones
        self.group = 16 if bits == 8 else 4
        if shape.head_dim % self.group:
            raise ValueError(f"head_dim {shape.head_dim} is no multiple of {self.group}, as {bits} bits need")
        #: per head: parts (layer, keys or values), groups
        self._parts, self._groups = 2 * shape.layers, shape.head_dim // self.group
        num_values = self._parts * shape.block_size * shape.head_dim
        self._scale_bytes = self._parts * self._groups * 4 * (1 if bits == 8 else 2)
        self._head_bytes = self._scale_bytes + num_values * bits // 8

    @property
    def coded_bytes(self) -> int:
        """Of a slab."""
        return self.shape.kv_heads * self._head_bytes

    def encode(self, slab: Bytes, into: Bytes) -> None:
        """`slab_bytes` to `coded_bytes`. What is not finite becomes zero (8 bits) or makes its group so (4 bits)."""
        values = np.nan_to_num(self._grouped(slab), copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        # [heads, parts, tokens, groups, group] -> one scale over tokens and group
        if self.bits == 8:
            scale = np.abs(values).max(axis=(2, 4)) / np.float32(127)
            low = np.zeros_like(scale)
            scales = scale[:, None]
        else:
            low = values.min(axis=(2, 4))
            scale = (values.max(axis=(2, 4)) - low) / np.float32(15)
            scales = np.stack([scale, low], axis=1)
        factor = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 1e-38)
        values -= low[:, :, None, :, None]
        values *= factor[:, :, None, :, None]
        numbers = np.rint(values, out=values).reshape(self.shape.kv_heads, -1)
        heads = into[: self.coded_bytes].reshape(self.shape.kv_heads, self._head_bytes)
        heads[:, : self._scale_bytes] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(len(heads), -1)
        if self.bits == 8:
            heads[:, self._scale_bytes :] = numbers.astype(np.int8).view(np.uint8)
        else:
            whole = numbers.astype(np.uint8)
            heads[:, self._scale_bytes :] = whole[:, 0::2] | whole[:, 1::2] << 4

    def decode(self, coded: Bytes, into: Bytes) -> None:
        """The reverse, as near as it comes."""
        shape = self.shape
        heads = coded[: self.coded_bytes].reshape(shape.kv_heads, self._head_bytes)
        scales = np.ascontiguousarray(heads[:, : self._scale_bytes]).view("<f4")
        scales = scales.reshape(shape.kv_heads, -1, self._parts, 1, self._groups, 1)
        packed = heads[:, self._scale_bytes :]
        if self.bits == 8:
            numbers = packed.view(np.int8).astype(np.float32)
        else:
            numbers = np.empty((shape.kv_heads, 2 * packed.shape[1]), np.float32)
            numbers[:, 0::2] = packed & 15
            numbers[:, 1::2] = packed >> 4
        values = numbers.reshape(shape.kv_heads, self._parts, shape.block_size, self._groups, self.group)
        values *= scales[:, 0]
        if self.bits == 4:
            values += scales[:, 1]
        into[: shape.slab_bytes] = (_to_bf16(values) if shape.is_bf16 else values.reshape(-1)).view(np.uint8)

    def _grouped(self, slab: Bytes) -> Floats:
        """A copy: [heads, parts, tokens, groups, group]."""
        raw = slab[: self.shape.slab_bytes]
        if self.shape.is_bf16:
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view("<f4").astype(np.float32)
        return values.reshape(self.shape.kv_heads, self._parts, self.shape.block_size, self._groups, self.group)


def _to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = values.reshape(-1).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
