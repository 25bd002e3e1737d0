"""llguidance over a tokenizer of single bytes (and a few added tokens): does a text follow a grammar, and texts that
do."""

from __future__ import annotations

import functools
import random

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from replica.messages import GRAMMAR_LIMITS

EOS = "<|endoftext|>"
_LIMITS = LLParserLimits(**GRAMMAR_LIMITS)  # type: ignore[arg-type]


@functools.cache
def byte_tokenizer(added: tuple[str, ...] = ()) -> Tokenizer:
    """256 bytes, an end token, and `added`, none of which is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


@functools.cache
def _ll_tokenizer(added: tuple[str, ...]) -> LLTokenizer:
    tokenizer = byte_tokenizer(added)
    return LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=tokenizer.token_to_id(EOS))


class GrammarUnderTest:
    """A grammar, compiled as a replica does."""

    def __init__(self, grammar: str, added: tuple[str, ...] = ()) -> None:
        self.tokenizer = byte_tokenizer(added)
        eos = self.tokenizer.token_to_id(EOS)
        assert eos is not None
        self._eos = eos
        self._matcher = LLMatcher(_ll_tokenizer(added), grammar, log_level=0, limits=_LIMITS)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str, spelled: bool = False) -> bool:
        """Whether each token of `text` is allowed, and then the end. `spelled`: by bytes, without added tokens."""
        matcher = self._matcher.deep_copy()
        tokenizer = byte_tokenizer() if spelled else self.tokenizer
        for token_id in [*tokenizer.encode(text, add_special_tokens=False).ids, self._eos]:
            if not _allowed(matcher)[token_id]:
                return False
            assert matcher.consume_token(token_id)
        return True

    def walk(self, seed: int, wishes: str, begin: str = "", max_tokens: int = 600) -> str | None:
        """A text made of allowed tokens: `begin`, then mostly tokens of `wishes`, until the end is allowed and chosen.
        None when it did not end.
        """
        rng, matcher = random.Random(seed), self._matcher.deep_copy()
        wished, token_ids = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in (wishes, begin)]
        assert matcher.consume_tokens(token_ids)
        for _ in range(max_tokens):
            allowed = np.flatnonzero(_allowed(matcher)).tolist()
            assert allowed, "the grammar leaves no token"
            if self._eos in allowed and rng.random() < 0.3:
                return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
            allowed = [token_id for token_id in allowed if token_id != self._eos] or [self._eos]
            wanted = [token_id for token_id in wished if token_id in allowed]
            token_id = rng.choice(wanted) if wanted and rng.random() < 0.9 else rng.choice(allowed)
            if token_id == self._eos:
                return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        return None


def _allowed(matcher: LLMatcher) -> np.ndarray:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.unpackbits(bits, bitorder="little")
