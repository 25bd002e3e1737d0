"""Lines from replicas for the terminal of `shoal serve`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.terminal import Terminal, tell


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    it = Terminal()
    yield it
    it.close()


def test_a_line_arrives_as_one_printable_line(terminal: Terminal) -> None:
    tell(terminal.name, "replica a: rank 1 of 2 is gone\n\x1b[31mé")
    assert terminal.receive() == "replica a: rank 1 of 2 is gone  [31mé"


def test_a_terminal_that_is_gone_or_never_was_disturbs_nobody(terminal: Terminal) -> None:
    name = terminal.name
    terminal.close()
    tell(name, "nobody hears it")
    tell("", "nobody hears it")


def test_a_terminal_that_does_not_read_does_not_hold_up_a_replica(terminal: Terminal) -> None:
    for _ in range(5000):
        tell(terminal.name, "x" * 2000)
    assert len(terminal.receive()) == 1000
