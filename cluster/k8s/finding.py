"""PURE. One thing that is wrong with a manifest."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """`path` is where in the document; `text` names the value and what is allowed or needed."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text
