"""Pieces joined equal decode(all), for every cut; no half characters; against the tokenizers library as the oracle."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from router.detokenizer import ByteDetokenizer, Detokenizer, TokenTable, WindowDetokenizer
from router.tokenizer import Tokenizer
from tests.unit.http_fakes import byte_level_bpe, small_tokenizer

HARD_TEXT = "a🦙b 삼겹살 ď 👩‍👩‍👧  x   42\n\tend"


def cut(ids: list[int], borders: list[int]) -> list[list[int]]:
    edges = [0, *sorted({min(border, len(ids)) for border in borders}), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def pieces_of(detokenizer: Detokenizer, steps: list[list[int]]) -> list[str]:
    return [*(detokenizer.extend(step) for step in steps), detokenizer.flush()]


def test_multi_byte_characters_one_id_at_a_time() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode(HARD_TEXT)
    assert len(ids) > len(HARD_TEXT)  # the emoji are several tokens each
    pieces = pieces_of(tokenizer.detokenizer(), [[token_id] for token_id in ids])
    assert "".join(pieces) == HARD_TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_character_is_shown_with_its_last_byte_and_not_before() -> None:
    detokenizer = ByteDetokenizer(TokenTable([b"\xe2", b"\x82", b"\xac", b"x"]))
    assert [detokenizer.push(token_id) for token_id in (0, 1, 2, 3)] == ["", "", "€", "x"]


def test_incomplete_character_comes_out_as_replacement_at_the_end_or_when_it_breaks() -> None:
    table = TokenTable([b"\xe2", b"x"])
    detokenizer = ByteDetokenizer(table)
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "\ufffd", "")
    detokenizer = ByteDetokenizer(table)
    assert (detokenizer.push(0), detokenizer.push(1), detokenizer.flush()) == ("", "\ufffdx", "")


@given(data=st.data())
def test_byte_level_equals_library_decode_for_any_ids_and_any_cut(data: st.DataObject) -> None:
    tokenizer = small_tokenizer()
    # ids beyond the vocabulary stand for nothing, as a padded embedding may produce them
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens + 3), max_size=40))
    skip = data.draw(st.booleans())
    steps = cut(ids, data.draw(st.lists(st.integers(0, 40), max_size=6)))
    pieces = pieces_of(tokenizer.detokenizer(skip), steps)
    assert "".join(pieces) == byte_level_bpe().decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), borders=st.lists(st.integers(0, 60), max_size=6))
def test_text_never_shows_a_replacement_it_does_not_hold(text: str, borders: list[int]) -> None:
    tokenizer = small_tokenizer()
    pieces = pieces_of(tokenizer.detokenizer(), cut(tokenizer.encode(text), borders))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def metaspace_tokenizer() -> Tokenizer:
    """A Llama-like vocabulary: spaces as U+2581, unknown characters as byte tokens."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b", "ab"]
    vocabulary = {word: position for position, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a"), ("\u2581", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return Tokenizer(backend)


@given(text=st.text("ab é€🦙", max_size=24), borders=st.lists(st.integers(0, 60), max_size=6))
def test_window_detokenizer_equals_library_decode_of_real_text(text: str, borders: list[int]) -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    pieces = pieces_of(detokenizer, cut(ids, borders))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_window_stays_short_over_a_long_output() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("" if token_id == 9 else "x" for token_id in ids)

    detokenizer = WindowDetokenizer(decode)
    text = "".join(detokenizer.push(token_id) for token_id in [1, 2, 9] * 500 + [9] * 500)
    assert text == "x" * 1000
    assert longest < 2 * WindowDetokenizer.max_waiting


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    tokenizer = small_tokenizer()
    ids = [1, *tokenizer.encode("one"), 2]
    text = "".join(pieces_of(tokenizer.detokenizer(skip), [ids]))
    assert text == ("one" if skip else "<|im_start|>one<|im_end|>")
