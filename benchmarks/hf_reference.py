"""Teacher-forced comparison with Hugging Face transformers, reusable by every tier that produces tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: a token is right if HF's logit for it is this close to HF's best (design section 4: our bits and HF's differ)
TOLERANCE = 1e-3

#: openings of different kinds: prose, code, lists, numbers, other languages, chat, repetition, one token
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village at the edge of a dark forest, there lived",
    "1, 2, 3, 4, 5, 6,",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "Wasser kocht bei einer Temperatur von",
    "x   42\n\n\t y = 3.14159 * r ** 2\n",
    "the the the the the the the the the the the the the the the the the",
    "Hi",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n- a pinch of salt\n\nMethod:\n1.",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Dear Sir or Madam,\n\nI am writing to complain about",
)


@dataclass(frozen=True)
class Verdict:
    """How far our tokens fall short of HF's choice, teacher-forced on our own output."""

    #: largest (best logit - logit of our token) over all output positions
    worst_gap: float
    #: output positions where our token is also HF's argmax
    num_equal: int
    num_tokens: int


class Reference:
    """The model as transformers computes it, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def judge(self, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
        """Run HF once over prompt + output and look at what it would have said at each output position."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0]
        rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(output)]
        ours = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = rows.max(dim=1).values - ours
        return Verdict(float(gaps.max()), int((gaps == 0).sum()), len(output))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 logits [len(tokens), vocab]"""
        with torch.inference_mode():
            result: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return result
