"""TORCH. What a decoder is: the protocol of its forward pass, and the way from a folder to its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from replica.config_checks import read_model_config
from replica.errors import ModelLoadError
from replica.input_batch import InputBatch
from replica.models.decoder_config import DecoderConfig, ModelShape
from replica.models.families import parse


class Decoder(Protocol):
    """A loaded model with its KV pool. Not thread-safe; always called from the same thread."""

    #: part of the model fingerprint: other kernels, other bits
    kernels: str
    #: see `kv_pool.allocate`
    pool: torch.Tensor

    def forward(self, batch: InputBatch) -> tuple[NDArray[np.int32], torch.Tensor]:
        """Compute one step: write K and V of its tokens, choose a token for each of the first `batch.num_chosen` rows
        of `batch.sample_rows`; but for a batch with `ruled` sequences leave the choice to `choose`.

        Returns (tokens [num_chosen], float32 logits [num_samples, vocab_size]); the next call overwrites the logits.
        On a rank that does not choose, both are empty.
        """
        ...

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """Tokens [num_chosen] from the logits of the last `forward`, which the caller may have changed in place."""
        ...


def read_config(folder: Path) -> ModelShape:
    """Parse `folder/config.json`: a `DecoderConfig` where the decoder knows the family, else what transformers says of
    the model. Raises ModelLoadError saying which field cannot be served.
    """
    raw = read_model_config(folder)
    if (config := parse(raw)) is not None:
        return config
    from replica.models.transformers_shape import read_shape  # transformers takes seconds to import

    return read_shape(folder, raw)


def read_decoder_config(folder: Path) -> DecoderConfig:
    """As `read_config`, of a family that the decoder knows. Raises ModelLoadError for any other."""
    config = read_config(folder)
    if not isinstance(config, DecoderConfig):
        raise ModelLoadError(f"{folder}: architecture {config.architecture} has no decoder of ours")
    return config
