"""Claims of replicas with several ranks: the cost of a step and of a loss, that ranks agree, how replicas add up."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import rank_loss, rank_scaling, rank_step
from benchmarks.claims import Measured, claim

#: extra microseconds a step over the runner thread
STEP_BOUNDS = {2: 150.0, 4: 300.0}


@claim("tp.step")
def step(full: bool) -> Iterator[tuple[str, Measured]]:
    """A null model on processes as ranks, over the same on the in-process runner thread; alternating rounds."""
    for num_ranks, bound in STEP_BOUNDS.items():
        for batch in (1, 64):
            rounds, steps = (15, 2000) if full else (5, 500)
            found = asyncio.run(rank_step.measure(num_ranks, batch, rounds, steps))
            note = (
                f"thread {found.thread_us:.0f}, group {found.group_us:.0f} (p99 {found.p99_us:.0f}), "
                f"over sockets {found.sockets_us:.0f}"
            )
            yield f"{num_ranks}.b{batch}", Measured(found.extra_us, "us a step more", bound, note=note)
        yield f"{num_ranks}.idle", Measured(100 * found.idle_share, "% of a core, idle group", 1.0)


@claim("tp.kill")
def kill(full: bool) -> Iterator[tuple[str, Measured]]:
    """kill -9 and SIGSTOP of a rank and of a replica, under load; two replicas of two ranks."""
    runs = {"fake": rank_loss.measure(rank_loss.EVERYTHING)}
    if full:
        runs["model"] = rank_loss.measure(rank_loss.EVERYTHING, runner="torch", num_ranks=3, num_streams=8)
    for runner, outcomes in runs.items():
        for name, found in outcomes.items():
            is_frozen = name == rank_loss.REPLICA_STOPPED[0]
            note = f"of {found.num_streams} streams; whole again after {found.whole_s:.1f} s; {found.errors[:1]}"
            yield f"{runner}.{name}.errors", Measured(len(found.errors), "errors", 0, note=note)
            yield (
                f"{runner}.{name}.noticed",
                Measured(found.noticed_s, "s until a router knew", 5.0 if is_frozen else 1.0),
            )
            if is_frozen:
                yield f"{runner}.{name}.whole", Measured(found.whole_s, "s until it was replaced", 25.0)
        killed = outcomes["replica_killed"]
        note = f"gone after {1000 * killed.gone_s:.0f} ms"
        yield f"{runner}.orphans", Measured(killed.num_orphans, "orphans", 0, note=note)


@claim("tp.equal")
def equal(full: bool) -> Iterator[tuple[str, Measured]]:
    """float32 through the whole cluster: each token of one rank's output within 1e-3 of the best on several."""
    from benchmarks import rank_equality, tiny_models

    with tempfile.TemporaryDirectory() as folder:
        tiny = {"hidden_size": 96, "num_attention_heads": 12, "head_dim": 32}
        cases = {
            "heads12": (tiny_models.make(Path(folder) / "a", "llama", num_key_value_heads=12, **tiny), (1, 2, 3, 4)),
            "smollm2": ("smollm2-135m-instruct", (1, 3)),
        }
        if full:
            qwen = tiny_models.make(Path(folder) / "b", "qwen3")  # 4 ranks and 2 KV heads: each is held twice
            mixtral = tiny_models.make(Path(folder) / "c", "mixtral")
            cases |= {"qwen3": (qwen, (1, 2, 4)), "mixtral": (mixtral, (1, 2, 4))}
        for name, (model, sizes) in cases.items():
            vocab = 49152 if name == "smollm2" else 256
            first, *others = rank_equality.measure(str(model), sizes, vocab, 16 if full else 6)
            for found in (first, *others):
                note = (
                    f"{found.num_different(first)} of {len(first.outputs)} outputs differ; MiB of weights "
                    f"{'/'.join(f'{m:g}' for m in found.weights_mib)}, KV {'/'.join(f'{m:g}' for m in found.kv_mib)}"
                )
                bound = rank_equality.NEAR
                yield f"{name}.{found.num_ranks}", Measured(found.farthest, "from the best", bound, note=note)
                if found is not first:
                    apart = Measured(found.apart(first), "logprobs apart", bound)
                    yield f"{name}.{found.num_ranks}.apart", apart


@claim("tp.scale")
def scale(full: bool) -> Iterator[tuple[str, Measured]]:
    """Fake runner, sleeping steps: tokens/s of n replicas over n times those of one. Full: streamed as well."""
    for is_streamed in (False, True) if full else (False,):
        single = 0.0
        for num_replicas in (1, 2, 4, 8):
            found = rank_scaling.measure(num_replicas, 200, 4, is_streamed)
            single = single or found.tokens_per_s
            note = (
                f"{found.tokens_per_s:.0f} tokens/s; {found.num_failed} failed; router {found.router_cores:.2f} of a "
                f"core, {found.router_us_per_token:.0f} us a token (whole: "
                f"{1e6 / found.router_us_per_token:.0f} tokens/s); "
                f"in all {found.all_cores:.2f} of {os.cpu_count()} cores"
            )
            share = found.tokens_per_s / (num_replicas * single)
            name = f"{num_replicas}.streamed" if is_streamed else f"{num_replicas}"
            bound = None if is_streamed else 0.95
            yield name, Measured(share, "of linear", bound, at_most=False, note=note)
