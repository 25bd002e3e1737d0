"""Two replicas that do everything, or one that computes prompts and one that goes on? Over prompt lengths and loads.

    python -m examples.prefill_decode_compare [--lengths 128,512,2048] [--clients 1,4] [--plot pd_compare.svg]

Three systems on the same cores: `mixed` (two replicas with chunked prefill), `always` (one prefill and one decode
replica) and `auto` (the same two, decided for each request). Each client sends its next request when the last one has
ended. `--save` and `--load` keep the figures, to draw again. Systems run one after the other, so a machine that others
use makes them differ by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import servers
from benchmarks.load import Workload, run_load
from examples.prefill_decode import set_decision

#: each one's `shoal serve` arguments, and the decisions that are measured in it, by system
CLUSTERS: dict[tuple[str, ...], dict[str, str]] = {
    ("--replicas", "2"): {"mixed": ""},
    ("--prefill", "1", "--decode", "1"): {"always": "always", "auto": "auto"},
}
PARTS = ("held", "queued", "prefill", "transfer_waited", "decode", "stalls", "messages", "transfer_hidden")
_PART = re.compile(r'^shoal_request_part_seconds_total\{[^}]*part="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_REMOTE = re.compile(r'^shoal_hand_overs_total\{[^}]*what="remote"[^}]*\} (\S+)$', re.MULTILINE)


class Cell(msgspec.Struct, frozen=True):
    """One system at one length and load. Milliseconds."""

    system: str
    num_tokens: int
    num_clients: int
    num_requests: int
    num_failed: int
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    tokens_per_s: float
    #: prompts given to the prefill replica
    num_remote: float
    #: of a request, by part
    parts: dict[str, float]


def _told(url: str) -> tuple[dict[str, float], float]:
    """Seconds by part and remote prompts, since the start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    parts = dict.fromkeys(PARTS, 0.0)
    for name, value in _PART.findall(text):
        parts[name] += float(value)
    return parts, sum(float(value) for value in _REMOTE.findall(text))


def measure(server: servers.Server, system: str, load: Workload) -> Cell:
    parts, num_remote = _told(server.url)
    found = asyncio.run(run_load(server.url, server.model, load))
    parts_then, num_remote_then = _told(server.url)
    count = max(1, load.num_requests - found.num_failed)
    return Cell(
        system,
        load.input_len,
        load.concurrency,
        load.num_requests,
        found.num_failed,
        found.ttft_ms["p50"],
        found.ttft_ms["p99"],
        found.gap_ms["p50"],
        found.gap_ms["p99"],
        found.output_tokens_per_s,
        num_remote_then - num_remote,
        {name: 1000 * (parts_then[name] - parts[name]) / count for name in PARTS},
    )


def compare(lengths: Sequence[int], clients: Sequence[int], output_len: int, *serve_args: str) -> Iterator[Cell]:
    """All systems get the same prompts in each cell, and none gets a prompt twice."""
    for arguments, systems in CLUSTERS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.shoal(Path(folder), *arguments, *serve_args) as server,
        ):
            for number, (system, decision) in enumerate(systems.items()):
                if decision:
                    set_decision(server.url, decision)
                # it has measured its steps before `auto` decides anything
                asyncio.run(run_load(server.url, server.model, Workload(256, 8, 2, 6, seed=90 + number)))
                for row, num_tokens in enumerate(lengths):
                    for count in clients:
                        # `auto` comes to a cluster that has the prompts of `always` in its caches
                        seed = 1000 * number + 10 * row + count
                        yield measure(server, system, Workload(num_tokens, output_len, count, 2 * count + 2, seed))


def table(cells: Sequence[Cell]) -> list[str]:
    """Markdown."""
    lines = ["| prompt | clients | system | TTFT p50, ms | p99 | gap p50, ms | p99 | tokens/s | remote |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for one in sorted(cells, key=lambda cell: (cell.num_tokens, cell.num_clients)):
        failed = f", {one.num_failed} failed" if one.num_failed else ""
        lines.append(
            f"| {one.num_tokens:,} | {one.num_clients} | `{one.system}` | {one.ttft_p50:,.0f} | {one.ttft_p99:,.0f} | "
            f"{one.gap_p50:,.0f} | {one.gap_p99:,.0f} | {one.tokens_per_s:.1f} | "
            f"{one.num_remote:.0f} of {one.num_requests}{failed} |"
        )
    return lines


def parts_of(cell: Cell) -> str:
    """What a request of the cell spent its time on."""
    spent = (f"{name} {value:,.0f}" for name, value in cell.parts.items() if value >= 0.5)
    return f"{cell.system:<6} {cell.num_tokens:5} tokens, {cell.num_clients} clients, ms a request: {', '.join(spent)}"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """TTFT and gaps over the length of prompts, a row for each number of clients."""
    import matplotlib

    from benchmarks.findings_plots import BLACK, BLUE, ORANGE, STYLE

    matplotlib.use("svg")
    from matplotlib import pyplot

    marks = {"mixed": (BLACK, "D"), "always": (ORANGE, "s"), "auto": (BLUE, "o")}
    loads = sorted({cell.num_clients for cell in cells})
    lengths = sorted({cell.num_tokens for cell in cells})
    panels = (("ttft_p50", "TTFT p50, ms"), ("gap_p99", "gap p99, ms"))
    with pyplot.rc_context(STYLE):
        figure, rows = pyplot.subplots(
            len(loads), len(panels), figsize=(8, 2.5 * len(loads)), squeeze=False, layout="constrained"
        )
        for num_clients, all_axes in zip(loads, rows, strict=True):
            for (name, label), axes in zip(panels, all_axes, strict=True):
                for system, (colour, marker) in marks.items():
                    mine = {c.num_tokens: c for c in cells if (c.system, c.num_clients) == (system, num_clients)}
                    values = [getattr(mine[length], name) for length in sorted(mine)]
                    axes.plot(sorted(mine), values, marker=marker, color=colour, label=system, markersize=5)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
                axes.set_xlabel(f"prompt, tokens; {num_clients} client{'s' if num_clients > 1 else ''}")
                axes.set_ylabel(label)
        rows[0][0].legend(loc="upper left", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_numbers, default=[128, 512, 2048])
    parser.add_argument("--clients", type=_numbers, default=[1, 4])
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--save", type=Path, help="figures, as JSON")
    parser.add_argument("--load", type=Path, help="measure nothing, take figures from here")
    options = parser.parse_args()
    if options.load:
        cells = msgspec.json.decode(options.load.read_bytes(), type=list[Cell])
    else:
        cells = []
        for cell in compare(options.lengths, options.clients, options.output):
            cells.append(cell)
            print(parts_of(cell), flush=True)
    if options.save:
        options.save.write_bytes(msgspec.json.encode(cells))
    print("\n".join(table(cells)))
    if options.plot:
        draw(cells, options.plot)


if __name__ == "__main__":
    main()
