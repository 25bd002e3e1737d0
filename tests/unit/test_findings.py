"""The page of findings, its figures and the runs behind it belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.findings import DOCS, put_tables
from benchmarks.findings_runs import CHUNKING, PairCost, Range, order_of_service, over_seeds, percentile, scenario_a
from replica.fake_runner import CostModel
from replica.step import StepPlan


def test_a_chunk_costs_attention_for_each_of_its_tokens() -> None:
    whole = PairCost().step_s(StepPlan(0, [0], [0], [8000]))
    assert whole == pytest.approx(7.5e-3 + 8000 * 2.2e-4 + 5e-5 + 4e-7 * 8000 * 4000)
    halves = sum(PairCost().step_s(StepPlan(0, [0], [start], [4000])) for start in (0, 4000))
    assert halves == pytest.approx(whole + 7.5e-3 + 5e-5), "only the step itself is paid twice"
    decode = StepPlan(0, [0, 1], [500, 700], [1, 1])
    assert PairCost().step_s(decode) == pytest.approx(CostModel().step_s(decode), rel=1e-4)


def test_ranges() -> None:
    assert percentile([3, 1, 2, 4], 0.5) == 2
    assert percentile([1], 0.99) == 1
    found = over_seeds(lambda seed: {"x": 10.0 * seed, "y": 1.0}, [1, 3, 2])
    assert found == {"x": Range(20, 10, 30), "y": Range(1, 1, 1)}
    assert found["x"].text() == "20 (10 to 30)"
    assert found["x"].text(1, 0.1) == "2.0 (1.0 to 3.0)"
    assert found["y"].text(1) == "1.0"


def test_tables_are_put_into_their_places() -> None:
    page = "a\n<!-- t -->\nold\n<!-- /t -->\nb\n"
    once = put_tables(page, {"t": "| new |"})
    assert once == "a\n<!-- t -->\n| new |\n<!-- /t -->\nb\n"
    assert put_tables(once, {"t": "| new |"}) == once
    assert put_tables("<!-- t -->\n<!-- /t -->\n", {"t": "x"}) == "<!-- t -->\nx\n<!-- /t -->\n"
    with pytest.raises(ValueError, match="'u'"):
        put_tables(page, {"u": ""})


def test_the_page_has_its_tables_and_figures() -> None:
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    filled = re.findall(r"<!-- (\w+) -->\n\|.*?\n<!-- /\1 -->", page, re.DOTALL)
    assert filled == ["chunking", "documents", "watermark", "capped", "order", "blocks", "eviction", "kv_auto"]
    # each figure is on a page, and each that is on a page is there; other pages have some too
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    figures = {Path(name).name for name in re.findall(r"\]\((figures/\w+\.svg)\)", pages)}
    assert figures == {path.name for path in (DOCS / "figures").iterdir()}


def test_a_threshold_far_below_the_budget_lets_questions_pass() -> None:
    """The main finding of scenario A, once."""
    whole, chunked, low = (scenario_a(CHUNKING[n], 1) for n in ("no chunks", "budget 256 (default)", "threshold 64"))
    assert chunked["gap_max"] < whole["gap_max"] / 10
    assert low["question_ttft_p50"] < chunked["question_ttft_p50"] / 20
    assert low["document_ttft"] < 1.1 * chunked["document_ttft"]


def test_shortest_first_helps_the_short_ones() -> None:
    fcfs, sjf = (order_of_service({"policy": policy}, 1, num_replicas=1) for policy in ("fcfs", "sjf"))
    assert sjf["all_ttft_mean"] < fcfs["all_ttft_mean"] / 2
    assert sjf["long_e2e_mean"] > fcfs["long_e2e_mean"], "and somebody pays"
