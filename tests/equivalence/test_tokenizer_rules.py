"""The tokenizer made from the GGUF splits text as llama.cpp's rule for it (`tokenizer.ggml.pre` = smollm) says.

The rule, as llama.cpp's vocabulary code states it: every number character is a piece of its own; what lies between is
split by GPT-2's word pattern. It is restated here with the `regex` library; only pieces are compared, since the merges
inside a piece are the file's own. Unassigned characters are left out: the libraries know different Unicode versions.
"""

from __future__ import annotations

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import model_store

pytestmark = pytest.mark.model

NUMBER = regex.compile(r"\p{N}")
WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\t'0123456789st.,-x²½٣"),
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cn", "Co"]),
    ),
    max_size=60,
)


def pieces_by_rule(text: str) -> list[str]:
    pieces: list[str] = []
    end = 0
    for number in [*NUMBER.finditer(text), None]:
        between = text[end : number.start() if number else len(text)]
        pieces += WORD.findall(between)
        if number:
            pieces.append(number.group())
            end = number.end()
    return pieces


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    folder = model_store.resolve("smollm2-135m-instruct")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "text",
    ["x   42", "a\n\n   1\n2", "don't we'll 3rd", "  ", "1234567", "½ cup, 2²", "naïve 삼겹살 🦙", "\t\tx=1", " 7 8"],
)
def test_named_texts(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    assert pieces(tokenizer, text) == pieces_by_rule(text)


def test_arbitrary_text(tokenizer: tokenizers.Tokenizer) -> None:
    @settings(max_examples=600)
    @given(TEXT)
    def check(text: str) -> None:
        assert pieces(tokenizer, text) == pieces_by_rule(text)

    check()


def test_spaces_before_a_digit_stay_together(tokenizer: tokenizers.Tokenizer) -> None:
    """The case that goes wrong without the digit step: three spaces are one token before a number, too."""
    assert tokenizer.encode("x   42", add_special_tokens=False).tokens == ["x", "ĠĠĠ", "4", "2"]
