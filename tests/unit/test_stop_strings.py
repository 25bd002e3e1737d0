"""Stop strings: the cut, what is held back, and nothing more than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopStringFilter


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """(all text shown, matched stop, text shown after each piece)."""
    stop_filter = StopStringFilter(stops, include)
    shown: list[str] = []
    for piece in pieces:
        shown.append(stop_filter.push(piece))
        if stop_filter.matched is not None:
            return "".join(shown), stop_filter.matched, shown
    return "".join(shown) + stop_filter.flush(), None, shown


def test_match_over_piece_borders_is_cut_and_never_leaks() -> None:
    text, matched, shown = run(("wo thr",), ["one t", "wo", " ", "three"])
    assert (text, matched) == ("one t", "wo thr")
    assert shown[0] == "one t"
    assert shown[1:3] == ["", ""]


def test_include_keeps_the_stop_string_but_nothing_after_it() -> None:
    assert run(("END",), ["abE", "NDxyz"], include=True)[0] == "abEND"
    assert run(("END",), ["abE", "NDxyz"])[0] == "ab"


def test_first_completed_match_wins_whatever_the_order() -> None:
    # "bcd" begins first, but "c" is complete first
    assert run(("bcd", "c"), ["abcd"])[:2] == ("ab", "c")


def test_tie_goes_to_the_earlier_in_the_list() -> None:
    assert run(("d", "bcd"), ["abcd"])[:2] == ("abc", "d")
    assert run(("bcd", "d"), ["abcd"])[:2] == ("a", "bcd")


def test_only_a_possible_prefix_is_held_back() -> None:
    stop_filter = StopStringFilter(("STOP",))
    assert stop_filter.push("hello S") == "hello "
    assert stop_filter.push("x") == "Sx"
    assert stop_filter.push(" ST") == " "
    assert stop_filter.flush() == "ST"


def test_repeated_prefix_keeps_the_longest_possible_one() -> None:
    assert run(("aab",), ["a", "a", "a", "b", "c"])[:2] == ("a", "aab")


def test_match_completed_too_early_stays_text_and_a_later_one_counts() -> None:
    stop_filter = StopStringFilter(("xx",))
    assert stop_filter.push("xx", may_match=False) == "x"
    assert stop_filter.matched is None
    assert stop_filter.push("x") == ""
    assert stop_filter.matched == "xx"


def reference(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Character by character over the whole text."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_any_cut_into_pieces_gives_what_the_whole_text_gives(stops: tuple[str, ...], pieces: list[str]) -> None:
    expected, stop = reference(stops, "".join(pieces))
    text, matched, shown = run(stops, pieces)
    assert (text, matched) == (expected, stop)
    for count in range(len(shown) + 1):
        assert expected.startswith("".join(shown[:count]))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    text=st.text("abc", max_size=20),
)
def test_held_text_is_exactly_the_longest_open_prefix(stops: tuple[str, ...], text: str) -> None:
    if reference(stops, text)[1] is not None:
        return
    shown = StopStringFilter(stops).push(text)
    could_begin = [
        n
        for n in range(len(text) + 1)
        if any(s != text[len(text) - n :] and s.startswith(text[len(text) - n :]) for s in stops)
    ]
    assert len(text) - len(shown) == max(could_begin)
