"""PURE. Workloads shared by simulation tests, soak and claims: everything from a seed."""

from __future__ import annotations

import random

from cluster.simulation.records import SimRequest
from replica.config import AdmissionConfig, EngineConfig, Hardware, SchedulerConfig, resolve

HARDWARE = Hardware(num_cores=2, memory_bytes=24 << 30, has_bfloat16=True)


def engine(*, cap: int = 64, **scheduler: object) -> EngineConfig:
    """A resolved engine configuration."""
    config = EngineConfig(
        scheduler=SchedulerConfig.model_validate(scheduler), admission=AdmissionConfig(max_queued_requests=cap)
    )
    return resolve(config, HARDWARE)


def burst(
    num_requests: int,
    span_s: float,
    *,
    seed: int,
    prompt: tuple[int, int] = (5, 200),
    output: tuple[int, int] = (1, 60),
    num_routers: int = 1,
    abort_share: float = 0.0,
) -> list[SimRequest]:
    """Uniform arrivals over `span_s`; every tenth request is sampled with a seed of its own."""
    rng = random.Random(seed)
    requests = []
    for number in range(num_requests):
        arrival = rng.random() * span_s
        requests.append(
            SimRequest(
                request_id=f"q{number}",
                arrival_s=arrival,
                prompt_token_ids=[rng.randrange(1000) for _ in range(rng.randint(*prompt))],
                max_tokens=rng.randint(*output),
                seed=number,
                temperature=1.0 if number % 10 == 0 else 0.0,
                abort_at_s=arrival + rng.random() if rng.random() < abort_share else None,
                router=number % num_routers,
            )
        )
    return requests


def document_among_chats(seed: int = 0) -> list[SimRequest]:
    """Scenario A: nine short chats are talking when an 8,000-token document arrives."""
    rng = random.Random(seed)
    chats = [
        SimRequest(f"chat-{i}", 0.01 * i, [rng.randrange(1000) for _ in range(rng.randint(20, 60))], 150)
        for i in range(9)
    ]
    document = SimRequest("document", 0.5, [rng.randrange(1000) for _ in range(8000)], 20)
    return [*chats, document]
