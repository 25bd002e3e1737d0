"""PURE. Token ids to text, step by step, never showing half a character.

Contract of every `Detokenizer`: the pieces it gives, joined, equal `decode(all ids)` however the ids are cut into
steps, and no piece holds a U+FFFD that a later token would have completed; `flush()` gives what is left.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) takes the exact and fast way: a table from id to bytes and an
incremental UTF-8 decoder, 0.1 us a token and no window to decode again. The tokenizers library's `DecodeStream` costs
0.7 us, decodes a window at each token and can raise "Invalid prefix". Other tokenizers use `WindowDetokenizer` (2 us),
which decodes the last few tokens again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one sequence."""

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; "" while a character is incomplete."""
        ...

    def extend(self, token_ids: Sequence[int]) -> str:
        """As `push`, for several tokens at once."""
        ...

    def flush(self) -> str:
        """The sequence has ended: the rest, with U+FFFD for a character that never got complete."""
        ...


class TokenTable:
    """What each id stands for in a byte-level vocabulary; shared by all sequences.

    `pieces[i]` is the text of token i where its bytes are whole characters, None where they are not.
    """

    __slots__ = ("num_tokens", "pieces", "raw")

    def __init__(self, raw: list[bytes]) -> None:
        self.raw = raw
        self.num_tokens = len(raw)
        self.pieces: list[str | None] = [_text_or_none(token) for token in raw]


def _text_or_none(token: bytes) -> str | None:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return None


class ByteDetokenizer:
    """Exact detokenizer for byte-level vocabularies. Ids outside the table give no text, as in `tokenizers`."""

    __slots__ = ("_decoder", "_num_tokens", "_pending", "_pieces", "_raw")

    def __init__(self, table: TokenTable) -> None:
        self._pieces = table.pieces
        self._raw = table.raw
        self._num_tokens = table.num_tokens
        self._pending = False
        self._decoder: codecs.IncrementalDecoder | None = None

    def push(self, token_id: int) -> str:
        if token_id >= self._num_tokens or token_id < 0:
            return ""
        if not self._pending:
            piece = self._pieces[token_id]
            if piece is not None:
                return piece
        return self._decode(self._raw[token_id])

    def extend(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        if not self._pending or self._decoder is None:
            return ""
        self._pending = False
        return self._decoder.decode(b"", True)

    def _decode(self, token: bytes) -> str:
        if not token:
            return ""
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = _new_utf8_decoder("replace")
        text = decoder.decode(token)
        self._pending = decoder.getstate()[0] != b""
        return text


class WindowDetokenizer:
    """For any tokenizer: decode the last tokens again and give what is new.

    A token's text may depend on the one before it (a leading space is dropped at the start of a text), so a window of
    tokens whose text is already out is decoded with and without the new ones. Text that ends in U+FFFD waits: the
    character may still be completed. Exact where the tokens are text the tokenizer can write; a decoder that rewrites
    earlier text in the light of later tokens (byte fallback over invalid UTF-8) may differ from `decode(all ids)`
    there.
    """

    __slots__ = ("_decode", "_ids", "_num_shown")

    #: ids that give no text are shown (or forgotten) after so many: no character is longer than four byte tokens
    max_waiting = 16

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        #: the window: ids whose text is out (`_num_shown` of them), then ids that wait
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=False)

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        ids, num_shown = self._ids, self._num_shown
        shown = self._decode(ids[:num_shown]) if num_shown else ""
        text = self._decode(ids)
        must_go = final or len(ids) - num_shown >= self.max_waiting
        if len(text) <= len(shown):
            if must_go:
                del ids[num_shown:]  # hidden tokens: they would only make the window long
            return ""
        if text.endswith(REPLACEMENT) and not must_go:
            return ""
        # The window moves on to the ids shown now, so that a long output costs no memory and no time here.
        del ids[:num_shown]
        self._num_shown = len(ids)
        return text[len(shown) :]
