"""Lines from replicas for the terminal of `shoal serve`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.line_socket import LineSocket, tell


@pytest.fixture
def lines() -> Iterator[LineSocket]:
    it = LineSocket()
    yield it
    it.close()


def test_a_line_arrives_as_one_printable_line(lines: LineSocket) -> None:
    tell(lines.name, "replica a: rank 1 of 2 is gone\n\x1b[31mé")
    assert lines.receive() == "replica a: rank 1 of 2 is gone  [31mé"


def test_a_terminal_that_is_gone_or_never_was_disturbs_nobody(lines: LineSocket) -> None:
    name = lines.name
    lines.close()
    tell(name, "nobody hears it")
    tell("", "nobody hears it")


def test_a_lines_that_does_not_read_does_not_hold_up_a_replica(lines: LineSocket) -> None:
    for _ in range(5000):
        tell(lines.name, "x" * 2000)
    assert len(lines.receive()) == 1000
