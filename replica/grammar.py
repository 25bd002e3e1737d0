"""PURE. Grammars that outputs must follow: compiled once, then a matcher for each sequence that walks along its
tokens.

llguidance does the work: it needs no torch (xgrammar's wheel asks for triton, 286 MB, and its import takes 3 s),
compiles a usual schema in 1 ms, refuses schema keywords it cannot enforce instead of ignoring them, and is bounded in
work and not in seconds, so that the router's check and this one agree (`GRAMMAR_LIMITS`). A matcher's state is a
function of the output tokens, so it is rebuilt from them after a preemption or on another replica.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replica.errors import InvalidRequestError
from replica.messages import GRAMMAR_LIMITS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: compiled grammars kept: more than the engine core counts on (`grammar_gate.MAX_KNOWN_GRAMMARS`); one that is gone is
#: only compiled again
_MAX_COMPILED = 64
_MAX_ERROR_CHARS = 300


class GrammarError(Exception):
    """The output cannot go on under its grammar; says why."""


class GrammarMatcher:
    """Where one sequence is in its grammar.

    Matchers of one grammar share what llguidance has learnt about it, and its limits count what all of them needed. So
    that nobody fails because of others, a matcher that runs into a limit starts again on a compilation of its own.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: str, matcher: LLMatcher, vocab_size: int) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._matcher = matcher
        self._is_alone = False
        self._consumed: list[int] = []
        self._words = np.zeros((vocab_size + 31) // 32, np.int32)
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens [vocab] may come next; eos only where the grammar may end, and nothing else where it must.

        Raises GrammarError when llguidance gives up (its limits, or a bug).
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            self._start_again()
            return self.allowed()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size]
        return bits.view(np.bool_)

    def consume(self, token_ids: list[int]) -> None:
        """Tokens that were chosen. Raises GrammarError when the grammar does not allow them."""
        for token_id in token_ids:  # in one call eos behind a complete grammar would be an error
            if not self._matcher.consume_token(token_id):
                self._start_again()
                if not self._matcher.consume_token(token_id):
                    raise GrammarError(first_line(self._matcher.get_error()))
            self._consumed.append(token_id)

    def _start_again(self) -> None:
        """On a fresh compilation, up to the last token that was consumed. Raises GrammarError when this is one."""
        if self._is_alone:
            raise GrammarError(first_line(self._matcher.get_error()))
        self._is_alone = True
        self._matcher = self._compiler.compile_anew(self._grammar)
        for token_id in self._consumed:
            if not self._matcher.consume_token(token_id):
                raise GrammarError(first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiled grammars of one model. `compile` may run on any thread, beside everything else: two threads at once may
    do the same work twice, and nothing worse.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        #: least recently used first
        self._compiled: dict[str, LLMatcher] = {}

    def compile(self, grammar: str) -> None:
        """Have `grammar` ready. The first one also reads the tokenizer (0.4 s). Raises InvalidRequestError."""
        self._get(grammar)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """At the start of `grammar`; compiles it if need be. Raises InvalidRequestError."""
        return GrammarMatcher(self, grammar, self._get(grammar).deep_copy(), self._vocab_size)

    def compile_anew(self, grammar: str) -> LLMatcher:
        """A compilation that shares nothing, and takes the place of a shared one that had run into its limits."""
        self._compiled.pop(grammar, None)
        return _compile(self._load_tokenizer(), grammar)

    def _get(self, grammar: str) -> LLMatcher:
        compiled = self._compiled.pop(grammar, None) or _compile(self._load_tokenizer(), grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.pop(list(self._compiled)[0], None)  # noqa: RUF015  # one step under the GIL
        return compiled

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not self._path.is_file():
                raise InvalidRequestError(f"structured output needs {self._path.name}, which this model folder lacks")
            if not self._eos:
                raise InvalidRequestError("structured output needs an end-of-sequence token, which this model lacks")
            try:
                self._tokenizer = LLTokenizer(str(self._path), n_vocab=self._vocab_size, eos_token=self._eos)
            except Exception as error:
                raise InvalidRequestError(
                    f"structured output does not work with this model's tokenizer: {first_line(str(error))}"
                ) from error
        return self._tokenizer


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))  # type: ignore[arg-type]  # ints
    if matcher.is_error():
        raise InvalidRequestError(f"the grammar cannot be compiled: {first_line(matcher.get_error())}")
    return matcher


def first_line(text: str) -> str:
    """An error of the library fit for a client: its first line, cut."""
    line = (text.strip().splitlines() or ["no reason given"])[0]
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "..."
