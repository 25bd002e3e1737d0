"""TORCH. A Llama-type decoder whose whole step runs in the C++ kernels. torch only holds the memory."""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from replica.input_batch import InputBatch
from replica.models.decoder_config import DecoderConfig
from replica.models.panels import PANEL, pack, packed_bytes
from replica.models.rope import rotary_tables
from replica.native.library import STEP_ARRAYS, Layer, Library, Model, Step
from replica.weight_matrix import Matrix
from replica.weights import WeightReader

T = TypeVar("T", Matrix, torch.Tensor)


def why_not_native(config: DecoderConfig) -> str | None:
    """A reason why the kernels cannot run this shape, or None."""
    if not config.is_plain:
        return "they compute plain Llama shapes only"
    for name, value in (("hidden_size", config.hidden_size), ("head_dim", config.head_dim)):
        if value % PANEL:
            return f"{name}={value} is not a multiple of {PANEL}"
    if config.intermediate_size % (PANEL // 2):
        return f"intermediate_size={config.intermediate_size} is not a multiple of {PANEL // 2}"
    return None


def _there(weight: T | None) -> T:
    assert weight is not None, "why_not_native() lets only plain shapes pass"
    return weight


class Arena:
    """One piece of memory for all packed weights, in huge pages where the system gives them.

    Most layers' weights are smaller than a huge page. Meant to end that a step at batch 1 took 7.4 to 11 ms from one
    process to the next; whether it does was not settled on a shared machine.
    """

    _HUGE_PAGE = 1 << 21

    def __init__(self, library: Library, num_bytes: int) -> None:
        memory = torch.empty(num_bytes + self._HUGE_PAGE, dtype=torch.uint8)
        skipped = -memory.data_ptr() % self._HUGE_PAGE
        self._memory = memory[skipped : skipped + num_bytes]
        self._used = 0
        library.use_huge_pages(self._memory.data_ptr(), num_bytes)

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next `num_bytes`, aligned to 64."""
        start = self._used
        self._used = start + (num_bytes + 63) // 64 * 64
        assert self._used <= len(self._memory), "arena_bytes() is wrong"
        return self._memory[start : start + num_bytes]


def arena_bytes(config: DecoderConfig, itemsize: int) -> int:
    """What all packed weights of the model take, alignment included."""

    def one(rows: int, columns: int) -> int:
        return (packed_bytes((rows, columns), itemsize) + 63) // 64 * 64

    hidden, inter = config.hidden_size, config.intermediate_size
    layer = one(config.q_dim + 2 * config.kv_dim, hidden) + one(hidden, config.q_dim)
    layer += one(2 * inter, hidden) + one(hidden, inter)
    return config.num_layers * layer + one(config.vocab_size, hidden)


class NativeDecoder:
    """See `replica.models.decoder.Decoder`. Holds the KV pool by reference."""

    def __init__(self, library: Library, reader: WeightReader, pool: torch.Tensor, max_len: int, threads: int) -> None:
        config = reader.config
        self._library = library
        self._vocab_size = config.vocab_size
        self.kernels = f"native {library.isa}"
        self.pool = pool
        self._keep: list[torch.Tensor] = []
        self._arena = Arena(library, arena_bytes(config, pool.dtype.itemsize))
        layers = (Layer * config.num_layers)()
        for i, weights in enumerate(reader.layers()):
            layers[i] = Layer(
                self._packed(weights.qkv),
                self._packed(weights.o),
                self._packed(_there(weights.gate_up), interleaved=True),
                self._packed(_there(weights.down)),
                self._held(_there(weights.vectors.input_norm)),
                self._held(_there(weights.vectors.mlp_norm)),
            )
        self._model = self._describe(reader, pool, max_len, threads, layers)
        self._logits = torch.empty((0, 0))
        self._scratch = torch.empty(0, dtype=torch.uint8)
        #: the last step, and what its pointers point into
        self._last: tuple[Step, dict[str, NDArray[Any]], NDArray[np.int32]] | None = None

    def _describe(
        self, reader: WeightReader, pool: torch.Tensor, max_len: int, threads: int, layers: ctypes.Array[Layer]
    ) -> Model:
        config = reader.config
        cos, sin = rotary_tables(config.ropes[0], max_len)
        block, head, layer, kv = pool.stride()[:4]
        return Model(
            hidden=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            is_bf16=int(pool.dtype == torch.bfloat16),
            num_threads=threads,
            block_size=pool.shape[4],
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            embed=None if reader.is_tied else self._held(reader.embedding().read()),
            head=self._packed(reader.head()),
            final_norm=self._held(reader.final_norm()),
            cos=self._held(cos),
            sin=self._held(sin),
            layers=layers,
            kv=pool.data_ptr(),
            block_stride=block,
            head_stride=head,
            layer_stride=layer,
            kv_stride=kv,
        )

    def _held(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _packed(self, matrix: Matrix, interleaved: bool = False) -> int:
        packed = self._arena.take(packed_bytes(matrix.shape, matrix.dtype.itemsize))
        pack(self._library, matrix, packed, interleaved)
        return packed.data_ptr()

    def forward(self, batch: InputBatch) -> tuple[NDArray[np.int32], torch.Tensor]:
        """See `Decoder.forward`. One call into the kernels."""
        num_tokens, num_samples = len(batch.token_ids), len(batch.sample_rows)
        self._reserve(num_tokens, num_samples)
        tokens = np.empty(batch.num_chosen, np.int32)
        arrays = {name: np.ascontiguousarray(getattr(batch, name)) for name in STEP_ARRAYS}
        step = Step(
            num_tokens=num_tokens,
            num_seqs=len(batch.seq_slot),
            num_samples=num_samples,
            num_chosen=batch.num_chosen,
            defers_choice=int(bool(batch.ruled)),
            logits_stride=self._logits.shape[1],
            table_stride=batch.block_tables.shape[1],
            logits=self._logits.data_ptr(),
            tokens=tokens.ctypes.data,
            scratch=(self._scratch.data_ptr() + 63) // 64 * 64,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self._library.forward(self._model, step)
        self._last = (step, arrays, tokens)
        return tokens, self._logits[:num_samples, : self._vocab_size]

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """See `Decoder.choose`."""
        assert self._last is not None, "forward() first"
        step, _, tokens = self._last
        self._library.choose(self._model, step)
        return tokens

    def _reserve(self, num_tokens: int, num_samples: int) -> None:
        need = self._library.scratch_bytes(self._model, num_tokens, num_samples) + 64
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8)
        if self._logits.shape[0] < num_samples:
            width = (self._vocab_size + PANEL - 1) // PANEL * PANEL
            self._logits = torch.empty((max(num_samples, 2 * self._logits.shape[0]), width))
