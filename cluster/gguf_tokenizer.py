"""ASYNC (the tokenizers library; no torch). The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Two kinds: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama"), which Gemma writes a little differently. Tests
hold both against the conversion in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cluster.gguf_file import Metadata
from replica.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
#: SentencePiece's mark for a space
_SPACE = "\u2581"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: how text is cut before merging: the GGUF only names the rule
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),
}
#: Gemma's way of writing turns, for files that have its tokens and no template (those of base models). There is no
#: turn of the system: what it says stands before the next message
_GEMMA_TEMPLATE = (
    "{{ bos_token }}{% set told = namespace(text='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set told.text = message['content'] | trim + '\n\n' %}{% else %}"
    "{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + told.text + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% set told.text = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_GEMMA_TURN_END = "<end_of_turn>"


class Vocabulary:
    """What a GGUF says about its tokens, checked."""

    def __init__(self, meta: Metadata) -> None:
        self.meta = meta
        self.is_gemma = str(meta.text("general.architecture")).startswith("gemma")
        self.kind = meta.text("tokenizer.ggml.model")
        names = meta.items("tokenizer.ggml.tokens", str)
        if not names:
            raise ModelLoadError(f"{meta.source}: field tokenizer.ggml.tokens is missing")
        self.names: list[str] = names
        if self.is_gemma:  # tokens of spaces only are written as spaces in GGUF and as marks in tokenizer.json
            self.names = [_SPACE * len(name) if name and not name.strip(" ") else name for name in names]
        self.ids = {name: i for i, name in enumerate(self.names)}
        kinds = meta.items("tokenizer.ggml.token_type", int) or [1] * len(names)
        if len(kinds) != len(names):
            raise ModelLoadError(f"{meta.source}: {len(names)} tokens and {len(kinds)} token types")
        self.added = [
            (i, self.names[i], kind == _CONTROL) for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)
        ]

    def special(self, key: str) -> tuple[int, str] | None:
        """Id and text of bos, eos, padding or unknown."""
        token_id = self.meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.names):
            raise ModelLoadError(f"{self.meta.source}: {key}_token_id {token_id} is no token of {len(self.names)}")
        return token_id, self.names[token_id]

    @property
    def adds_bos(self) -> bool:
        """llama.cpp puts BOS before the text of a SentencePiece model that does not say otherwise."""
        return bool(self.meta.get("tokenizer.ggml.add_bos_token", self.kind == "llama")) and bool(self.special("bos"))

    def token_ids(self) -> dict[str, Any]:
        """bos, eos and pad as config.json has them. A Gemma turn ends with a token of its own, beside eos."""
        keys = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        ids: dict[str, Any] = {f"{name}_token_id": found[0] for name, key in keys if (found := self.special(key))}
        turn_end = self.ids.get(_GEMMA_TURN_END)
        if self.is_gemma and turn_end is not None and "eos_token_id" in ids and turn_end != ids["eos_token_id"]:
            ids["eos_token_id"] = [ids["eos_token_id"], turn_end]
        return ids

    def chat_template(self) -> str | None:
        template = self.meta.text("tokenizer.chat_template")
        if template is None and self.is_gemma and _GEMMA_TURN_END in self.ids:
            return _GEMMA_TEMPLATE
        return template


def build(vocabulary: Vocabulary) -> Tokenizer:
    """Raises ModelLoadError for a kind of tokenizer or a pre-tokenizer that is not known."""
    from tokenizers import AddedToken, processors

    kinds = {"gpt2": _byte_level, "llama": _sentence_piece}
    if vocabulary.kind not in kinds:
        raise ModelLoadError(
            f"{vocabulary.meta.source}: tokenizer {vocabulary.kind!r} cannot be converted; known are {', '.join(kinds)}"
        )
    tokenizer = kinds[vocabulary.kind](vocabulary)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for _, text, s in vocabulary.added if s]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for _, text, s in vocabulary.added if not s])
    if vocabulary.adds_bos and (bos := vocabulary.special("bos")):
        text = bos[1]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, bos[0])]
        )
    return tokenizer


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    meta = vocabulary.meta
    names = {name: vocabulary.special(key) for name, key in _SPECIAL_NAMES.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.adds_bos,
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        **{name: found[1] for name, found in names.items() if found},
        **({"chat_template": template} if (template := vocabulary.chat_template()) else {}),
        "added_tokens_decoder": {
            str(i): {
                "content": name,
                "special": is_control,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            }
            for i, name, is_control in vocabulary.added
        },
    }


_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    merges = vocabulary.meta.items("tokenizer.ggml.merges", str)
    if merges is None:
        raise ModelLoadError(f"{vocabulary.meta.source}: field tokenizer.ggml.merges is missing")
    pairs = [tuple(line.split(" ", 1)) for line in merges]
    tokenizer = _checked(vocabulary, lambda: Tokenizer(models.BPE(vocab=vocabulary.ids, merges=pairs)))
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.meta)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(meta: Metadata) -> Any:
    """llama.cpp's rule for "smollm" is two expressions: each numeric character alone, then GPT-2's. As steps of the
    `tokenizers` library that is Digits, then ByteLevel; without the first, spaces before a digit merge differently.
    """
    from tokenizers import Regex, pre_tokenizers

    rule = meta.text("tokenizer.ggml.pre") or "default"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if rule in ("gpt-2", "default"):
        return byte_level
    if rule in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(["smollm", "gpt-2", *_SPLITS])
    raise ModelLoadError(f"{meta.source}: pre-tokenizer {rule!r} is not known; known are {known}")


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece merges the pair whose result has the best score; as BPE, that is a list of merges by score.

    In Gemma's files the scores say nothing of the order in which tokens were merged, and the order of the ids does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    meta = vocabulary.meta
    scores = meta.items("tokenizer.ggml.scores", float)
    if not vocabulary.is_gemma and (scores is None or len(scores) != len(vocabulary.names)):
        raise ModelLoadError(f"{meta.source}: tokenizer.ggml.scores does not hold a score for each token")
    ranks: Iterable[float] = range(len(vocabulary.names)) if vocabulary.is_gemma else (-s for s in scores or ())
    unknown = vocabulary.special("unknown")
    tokenizer = _checked(
        vocabulary,
        lambda: Tokenizer(
            models.BPE(
                vocab=vocabulary.ids,
                merges=merges_of(vocabulary.ids, dict(zip(vocabulary.names, ranks, strict=True))),
                unk_token=unknown[1] if unknown else None,
                fuse_unk=True,
                byte_fallback=True,
            )
        ),
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if vocabulary.is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        return tokenizer
    has_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if has_prefix else "never"
    if meta.text("general.architecture") == "phi3":  # its tokenizer.json puts the mark before text that has one too
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    if has_prefix:
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_of(ids: dict[str, int], ranks: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best (smallest) rank of the result first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((rank, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _checked(vocabulary: Vocabulary, make: Any) -> Tokenizer:
    try:
        tokenizer: Tokenizer = make()
    except Exception as error:  # the library raises a bare Exception
        raise ModelLoadError(f"{vocabulary.meta.source}: its tokenizer does not fit together: {error}") from error
    return tokenizer
