"""Figures of `docs/findings.md` as SVG. Same figures in, same bytes out: no date, fixed ids, text as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from benchmarks.findings_runs import Range

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.findings import Findings
    from benchmarks.kv_eviction import Worth

#: the stub names every key as a literal
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
#: distinguishable without red and green
BLUE, ORANGE, BLACK = "#0072b2", "#d55e00", "#000000"


def draw(found: Findings, folder: Path) -> list[Path]:
    """All of them; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"chunking": chunking, "watermark": watermark, "order": order, "blocks": blocks}
    paths = []
    for name, drawing in drawings.items():
        with pyplot.rc_context(STYLE):
            figure = drawing(found)
            path = folder / f"{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close(figure)
        paths.append(path)
    return paths


def chunking(found: Findings) -> Figure:
    """One line a setting; three times on a logarithmic axis."""
    figure, axes = pyplot.subplots(figsize=(8.2, 4.2))
    marks = (
        ("gap_p99", "gap of a chat, p99", BLUE, "o"),
        ("question_ttft_p50", "first token of a question, p50", ORANGE, "s"),
        ("document_ttft", "first token of the document", BLACK, "D"),
    )
    names = list(found.chunking)
    for figure_name, label, colour, marker in marks:
        values = [found.chunking[name][figure_name].median for name in names]
        axes.plot(values, range(len(names)), marker, color=colour, label=label, markersize=6)
        if figure_name != "document_ttft":
            for row, value in enumerate(values):
                below = figure_name == "question_ttft_p50"
                axes.annotate(
                    f"{value:.2g}" if value < 10 else f"{value:.0f}",
                    (value, row),
                    textcoords="offset points",
                    xytext=(0, -12 if below else 6),
                    ha="center",
                    fontsize=7,
                    color=colour,
                )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds (logarithmic), virtual time, median of 10 seeds")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)
    return figure


def watermark(found: Findings) -> Figure:
    """Four figures over the watermark, with the range over seeds."""
    panels = (
        ("preemptions", "preemptions", 1.0),
        ("recomputed", "tokens computed again, thousands", 1e-3),
        ("tokens_per_s", "output tokens/s", 1.0),
        ("ttft_p50", "TTFT p50, s", 1.0),
    )
    return _panels(found.watermark, panels, "watermark, share of blocks", width=10)


def order(found: Findings) -> Figure:
    """Distribution of TTFT of the short and of the long ones."""
    figure, all_axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    colours = dict(zip(found.ttfts, (BLACK, BLUE, ORANGE), strict=True))
    for axes, kind, count in zip(all_axes, ("short", "long"), (160, 40), strict=True):
        for policy, classes in found.ttfts.items():
            values = classes[kind]
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", color=colours[policy], label=policy)
        axes.set_xlabel(f"first token of {count} {kind} requests, s after arrival")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right", frameon=False)
    all_axes[0].set_ylabel("share that has it (seed 1)")
    return figure


def blocks(found: Findings) -> Figure:
    """What the cache finds and what is wasted, by block size."""
    panels = (
        ("hit_share", "prompt tokens from the cache, %", 100.0),
        ("wasted_share", "slots behind the last token, %", 100.0),
        ("tokens_per_s", "output tokens/s", 1.0),
    )
    return _panels(found.blocks, panels, "block size, tokens", width=8.5)


def save_preemption(lengths: Sequence[int], values: Mapping[str, Sequence[float]], path: Path) -> None:
    """Times of each strategy over that of `recompute`, which is 1, by context length."""
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 3))
        marks = {"recompute": (BLACK, "D"), "offload": (BLUE, "o"), "auto": (ORANGE, "s")}
        for name, (colour, marker) in marks.items():
            axes.plot(lengths, values[name], marker=marker, color=colour, label=name, markersize=5)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("time / that of recompute")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


def _panels(
    rows: Mapping[str, Mapping[str, Range]], panels: Sequence[tuple[str, str, float]], xlabel: str, width: float
) -> Figure:
    """One panel a figure of `rows`, side by side: its name there, its label and the factor to the label's unit."""
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(width, 2.6), layout="constrained")
    for axes, (name, label, factor) in zip(all_axes, panels, strict=True):
        _ranges(axes, {setting: figures[name] for setting, figures in rows.items()}, factor)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    return figure


def _ranges(axes: Axes, ranges: dict[str, Range], factor: float) -> None:
    """Medians with their ranges, the median written beside it."""
    values = [factor * one.median for one in ranges.values()]
    below = [value - factor * one.least for value, one in zip(values, ranges.values(), strict=True)]
    above = [factor * one.most - value for value, one in zip(values, ranges.values(), strict=True)]
    axes.errorbar(range(len(values)), values, yerr=[below, above], fmt="o", color=BLUE, capsize=3)
    for position, value in enumerate(values):
        text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(text, (position, value), textcoords="offset points", xytext=(6, 3), fontsize=8)
    axes.set_xticks(range(len(values)), list(ranges))
    axes.set_xlim(-0.4, len(values) - 0.4)
    axes.margins(y=0.15)


def draw_eviction(found: Mapping[str, Mapping[int, Worth]], folder: Path) -> Path:
    """Hits and work saved over the size of the tier (`kv_eviction.py`)."""
    lines = {"lru": (BLACK, "-"), "cost": (BLUE, "-"), "lru, second_use": (ORANGE, "--")}
    with pyplot.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
        for axes, what in zip(all_axes, ("hits", "work"), strict=True):
            for name, (colour, dashes) in lines.items():
                shares = [100 * getattr(one, what) for one in found[name].values()]
                axes.plot(list(found[name]), shares, dashes, marker="o", markersize=4, color=colour, label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(found["lru"]), [f"{size // 1000}" for size in found["lru"]])
            axes.set_xlabel("blocks of 512 tokens in the tier, thousands")
            axes.set_ylim(bottom=0)
        all_axes[0].set_ylabel("blocks given, % of those asked for")
        all_axes[1].set_ylabel("work saved, %")
        all_axes[0].legend(loc="upper left", frameon=False)
        path = folder / "eviction.svg"
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
    return path
