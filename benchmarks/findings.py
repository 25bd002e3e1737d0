"""`python -m benchmarks.findings`: writes the tables of `docs/findings.md` and draws its figures, in about two minutes.

Everything is virtual time from seeds, so the same code gives the same bytes. Tables stand between `<!-- name -->` and
`<!-- /name -->` in the page; what is between them is replaced. `--print` only prints them. What was measured with the
real model stands in the page with its date (`findings_live.py`, `block_size_speed.py`).
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from benchmarks.findings_runs import (
    BLOCK_SIZES,
    CHUNKING,
    LANES,
    POLICIES,
    WATERMARKS,
    Range,
    block_sizes,
    order_of_service,
    over_seeds,
    scenario_a,
    scenario_b,
    ttfts,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: of every figure there is a median over these, and a range
SEEDS = range(10)

Rows = dict[str, dict[str, Range]]


class Findings:
    """All runs, once; rows by setting."""

    def __init__(self) -> None:
        self.chunking = {name: over_seeds(partial(scenario_a, knobs), SEEDS) for name, knobs in CHUNKING.items()}
        self.documents = {
            name: over_seeds(partial(scenario_a, CHUNKING[name], num_documents=3), SEEDS) for name in LANES
        }
        self.watermark = {f"{mark:g}": over_seeds(partial(scenario_b, mark, cap=100), SEEDS) for mark in WATERMARKS}
        self.capped = {f"{mark:g}": over_seeds(partial(scenario_b, mark, cap=16), SEEDS) for mark in WATERMARKS}
        self.order = {name: over_seeds(partial(order_of_service, knobs), SEEDS) for name, knobs in POLICIES.items()}
        self.ttfts = {name: ttfts(knobs, seed=1) for name, knobs in POLICIES.items()}
        self.blocks = {str(size): over_seeds(partial(block_sizes, size), SEEDS) for size in BLOCK_SIZES}

    def tables(self) -> dict[str, str]:
        """Markdown by name."""
        chunking = {
            "chats: gap p50, s": ("gap_p50", 2, 1.0),
            "p99": ("gap_p99", 2, 1.0),
            "max": ("gap_max", 2, 1.0),
            "questions: TTFT p50, s": ("question_ttft_p50", 2, 1.0),
            "max ": ("question_ttft_max", 1, 1.0),
            "document: TTFT, s": ("document_ttft", 1, 1.0),
        }
        documents = {
            "chats: gap p99, s": ("gap_p99", 2, 1.0),
            "questions: TTFT p50, s": ("question_ttft_p50", 2, 1.0),
            "max": ("question_ttft_max", 2, 1.0),
            "documents: mean TTFT, s": ("document_ttft", 1, 1.0),
            "last": ("last_document_ttft", 1, 1.0),
        }
        burst = {
            "preemptions": ("preemptions", 0, 1.0),
            "computed again, tokens": ("recomputed", 0, 1.0),
            "tokens/s": ("tokens_per_s", 0, 1.0),
            "TTFT p50, s": ("ttft_p50", 2, 1.0),
            "TTFT p99, s": ("ttft_p99", 1, 1.0),
            "gap p99, ms": ("gap_p99", 0, 1000.0),
            "gap max, s": ("gap_max", 1, 1.0),
        }
        order = {
            "all: TTFT mean, s": ("all_ttft_mean", 1, 1.0),
            "short: TTFT mean": ("short_ttft_mean", 1, 1.0),
            "p99": ("short_ttft_p99", 1, 1.0),
            "E2E mean": ("short_e2e_mean", 1, 1.0),
            "long: TTFT mean": ("long_ttft_mean", 1, 1.0),
            "p99 ": ("long_ttft_p99", 1, 1.0),
            "E2E mean ": ("long_e2e_mean", 1, 1.0),
            "tokens/s": ("tokens_per_s", 0, 1.0),
        }
        blocks = {
            "prompt tokens from the cache, %": ("hit_share", 1, 100.0),
            "slots behind the last token, %": ("wasted_share", 2, 100.0),
            "preemptions": ("preemptions", 0, 1.0),
            "tokens/s": ("tokens_per_s", 0, 1.0),
            "TTFT p50, s": ("ttft_p50", 2, 1.0),
            "TTFT p99, s": ("ttft_p99", 1, 1.0),
        }
        return {
            "chunking": _table("setting", self.chunking, chunking),
            "documents": _table("three documents at once", self.documents, documents),
            "watermark": _table("watermark, cap 100", self.watermark, burst),
            "capped": _table("watermark, cap 16", self.capped, {"served of 200": ("served", 0, 1.0), **burst}),
            "order": _table("policy", self.order, order),
            "blocks": _table("block size", self.blocks, blocks),
        }


def _table(title: str, rows: Rows, columns: dict[str, tuple[str, int, float]]) -> str:
    """Columns: heading -> figure, digits, factor."""
    lines = ["| " + " | ".join([title, *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, figures in rows.items():
        cells = [figures[figure].text(digits, factor) for figure, digits, factor in columns.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def put_tables(page: str, tables: dict[str, str]) -> str:
    """`page` with these tables. Raises ValueError if one has no place in it."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page has not one place for the table {name!r}, between <!-- {name} --> and its end")
        page = pattern.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2].lstrip()}", page)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="the tables only; changes no file, draws nothing")
    options = parser.parse_args()
    found = Findings()
    if options.print:
        for name, table in found.tables().items():
            print(f"{name}\n\n{table}\n")
        return
    from benchmarks.findings_plots import draw

    page = DOCS / "findings.md"
    page.write_text(put_tables(page.read_text(encoding="utf-8"), found.tables()), encoding="utf-8")
    for path in draw(found, DOCS / "figures"):
        print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
