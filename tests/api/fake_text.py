"""A tokenizer for the fake runner whose every token is printable ASCII, so that its random tokens read as text: stop
strings, prefixes and stream-against-whole comparisons mean something.
"""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from router.chat_template import ChatTemplate
from router.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: all of them end a text, so that with ignore_eos every token is one to read: tests count tokens by what they read
EOS = (0, 1, 2)
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "Count: one two three four five six seven eight nine ten",
    "The capital of France is Paris. The sky is blue, the sea is wide and the road is long.",
    "system user assistant: say hello to the world and write a story about a small boat",
] * 4
#: space and line break, as byte-level BPE writes them
_WRITTEN = {"\u0120", "\u010a"}


def _is_ascii(token: str) -> bool:
    return all(0x21 <= ord(char) < 0x7F or char in _WRITTEN for char in token)


@functools.cache
def fake_tokenizer() -> Tokenizer:
    """Ids below `fake_vocab_size()` are special or ASCII; the other bytes come after them: never generated, and refused
    in a prompt.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    ordered = sorted(model["vocab"], key=lambda token: (not _is_ascii(token), model["vocab"][token]))
    vocab = {token: token_id for token_id, token in enumerate((*SPECIAL, *ordered))}
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    ordered_backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    ordered_backend.pre_tokenizer = backend.pre_tokenizer
    ordered_backend.decoder = decoders.ByteLevel()
    ordered_backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(ordered_backend, ChatTemplate(TEMPLATE))


@functools.cache
def fake_vocab_size() -> int:
    """How many ids are special or ASCII."""
    tokenizer = fake_tokenizer()
    texts = (tokenizer.token_text(token_id) or "" for token_id in range(tokenizer.num_tokens))
    return sum(text in SPECIAL or _is_ascii(text) for text in texts)
