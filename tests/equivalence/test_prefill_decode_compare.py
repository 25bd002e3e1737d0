"""The comparing example: what it prints of figures."""

from __future__ import annotations

from pathlib import Path

from examples.prefill_decode_compare import CLUSTERS, PARTS, Cell, draw, parts_of, table


def cell(system: str, num_tokens: int, num_failed: int = 0) -> Cell:
    parts = dict.fromkeys(PARTS, 0.0) | {"prefill": 1234.0}
    return Cell(system, num_tokens, 4, 10, num_failed, 1500.0, 2000.0, 20.0, 90.0, 31.25, 3.0, parts)


def test_a_row_for_each_cell_by_length_and_failures_in_it() -> None:
    rows = table([cell("auto", 2048, 1), cell("mixed", 128)])[2:]
    assert rows == [
        "| 128 | 4 | `mixed` | 1,500 | 2,000 | 20 | 90 | 31.2 | 3 of 10 |",
        "| 2,048 | 4 | `auto` | 1,500 | 2,000 | 20 | 90 | 31.2 | 3 of 10, 1 failed |",
    ]


def test_parts_that_took_nothing_are_left_out() -> None:
    assert parts_of(cell("auto", 128)).endswith("ms a request: prefill 1,234")


def test_the_plot_has_every_system(tmp_path: Path) -> None:
    systems = [system for of_cluster in CLUSTERS.values() for system in of_cluster]
    draw([cell(system, num_tokens) for system in systems for num_tokens in (128, 512)], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f">{system}<" in drawn for system in systems)
