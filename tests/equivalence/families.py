"""The tiny checkpoints of all families, made once a session, and runners of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.equality import Way, make_items
from benchmarks.tiny_models import TINY_MODELS
from replica.config import DType
from replica.model_runner import TorchModelRunner
from tests.equivalence.runner_driver import make_config

NAMES = tuple(TINY_MODELS)
#: half greedy, some share prefixes; longer than the windows
ITEMS = make_items(8, 10, seed=5, vocab=(0, 256))
#: prompts in chunks, prefixes found, blocks for little more than the longest request
EVERYTHING = Way("chunks, prefix cache, preemption", num_blocks=0, token_budget=48, prefix_caching=True, warm=True)


def make_runner(folder: Path, dtype: DType = "float32", self_test: bool = False, **more: Any) -> TorchModelRunner:
    """With room for all of `ITEMS` at once. One thread: two that wait for each other on a busy machine take eight times
    as long, and with tensors this small no work is split anyway (`test_a_wide_model_on_two_threads` has some that are).
    """
    return TorchModelRunner(make_config(dtype, 16, 160, **{"threads": 1, **more}), folder, self_test=self_test)
