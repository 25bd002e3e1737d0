"""Scaling in virtual time: our policy against Serve's default one, on a step, a spike, a steady load and a trace.

    python -m benchmarks.scaling [step] [spike] [steady] [azure] [azure-quarter]

Served in time: the first token within `TTFT_S` and on the mean a token each `TPOT_S`; refused or failed is not. The
price is replica-hours from order to end, starting and draining included. Both policies are asked at the same moments
and get replicas that need `START_S` to start.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmarks.scaling_rival import ServeDefaultPolicy, ServeSettings
from cluster.autoscaling import AutoscalingConfig, ScalingPolicy
from cluster.simulation.records import SimRecord, SimRequest
from cluster.simulation.sim_cluster import SimCluster, SimConfig
from cluster.simulation.sim_scaling import OurPolicy, Policy, SimScaler
from cluster.simulation.traces import PromptText, TraceRequest, read_azure, synthetic
from cluster.simulation.workloads import engine
from replica.fake_runner import CostModel

TTFT_S, TPOT_S = 2.0, 0.2
START_S = 20.0
FEWEST, MOST = 1, 8
#: of Serve's policy; its default is the last
TARGETS = (96.0, 64.0, 48.0, 32.0, 24.0, 16.0, 8.0, 2.0)
#: Serve's policy with delays that no default has: as quick as ours
QUICK = ServeSettings(metrics_interval_s=1.0, look_back_period_s=5.0, upscale_delay_s=0.0, downscale_delay_s=120.0)
#: prompts at a quarter of the trace's length, for tokens that cost four times as much: Python copies fewer of them
SCALE = 0.25
#: a large model: 60 ms a step, 1.4 for each stream, 0.1 for each prompt token of the trace, which needs four of them
COST = CostModel(base_s=0.06, per_token_s=4e-4, per_sequence_s=1e-3, per_context_token_s=4e-7)
_TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "AzureLLMInferenceTrace_conv_2023.csv"


class Outcome(msgspec.Struct, frozen=True):
    """Of one run."""

    in_time: float
    replica_hours: float
    changes: list[tuple[float, int]]
    records: list[SimRecord]

    def describe(self) -> str:
        late = sum(1 for r in self.records if (r.ttft_s or TTFT_S + 1) > TTFT_S)
        refused = sum(1 for r in self.records if r.refusal is not None)
        return (
            f"in time {100 * self.in_time:6.2f} %, replica-hours {self.replica_hours:6.3f}, changes "
            f"{len(self.changes) - 1:3d}, most {max(n for _, n in self.changes)}, late {late}, refused {refused}"
        )


def simulate(requests: list[SimRequest], policy: Policy, fewest: int = FEWEST) -> Outcome:
    """One run to the end."""
    config = SimConfig(engine=engine(max_num_batched_tokens=256), num_replicas=fewest, num_routers=2, num_blocks=4096)
    cluster = SimCluster(config, COST)
    scaler = SimScaler(cluster, policy, start_s=START_S)
    records = cluster.run(requests, follow=scaler.follow)
    cluster.validate()
    served = sum(1 for record in records if is_in_time(record))
    return Outcome(served / len(records), scaler.replica_seconds() / 3600, scaler.changes, records)


def is_in_time(record: SimRecord) -> bool:
    """Both targets met."""
    times = record.latencies
    if record.finish_reason is None or times.ttft_s is None:
        return False
    return times.ttft_s <= TTFT_S and (times.tpot_s is None or times.tpot_s <= TPOT_S)


def ours() -> Policy:
    """The production policy with its defaults, and the target of this page."""
    config = AutoscalingConfig(max_replicas=MOST, tpot_target_ms=1000 * TPOT_S)
    return OurPolicy(ScalingPolicy(config, FEWEST))


def rivals(
    requests: list[SimRequest], hours: float, settings: ServeSettings, first: float = TARGETS[0]
) -> Iterator[tuple[float, Outcome]]:
    """Serve's policy, `target_ongoing_requests` tuned against us: from `first` down until it pays for at least
    `hours`. What comes last is the rival that is compared: the cheapest that is not cheaper.
    """
    for target in TARGETS[TARGETS.index(first) :]:
        asked = msgspec.structs.replace(settings, target_ongoing_requests=target)
        outcome = simulate(requests, ServeDefaultPolicy(asked, FEWEST, MOST))
        yield target, outcome
        if outcome.replica_hours >= hours:
            return


def _poisson(rates: list[tuple[float, float]], seed: int) -> list[TraceRequest]:
    """`rates`: (seconds, requests a second), one after the other; lengths as in `synthetic`'s first kind."""
    rng = random.Random(seed)
    lengths = [row for row in synthetic(seed, 4000) if not row.prefix_ids]
    found, start = [], 0.0
    for span, rate in rates:
        now = start + rng.expovariate(rate)
        while now < start + span:
            row = rng.choice(lengths)
            found.append(TraceRequest(now, row.num_prompt_tokens, row.num_output_tokens))
            now += rng.expovariate(rate)
        start += span
    return found


def step() -> list[TraceRequest]:
    """Four times as much from one moment on, and back after eight minutes."""
    return _poisson([(200, 1.0), (500, 4.0), (500, 1.0)], seed=1)


def spike() -> list[TraceRequest]:
    """Eight times as much for a minute."""
    return _poisson([(200, 1.0), (60, 8.0), (640, 1.0)], seed=2)


def steady() -> list[TraceRequest]:
    """The same for half an hour."""
    return _poisson([(1800, 3.0)], seed=3)


def azure(seconds: float = 3600.0) -> list[TraceRequest]:
    """The public trace. Raises FileNotFoundError where it is absent."""
    with _TRACE.open() as lines:
        return [row for row in read_azure(lines) if row.arrival_s < seconds]


def requests_of(rows: list[TraceRequest]) -> list[SimRequest]:
    """For the simulator."""
    text = PromptText(0, 1000)
    return [
        SimRequest(f"q{n}", row.arrival_s, text.prompt(n, row, SCALE), row.num_output_tokens, router=n % 2)
        for n, row in enumerate(rows)
    ]


SCENARIOS: dict[str, Callable[[], list[TraceRequest]]] = {
    "step": step, "spike": spike, "steady": steady, "azure": azure,
    "azure-quarter": lambda: azure(900.0),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Print a table a scenario."""
    for name in names or [*SCENARIOS]:
        requests = requests_of(SCENARIOS[name]())
        print(f"{name}: {len(requests)} requests")
        mine = simulate(requests, ours())
        print(f"  {'ours':<28}{mine.describe()}", flush=True)
        for kind, settings in (("Serve", ServeSettings()), ("Serve, quick", QUICK)):
            for target, outcome in rivals(requests, mine.replica_hours, settings):
                print(f"  {f'{kind}, target {target:g}':<28}{outcome.describe()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
