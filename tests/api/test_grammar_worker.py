"""The process that checks grammars: it answers, it is replaced, and it never holds a caller up for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from router.grammar_worker import TOO_MUCH, GrammarChecker
from router.structured import reason_against

#: a few hundred bytes that took 13 s and 430 MB, and more with each term
INTERSECTIONS = "start: A\nA: " + " & ".join(f"/(.*a.{{{number}}})/" for number in range(3, 30)) + "\n"
GOOD = 'start: "yes" | "no"'


def lark(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(text))


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize("text", [GOOD, 'start: "a" missing', "start: /(a/", 'start: "a" & "b"'])
def test_it_says_what_the_check_in_this_process_says(checker: GrammarChecker, text: str) -> None:
    assert checker.reason_against(lark(text)) == reason_against(lark(text))


def test_what_takes_too_much_costs_the_worker_and_not_us(checker: GrammarChecker) -> None:
    assert checker.reason_against(lark(GOOD)) == ""
    worker = checker._worker
    assert worker is not None
    assert checker.reason_against(lark(INTERSECTIONS)) == TOO_MUCH
    assert worker.poll() is not None, "the worker went on"
    assert checker.reason_against(lark('start: "new"')) == "", "no worker after a kill"
    assert checker._worker is not worker


def test_a_worker_that_was_killed_from_outside_is_replaced(checker: GrammarChecker) -> None:
    checker.reason_against(lark('start: "one"'))
    assert checker._worker is not None
    checker._worker.kill()
    checker._worker.wait()
    assert checker.reason_against(lark('start: "two"')) == ""


def test_threads_take_turns_and_known_grammars_ask_nobody(checker: GrammarChecker) -> None:
    texts = [lark(f'start: "t{number}"') for number in range(20)]
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda text=text: answers.append(checker.reason_against(text))) for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [""] * 20
    checker.close()
    assert checker.reason_against(texts[7]) == ""
    assert checker._worker is None


def test_close_leaves_no_process() -> None:
    checker = GrammarChecker()
    checker.reason_against(lark(GOOD))
    worker = checker._worker
    assert worker is not None
    checker.close()
    checker.close()
    assert worker.poll() is not None
