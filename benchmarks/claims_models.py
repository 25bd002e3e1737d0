"""Claims of the models: each family beside Hugging Face, and beside itself."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.claims import Measured, Skip, claim

if TYPE_CHECKING:
    from benchmarks.equality import Item

#: served by name
REAL_MODELS = ("smollm2-135m-instruct", "gemma3-270m")


@claim("tp.models")
def models(full: bool) -> Iterator[tuple[str, Measured]]:
    """float32, prefix cache, chunks and preemption on: how far the worst of our tokens is from transformers' best,
    teacher-forced; and for how many requests transformers, running free, says the same.
    """
    from benchmarks.family_check import TINY_ITEMS
    from benchmarks.tiny_models import TINY_MODELS, make

    with tempfile.TemporaryDirectory() as root:
        for name, tiny in TINY_MODELS.items():
            folder = make(Path(root) / name, name)
            yield from _told(name, folder, TINY_ITEMS, f"tiny, {tiny.decoder}")


@claim("tp.models-equal")
def equal(full: bool) -> Iterator[tuple[str, Measured]]:
    """Requests whose tokens or logits differ in any bit between our own ways of computing, over all tiny models."""
    from benchmarks.equality import make_items
    from benchmarks.family_check import TINY_ITEMS, unequal
    from benchmarks.tiny_models import TINY_MODELS, make

    items = make_items(24, 24, vocab=(0, 256)) if full else TINY_ITEMS
    with tempfile.TemporaryDirectory() as root:
        folders = {name: make(Path(root) / name, name) for name in TINY_MODELS}
        for dtype in ("float32", "bfloat16"):
            lines = [f"{name}: {line}" for name, folder in folders.items() for line in unequal(folder, dtype, items)]
            note = "; ".join([f"{len(folders)} models x {len(items)} requests", *lines[:3]])
            yield dtype, Measured(len(lines), "requests differ", 0, note=note)


def _told(
    name: str, folder: Path, items: Sequence[Item], what: str, **runner: object
) -> Iterator[tuple[str, Measured]]:
    from benchmarks.family_check import judge
    from benchmarks.hf_reference import TOLERANCE

    verdicts, tally = judge(folder, items, **runner)
    same = sum(verdict.num_equal == verdict.num_tokens for verdict in verdicts)
    note = f"{same} of {len(verdicts)} free-running sequences equal; {tally.preemptions} preemptions; {what}"
    yield name, Measured(max(verdict.worst_gap for verdict in verdicts), "of a logit", TOLERANCE, note=note)


def _real(name: str, full: bool) -> Iterator[tuple[str, Measured]]:
    """The same of a model that people have."""
    from benchmarks.equality import make_items
    from cluster import model_store
    from replica.errors import ShoalError

    try:
        folder = Path(model_store.resolve(name))
    except ShoalError as error:
        raise Skip(f"{name} is not here: {error}") from error
    items = make_items(16, 48) if full else make_items(8, 16)
    for _, measured in _told(name, folder, items, "real weights", max_model_len=2048):
        yield "", measured


for _name in REAL_MODELS:
    claim(f"tp.models-{_name}")(functools.partial(_real, _name))
