"""TORCH. The start-up self-test: are a row's logits the same bits alone, batched and chunked, on this device?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from replica.errors import ModelLoadError
from replica.messages import SamplingParams
from replica.step import NewSequence, StepPlan

if TYPE_CHECKING:
    from replica.model_runner import TorchModelRunner

# 3 prompts of at most 45 tokens and a few steps: about 0.2 s on two cores with the default model.
_LENGTHS = (5, 17, 45)
_DECODE_STEPS = 2

Logits = dict[int, list[torch.Tensor]]
#: stands for logits on a rank that has none
_ON_RANK_0 = torch.empty(0)


def check_invariance(runner: TorchModelRunner, vocab_size: int, num_blocks: int, block_size: int, room: int) -> bool:
    """Run random prompts through `runner` in three ways and compare the logits bit for bit. With several ranks all do,
    and rank 0 compares.

    Raises ModelLoadError if logits are NaN or infinite: such a model could only answer nonsense.

    Uses the runner's own KV pool from block 0, so call it before serving. `room`: tokens that pool and context hold.
    A pool too small for the test's sequences gets shorter ones.
    """
    longest = max(1, min(room, (num_blocks // len(_LENGTHS)) * block_size) - _DECODE_STEPS)
    lengths = [min(length, longest) for length in _LENGTHS]
    if min(num_blocks // len(_LENGTHS) * block_size, room) <= _DECODE_STEPS:
        return True  # nothing fits beside anything else, so nothing can differ
    generator = np.random.default_rng(7)
    prompts = [generator.integers(0, vocab_size, length).tolist() for length in lengths]
    was_capturing, runner.capture_logits = runner.capture_logits, True
    try:
        alone: Logits = {}
        for i, prompt in enumerate(prompts):
            alone |= _run(runner, {i: prompt}, block_size, num_blocks, chunk=longest)
        batched = _run(runner, dict(enumerate(prompts)), block_size, num_blocks, chunk=longest)
        chunked = _run(runner, dict(enumerate(prompts)), block_size, num_blocks, chunk=7)
    finally:
        runner.capture_logits = was_capturing
    return all(
        torch.equal(reference, other)
        for way in (batched, chunked)
        for i in alone
        for reference, other in zip(alone[i], way[i], strict=True)
    )


def _where(pool: torch.Tensor) -> str:
    """Which layer's keys or values are the first to show it. `pool`: see `kv_pool.allocate`."""
    for layer in range(pool.shape[2]):
        if not torch.isfinite(pool[:, :, layer].float()).all():
            return f"layer {layer} of {pool.shape[2]} is the first whose keys or values are not finite"
    return f"all keys and values are finite, so it happens in the last of {pool.shape[2]} layers or behind it"


def _run(
    runner: TorchModelRunner, prompts: dict[int, list[int]], block_size: int, num_blocks: int, chunk: int
) -> Logits:
    """Prefill in chunks, then decode; returns each sequence's logits, one row per sampled token."""
    share = num_blocks // len(_LENGTHS)
    new = []
    for i, prompt in prompts.items():
        need = -(-(len(prompt) + _DECODE_STEPS) // block_size)
        blocks = list(range(i * share, i * share + need))
        new.append(NewSequence(i, prompt, len(prompt), blocks, SamplingParams(max_tokens=_DECODE_STEPS + 1)))
    computed = dict.fromkeys(prompts, 0)
    known = {i: len(prompt) for i, prompt in prompts.items()}
    logits: Logits = {i: [] for i in prompts}
    step = 0
    while active := [i for i in prompts if len(logits[i]) <= _DECODE_STEPS]:
        scheduled = [min(chunk, known[i] - computed[i]) for i in active]
        plan = StepPlan(step, active, [computed[i] for i in active], scheduled, new=new if step == 0 else [])
        result = runner.agree(plan, runner.execute(plan))
        runner.adopt(result)
        if result.not_finite:
            raise ModelLoadError(f"the model computes NaN or infinity in place of logits; {_where(runner.kv_pool)}")
        for i, count in zip(active, scheduled, strict=True):
            computed[i] += count
        for i in result.seq_ids:
            known[i] += 1
            logits[i].append(runner.last_logits[i][0] if i in runner.last_logits else _ON_RANK_0)
        step += 1
    runner.execute(StepPlan(step, [], [], [], dropped=list(prompts)))
    return logits
