"""PURE. `<think>...</think>` at the beginning of an answer: reasoning and content apart, as the text arrives.

Only the beginning counts: `<think>` inside of an answer is text, and so is a `</think>` that nothing opened. A model
whose prompt ends inside of a thought may open it once more, which is dropped like the tags. Line breaks behind each tag
are dropped, other white space is kept. Thoughts that never end leave no content.
"""

from __future__ import annotations

from router.json_scan import SPACE
from router.tool_grammar import THINK_CLOSE, THINK_OPEN
from router.tool_parser import held_back


class ReasoningSplitter:
    """(reasoning, content) of one choice. Whatever the pieces, the joined parts are the same."""

    def __init__(self, begins_inside: bool = False) -> None:
        self._begins_inside = begins_inside
        #: begin, thought_begin, thought, answer_begin, answer
        self._state = "begin"
        self._rest = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as can be known."""
        return self._state in ("thought_begin", "thought") or (self._state == "begin" and self._begins_inside)

    def push(self, text: str) -> tuple[str, str]:
        """New text of the choice."""
        if self._state == "answer":
            return "", text
        self._rest += text
        reasoning: list[str] = []
        while self._rest and self._advance(reasoning):
            if self._state == "answer":
                break
        if self._state != "answer":
            return "".join(reasoning), ""
        content, self._rest = self._rest, ""
        return "".join(reasoning), content

    def flush(self) -> tuple[str, str]:
        """The choice has ended: what was held back."""
        rest, self._rest = self._rest, ""
        is_reasoning = self.is_reasoning
        begins, self._state = self._state == "begin", "answer"
        if not is_reasoning:
            return "", rest
        return rest.lstrip("\n") if begins else rest, ""

    def _advance(self, reasoning: list[str]) -> bool:
        """Read on in `_rest`; False when it takes more text to go on."""
        if self._state == "begin":
            return self._begin()
        if self._state == "thought":
            return self._thought(reasoning)
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = "thought" if self._state == "thought_begin" else "answer"
        return bool(self._rest)

    def _begin(self) -> bool:
        ahead = self._rest.lstrip(SPACE)
        if ahead.startswith(THINK_OPEN):
            self._rest = ahead[len(THINK_OPEN) :]
            self._state = "thought_begin"
            return True
        if THINK_OPEN.startswith(ahead):
            return False
        self._state = "thought_begin" if self._begins_inside else "answer"
        return True

    def _thought(self, reasoning: list[str]) -> bool:
        rest = self._rest
        at = rest.find(THINK_CLOSE)
        if at >= 0:
            reasoning.append(rest[:at])
            self._rest = rest[at + len(THINK_CLOSE) :]
            self._state = "answer_begin"
            return True
        cut = len(rest) - held_back(rest, THINK_CLOSE)
        reasoning.append(rest[:cut])
        self._rest = rest[cut:]
        return False
