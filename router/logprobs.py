"""PURE. Log probabilities in the shapes clients know: OpenAI's of completions and of chats, and vLLM's of prompts.

One entry a counted token, the one that ended the answer (eos, stop token) included, though it gives no text: so entries
and `completion_tokens` always agree, as with vLLM. JSON has no infinity: what is less likely than `LOWEST_LOGPROB` is
told as that. A token that is only a part of a character has U+FFFD as its text and its true `bytes`.

Entries are encoded when they arrive: a token with 20 alternatives is 1.2 KB of JSON, much less than it would be as
Python objects; and the end of a long answer has little left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from replica.messages import TokenLogprobs

#: stands for minus infinity; vLLM's value
LOWEST_LOGPROB = -9999.0
_encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """A number JSON can hold; NaN counts as impossible."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class TokenNames:
    """What tokens are called in logprobs. One per request; remembers what it looked up."""

    __slots__ = ("_as_ids", "_known", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes | None], as_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        #: `return_tokens_as_token_ids`: names are "token_id:17", which never collide
        self._as_ids = as_ids
        self._known: dict[int, tuple[str, str, list[int] | None]] = {}

    def _look_up(self, token_id: int) -> tuple[str, str, list[int] | None]:
        known = self._known.get(token_id)
        if known is None:
            raw = self._token_bytes(token_id)
            text = "" if raw is None else raw.decode("utf-8", "replace")
            name = f"token_id:{token_id}" if self._as_ids else text
            known = self._known[token_id] = (name, text, None if raw is None else list(raw))
        return known

    def name(self, token_id: int) -> str:
        """As the field `token` shows it."""
        return self._look_up(token_id)[0]

    def text(self, token_id: int) -> str:
        """Its text; "" for an id that is no token (a model's vocabulary may be padded)."""
        return self._look_up(token_id)[1]

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Its bytes as JSON has them; None for an id that is no token."""
        return self._look_up(token_id)[2]


class LogprobList(Protocol):
    """Logprobs of one choice, gathered until they are written."""

    #: whether `offset` of `add` is looked at
    needs_offsets: bool

    def add(self, token_id: int, offset: int, entry: TokenLogprobs | None) -> None:
        """The next token. `offset`: characters of the choice's text before it. No entry: the first prompt token."""
        ...

    def take(self) -> dict[str, Any]:
        """The value of `logprobs` for everything since the last call."""
        ...


class CompletionLogprobs:
    """`logprobs` of a completion: four parallel lists. `top_logprobs` holds the `num_top` likeliest tokens and the
    chosen one. It is keyed by text: of two tokens with one text (halves of characters) the likelier is told.
    """

    needs_offsets = True

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[msgspec.Raw | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, offset: int, entry: TokenLogprobs | None) -> None:
        name = self._names.name(token_id)
        self._tokens.append(name)
        self._offsets.append(offset)
        if entry is None:
            self._token_logprobs.append(None)
            self._top_logprobs.append(None)
            return
        logprob = finite(entry.logprob)
        top: dict[str, float] = {}
        for other, value in zip(entry.top_token_ids[: self._num_top], entry.top_logprobs, strict=False):
            top.setdefault(self._names.name(other), finite(value))
        top.setdefault(name, logprob)
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(msgspec.Raw(_encode(top)))

    def take(self) -> dict[str, Any]:
        value = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._offsets,
        }
        self._clear()
        return value


class _ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class _ChatEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[_ChatToken]


class ChatLogprobs:
    """`logprobs` of a chat choice. `top_logprobs` of a token are exactly the `num_top` likeliest, none for 0 (A-07)."""

    needs_offsets = False

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._content: list[msgspec.Raw] = []

    def add(self, token_id: int, offset: int, entry: TokenLogprobs | None) -> None:
        name, bytes_of = self._names.name, self._names.bytes_of
        top: list[_ChatToken] = []
        logprob = LOWEST_LOGPROB
        if entry is not None:
            logprob = finite(entry.logprob)
            top = [
                _ChatToken(name(other), finite(value), bytes_of(other))
                for other, value in zip(entry.top_token_ids[: self._num_top], entry.top_logprobs, strict=False)
            ]
        self._content.append(msgspec.Raw(_encode(_ChatEntry(name(token_id), logprob, bytes_of(token_id), top))))

    def take(self) -> dict[str, Any]:
        content, self._content = self._content, []
        return {"content": content, "refusal": None}


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: null for the first token, then `{"<id>": {logprob, rank, decoded_token}}` with the
    prompt's own token first and the `num_top` likeliest after it.
    """

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self.positions: list[msgspec.Raw | None] = []

    def add(self, token_id: int, entry: TokenLogprobs | None) -> None:
        """The next prompt position; no entry for the first."""
        if entry is None:
            self.positions.append(None)
            return
        told = {str(token_id): self._told(token_id, entry.logprob, entry.rank)}
        tops = zip(entry.top_token_ids[: self._num_top], entry.top_logprobs, strict=False)
        for rank, (other, value) in enumerate(tops, 1):
            if other != token_id:
                told[str(other)] = self._told(other, value, rank)
        self.positions.append(msgspec.Raw(_encode(told)))

    def _told(self, token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._names.text(token_id)}


def prompt_offsets(token_ids: Sequence[int], text: str, push: Callable[[int], str]) -> tuple[list[int], str]:
    """Where each prompt token begins in the echoed `text`, and the tokens' own joined text. `push` is a fresh
    detokenizer's. Where the two texts differ (a special token put in front), offsets stay inside of `text`.
    """
    offsets: list[int] = []
    pieces: list[str] = []
    position = 0
    for token_id in token_ids:
        offsets.append(min(position, len(text)))
        piece = push(token_id)
        pieces.append(piece)
        position += len(piece)
    return offsets, "".join(pieces)
