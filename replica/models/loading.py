"""TORCH. From a folder and its shape to a decoder with its KV pool: which of the three forms serves it, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from replica.attention.select import select
from replica.collective import Collective
from replica.errors import ConfigError
from replica.models import kv_pool
from replica.models.decoder import Decoder
from replica.models.decoder_config import DecoderConfig, ModelShape
from replica.models.native_decoder import NativeDecoder, why_not_native
from replica.models.torch_decoder import TorchDecoder
from replica.native import library as native
from replica.native.builder import NativeUnavailableError
from replica.shard import Shard, check_divides
from replica.tensor_names import told_of_unread
from replica.weights import WeightReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadSettings:
    """What a decoder is loaded for."""

    dtype: torch.dtype
    num_blocks: int
    block_size: int
    max_len: int
    threads: int
    layer_major: bool
    shard: Shard
    collective: Collective


@dataclass(frozen=True)
class Loaded:
    """A decoder, and what is to be told of it."""

    decoder: Decoder
    #: why it is not a faster one, or nothing
    note: str
    #: as read, before any padding of a layout
    weight_bytes: int
    #: of the weight files
    digest: str

    @property
    def description(self) -> str:
        return self.decoder.kernels + self.note


def check_ranks(shape: ModelShape, size: int) -> None:
    """Raises ConfigError if `size` ranks cannot share the model, whoever computes it."""
    if size > 1 and not isinstance(shape, DecoderConfig):
        raise ConfigError(
            f"tensor_parallel_size={size}: {shape.architecture} runs through transformers, which is not cut into "
            "ranks; allowed: 1"
        )
    check_divides(shape.to_cut, size)


def load_decoder(folder: Path, shape: ModelShape, settings: LoadSettings) -> Loaded:
    """Raises ModelLoadError or ConfigError for what cannot be served."""
    if not isinstance(shape, DecoderConfig):
        return _load_transformers(folder, shape, settings)
    reader = WeightReader(folder, shape, settings.dtype, shard=settings.shard)
    try:
        decoder: Decoder = _load_native(reader, settings)
        note = ""
    except NativeUnavailableError as error:
        attention = select("cpu", settings.dtype, settings.block_size)
        pool = _allocate(shape, settings)
        decoder = TorchDecoder(reader, pool, settings.max_len, attention, settings.collective)
        note = f" (no native kernels: {error})"
    if names := reader.unread():
        logger.warning("%s", told_of_unread(folder, names))
    reader.finish()
    return Loaded(decoder, note, reader.num_bytes, reader.digest())


def _load_native(reader: WeightReader, settings: LoadSettings) -> NativeDecoder:
    """Raises NativeUnavailableError, saying why the kernels do not serve here."""
    if settings.shard.size > 1:
        raise NativeUnavailableError("several ranks share the model")
    if reason := why_not_native(reader.config):
        raise NativeUnavailableError(reason)
    library = native.load()
    pool = _allocate(reader.config, settings, library)
    return NativeDecoder(library, reader, pool, settings.max_len, settings.threads)


def _load_transformers(folder: Path, shape: ModelShape, settings: LoadSettings) -> Loaded:
    from replica.models.transformers_decoder import TransformersDecoder

    attention = select("cpu", settings.dtype, settings.block_size)
    decoder = TransformersDecoder(folder, shape, _allocate(shape, settings), settings.max_len, attention)
    return Loaded(decoder, "", decoder.weight_bytes, decoder.digest)


def _allocate(shape: ModelShape, settings: LoadSettings, library: native.Library | None = None) -> torch.Tensor:
    return kv_pool.allocate(
        shape,
        settings.num_blocks,
        settings.block_size,
        settings.dtype,
        library.use_huge_pages if library else None,
        settings.layer_major,
        settings.shard,
    )
