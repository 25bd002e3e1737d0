"""ASYNC. The model's tokenizer, chat template and text-side facts, from a model folder.

Wraps the `tokenizers` library; neither transformers nor torch is imported, so a router starts in a fraction of a
second and stays small. Synchronous and thread-safe: who calls it with a long text does so from a thread (the library
releases the GIL).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from replica.errors import ConfigError, ModelLoadError
from router.chat_template import ChatTemplate
from router.detokenizer import ByteDetokenizer, Detokenizer, TokenTable, WindowDetokenizer

logger = logging.getLogger(__name__)
#: how SentencePiece vocabularies write a single byte
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: texts from here on are worth the detour through the batch form
_SHORT_CHARS = 2048
# A batch of one has nothing to share out, and the library's own threads would not have the low priority of ours.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults of the model (`generation_config.json`); None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelFacts(msgspec.Struct, frozen=True):
    """What `config.json` and `generation_config.json` tell the HTTP edge; None or empty where they do not say."""

    vocab_size: int | None = None
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: GenerationDefaults = GenerationDefaults()
    #: sampling settings of the model that are not supported yet and stay without effect
    unsupported_defaults: tuple[str, ...] = ()


class Tokenizer:
    """Text to token ids and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        facts: ModelFacts = ModelFacts(),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.chat_template = chat_template
        self.facts = facts
        #: ids the tokenizer knows are below this; the model's own vocabulary may be larger (padded) or smaller
        self.num_tokens = _num_ids(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        #: texts that the tokenizer reads as special tokens
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        raw = _byte_table(backend, self.num_tokens)
        self._table = TokenTable(raw) if raw is not None else None
        self._table_without_special = self._table
        if raw is not None and self._special_ids:
            self._table_without_special = TokenTable(
                [b"" if token_id in self._special_ids else token for token_id, token in enumerate(raw)]
            )
        #: no token stands for more bytes of input than this; None where that cannot be known
        self.max_bytes_per_token = _max_bytes_per_token(backend, raw, added.values())

    @classmethod
    def from_folder(cls, folder: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read `tokenizer.json` and what lies beside it. `chat_template` (a path or the text itself) replaces the
        model's own.

        Raises `ModelLoadError` when a file is missing or damaged, `ConfigError` when `chat_template` is a path
        without a file.
        """
        root = Path(folder)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{root} has no tokenizer.json: a model folder needs one.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}.") from error
        settings = _read_json(root / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL_TOKEN_NAMES if (text := _token_text(settings.get(name)))}
        source = read_chat_template(chat_template) if chat_template else _model_chat_template(root, settings)
        added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        template = ChatTemplate(source, special, added_tokens=added) if source else None
        facts = read_model_facts(root, backend)
        if facts.unsupported_defaults:
            names = ", ".join(facts.unsupported_defaults)
            logger.warning("generation_config.json of %s sets what has no effect yet: %s", root.name, names)
        return cls(backend, template, facts)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. A long text releases the GIL, so call it from a thread."""
        if len(text) < _SHORT_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the GIL to its end (tokenizers 0.23: 570 ms for 100,000 tokens). The batch form does not, and
        # this one leaves out the offsets that nobody here reads, which makes it twice as fast.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids at once. Ids that are no token give no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, None when there is none of this id."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token adds to a text, special tokens included; None when there is none of this id."""
        table = self._table
        if table is not None:
            return table.raw[token_id] if 0 <= token_id < table.num_tokens else None
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return None if token is None else token.encode("utf-8")
        byte = _BYTE_FALLBACK.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if "\u2581" in token:  # SentencePiece writes a space so; decoding one token alone would drop it
            return token.replace("\u2581", " ").encode("utf-8")
        return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        table = self._table_without_special if skip_special_tokens else self._table
        if table is not None:
            return ByteDetokenizer(table)
        return WindowDetokenizer(lambda ids: self._backend.decode(ids, skip_special_tokens=skip_special_tokens))


def read_chat_template(path_or_text: str) -> str:
    """The value of `--chat-template`: template text when it holds a brace or a line break, else the path of a file."""
    if any(mark in path_or_text for mark in "{}\n"):
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {path_or_text!r}: neither a template text nor a readable file.") from error


def read_model_facts(folder: Path, backend: tokenizers.Tokenizer | None = None) -> ModelFacts:
    """Facts from `config.json` and `generation_config.json` of a model folder. Raises `ModelLoadError` when one is
    damaged.
    """
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    nested = config.get("text_config")  # multimodal models keep the language model's numbers there
    text_config: dict[str, Any] = nested if isinstance(nested, dict) else config
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()
    if not eos_ids and backend is not None:
        text = _token_text(_read_json(folder / "tokenizer_config.json").get("eos_token"))
        token_id = backend.token_to_id(text) if text else None
        eos_ids = (token_id,) if token_id is not None else ()
    neutral = {"typical_p": 1.0}
    unsupported = tuple(name for name, value in neutral.items() if generation.get(name, value) not in (None, value))
    return ModelFacts(
        vocab_size=_int_or_none(text_config.get("vocab_size")),
        max_model_len=_int_or_none(text_config.get("max_position_embeddings")),
        eos_token_ids=eos_ids,
        generation_defaults=GenerationDefaults(
            temperature=generation.get("temperature"),
            top_p=generation.get("top_p"),
            top_k=generation.get("top_k"),
            min_p=generation.get("min_p"),
            repetition_penalty=generation.get("repetition_penalty"),
        ),
        unsupported_defaults=unsupported,
    )


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return value


def _model_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The model's own template: `chat_template.jinja`, else `tokenizer_config.json` (a text, or a list of named
    ones).
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    """A special token in `tokenizer_config.json` is its text or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _num_ids(backend: tokenizers.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters in which byte-level BPE writes bytes: printable Latin-1 as itself, the others from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


def _byte_table(backend: tokenizers.Tokenizer, num_tokens: int) -> list[bytes] | None:
    """Bytes of each id when the decoder is plain ByteLevel, else None. A token with a foreign character is its UTF-8
    text.
    """
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    alphabet = _byte_alphabet()
    table = [b""] * num_tokens
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes([alphabet[char] for char in token])
        except KeyError:
            table[token_id] = token.encode("utf-8")
    return table


def _max_bytes_per_token(
    backend: tokenizers.Tokenizer, raw: list[bytes] | None, added: Iterable[tokenizers.AddedToken]
) -> int | None:
    """Longest token in bytes, where each token is exactly its bytes of the input: no normalizer, no added token
    eating spaces.
    """
    if not raw or backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, raw))
