"""TORCH. Any causal language model of transformers on our paged cache: its layers' code, our attention.

transformers asks a registered function for attention; ours writes K and V of the step to the pool and reads it through
the block tables. A step is one flat row of tokens with their positions. What in transformers' code depends on a row's
company is replaced: linears, activations and rotary tables. Whether that was enough, the start-up self-test says.
"""

from __future__ import annotations

import inspect
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from replica.attention.contract import AttentionStep, Mask, PagedAttention
from replica.checkpoint import Checkpoint
from replica.errors import ModelLoadError
from replica.input_batch import InputBatch
from replica.models.decoder_config import ModelShape
from replica.models.invariant_modules import make_invariant
from replica.sampler import sample
from replica.tensor_names import refuse_quantized, told_of_unread

logger = logging.getLogger(__name__)
ATTENTION_NAME = "shoal"
#: what layers hand on to attention and what changes nothing in it
_HARMLESS = {
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "layer_idx",
    "past_key_values",
    "position_ids",
    "use_cache",
}
#: tokens of the trial after loading, in two steps; and how far logits may lie from transformers' own, as a share of
#: their range
_TRIAL = (6, 4)
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass
class _Running:
    """The step that a model is in the middle of, for the attention function to find."""

    pool: torch.Tensor
    attention: PagedAttention
    step: AttentionStep
    place: tuple[torch.Tensor, torch.Tensor]
    seen: set[int] = field(default_factory=set)


class _Local(threading.local):
    running: _Running | None = None


_local = _Local()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer. query: [1, heads, tokens, head_dim]; returns [1, tokens, heads, head_dim].

    Raises ModelLoadError for a layer that wants what our attention does not have; the trial after loading finds it.
    """
    running = _local.running
    assert running is not None, "called outside of a step"
    kind = type(module).__name__
    asked = [name for name, one in more.items() if one is not None and one is not False and name not in _HARMLESS]
    if asked or attention_mask is not None:
        raise ModelLoadError(f"{kind} asks attention for {', '.join(asked) or 'a mask'}, which ours does not have")
    if not getattr(module, "is_causal", True):
        raise ModelLoadError(f"{kind} is not causal")
    layer = getattr(module, "layer_idx", None)
    pool = running.pool
    shape = (pool.shape[1], pool.shape[5])
    if not isinstance(layer, int) or layer >= pool.shape[2]:
        raise ModelLoadError(f"{kind} does not say which layer it is of")
    for name, one in (("keys", key), ("values", value)):
        if (one.shape[1], one.shape[3]) != shape:
            raise ModelLoadError(
                f"{kind} has {name} of {one.shape[1]} heads of {one.shape[3]}, "
                f"and config.json says {shape[0]} of {shape[1]}"
            )
    running.seen.add(layer)
    block, offset = running.place
    pool[block, :, layer, 0, offset] = key[0].transpose(0, 1).to(pool.dtype)
    pool[block, :, layer, 1, offset] = value[0].transpose(0, 1).to(pool.dtype)
    mask = Mask(scaling if scaling is not None else shape[1] ** -0.5, sliding_window, softcap)
    rows = query[0].transpose(0, 1).contiguous().to(pool.dtype)
    return running.attention(rows, pool, layer, running.step, mask)[None].to(query.dtype), None


class TransformersDecoder:
    """See `replica.models.decoder.Decoder`. One rank only."""

    def __init__(
        self, folder: Path, shape: ModelShape, pool: torch.Tensor, max_len: int, attention: PagedAttention
    ) -> None:
        import transformers
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, _attend)
        self.kernels = f"transformers {transformers.__version__}, torch {torch.__version__}, attention {attention.name}"
        checkpoint = Checkpoint(folder)
        refuse_quantized(checkpoint.dtypes())
        self.digest = checkpoint.digest()  # before transformers touches the files
        self.pool = pool
        self._attention = attention
        self._shape = shape
        self._model = _load(folder, shape, pool.dtype)
        self.weight_bytes = sum(p.nbytes for p in self._model.parameters())
        parameters = inspect.signature(self._model.forward).parameters
        if "position_ids" not in parameters:
            raise ModelLoadError(f"{shape.architecture} does not take positions")
        self._picks_rows = "logits_to_keep" in parameters
        self._last_logits = torch.empty((0, shape.vocab_size))
        self._try(folder, max_len)

    def forward(self, batch: InputBatch) -> tuple[NDArray[np.int32], torch.Tensor]:
        """See `Decoder.forward`."""
        step = AttentionStep(
            seq_start=torch.from_numpy(batch.seq_start),
            positions=torch.from_numpy(batch.positions).long(),
            block_tables=torch.from_numpy(batch.block_tables[batch.seq_slot]),
        )
        rows = torch.from_numpy(batch.sample_rows).long()
        tokens = torch.from_numpy(batch.token_ids).long()
        self._last_logits = self._compute(tokens, step, torch.from_numpy(batch.slots), rows)
        chosen = np.zeros(0, np.int32) if batch.ruled else self.choose(batch)
        return chosen, self._last_logits

    def choose(self, batch: InputBatch) -> NDArray[np.int32]:
        """See `Decoder.choose`."""
        rows = self._last_logits[: batch.num_chosen].numpy()
        return sample(rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)

    def _compute(
        self, tokens: torch.Tensor, step: AttentionStep, slots: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """float32 logits [rows, vocab] of one step."""
        if not len(rows):  # some models make nothing of no rows
            rows, wanted = rows.new_zeros(1), 0
        else:
            wanted = len(rows)
        block_size = self.pool.shape[4]
        place = (slots // block_size, slots % block_size)
        more = {"logits_to_keep": rows} if self._picks_rows else {}
        _local.running = running = _Running(self.pool, self._attention, step, place)
        try:
            out = self._model(input_ids=tokens[None], position_ids=step.positions[None], use_cache=False, **more)
        finally:
            _local.running = None
        if len(running.seen) != self._shape.num_layers:
            raise ModelLoadError(
                f"{self._shape.architecture}: {len(running.seen)} of {self._shape.num_layers} layers go through "
                "transformers' attention interface"
            )
        logits: torch.Tensor = out.logits[0] if self._picks_rows else out.logits[0][rows]
        return logits[:wanted].float().contiguous()

    def _try(self, folder: Path, max_len: int) -> None:
        """A few tokens in two steps through our cache, against transformers' own attention over all at once: what
        keeps a state of its own, or positions that ours does not see, comes out here. Raises ModelLoadError.
        """
        count, block_size = sum(_TRIAL), self.pool.shape[4]
        if count > min(max_len, self.pool.shape[0] * block_size):
            return
        tokens = torch.arange(3, 3 + count) % self._shape.vocab_size
        name = f"{folder.name}: {self._shape.architecture}"
        try:
            self._model.set_attn_implementation("eager")
            expected = self._model(input_ids=tokens[None], use_cache=False).logits[0].float()
            self._model.set_attn_implementation(ATTENTION_NAME)
            make_invariant(self._model, max_len)
            found, begin = [], 0
            for length in _TRIAL:
                found.append(self._compute_trial(tokens, begin, length))
                begin += length
        except ModelLoadError as error:
            raise ModelLoadError(f"{name} cannot run on our cache: {error}") from error
        except Exception as error:
            raise ModelLoadError(f"{name} cannot run on our cache: {type(error).__name__}: {error}") from error
        if not torch.isfinite(expected).all():
            raise ModelLoadError(f"{name} computes NaN or infinity, with transformers' own attention too")
        self.pool[: -(-count // block_size)] = 0
        distance = float((torch.cat(found) - expected).abs().max() / (expected.max() - expected.min()))
        if not distance <= _TRIAL_TOLERANCE[self.pool.dtype]:
            raise ModelLoadError(
                f"{name} cannot run on our cache: logits are {distance:.2g} of their range away from transformers' own"
            )

    def _compute_trial(self, tokens: torch.Tensor, begin: int, length: int) -> torch.Tensor:
        end, block_size = begin + length, self.pool.shape[4]
        positions = torch.arange(begin, end)
        blocks = torch.arange(-(-len(tokens) // block_size), dtype=torch.int32)[None]
        step = AttentionStep(torch.tensor([0, length], dtype=torch.int32), positions, blocks)
        return self._compute(tokens[begin:end], step, positions, torch.arange(length))


def _load(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Any:
    """The model as transformers loads it: from safetensors only, and no code of the folder. Raises ModelLoadError."""
    from transformers import AutoModelForCausalLM

    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{folder}: transformers cannot load {shape.architecture}: {text}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if told.get(kind):
            names = sorted(map(str, told[kind]))
            raise ModelLoadError(f"{folder}: {kind.replace('_', ' ')} in the weights: {', '.join(names[:3])}")
    if told.get("unexpected_keys"):
        logger.warning("%s", told_of_unread(folder, sorted(map(str, told["unexpected_keys"]))))
    return model.eval()
