"""`shoal set` on a cluster that streams: nobody notices but by the rules, and who is replaced has the new ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.cluster.shoal_process import ROOT, ShoalProcess, wait_until
from tests.cluster.test_serve import body, expected, tokens_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def command(shoal: ShoalProcess, *arguments: str) -> tuple[int, str, str]:
    """`shoal ...` as a user types it beside the running cluster. Exit code, and what it said on both ways."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cluster.cli", *arguments, "--port", str(shoal.port),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(), errors.decode()


def replicas(shoal: ShoalProcess) -> dict[str, str]:
    """Id -> configuration, of those that are up."""
    return {r["replica_id"]: r["config"] for r in shoal.status()["replicas"] if r["state"] == "up"}


#: two commands, in the order of events that a race may have: the first one is told in time, and one that read what was
#: there before both changes nothing
RACE = """
import sys, time
from cluster.live_apply import _confirm, _submit, attached, in_force, put_in_force
from cluster.live_confirm import Confirmation
from cluster.live_knobs import changed, lay_over, overlay_of
from replica.errors import ShoalError

with attached(None, int(sys.argv[1])):
    found = in_force()
    mine, other = {"scheduler.watermark": 0.3}, {"scheduler.watermark": 0.4}
    wanted = changed(found.now, mine)
    _submit(overlay_of(lay_over(found.start, {}), wanted))
    put_in_force(in_force(), changed(found.now, other), other)
    started = time.monotonic()
    for attempt in (
        lambda: _confirm(Confirmation(found.start, found.now, wanted, mine, started)),
        lambda: put_in_force(found, wanted, mine),
    ):
        try:
            attempt()
        except ShoalError as error:
            print(error)
    print("in time" if time.monotonic() - started < 10 else "too late")
"""


def test_knobs_change_under_running_streams_and_outlive_a_replica() -> None:
    with ShoalProcess("--replicas", "2", "--set", "scheduler.max_num_seqs=8") as shoal:
        before, pids = replicas(shoal), (shoal.pids("Replica"), shoal.pids("Router"))
        assert len(before) == 2

        async def run() -> None:
            async with httpx.AsyncClient(base_url=shoal.url, timeout=120) as client:
                begun = asyncio.Queue[int]()
                may_end = asyncio.Event()

                async def stream(number: int) -> None:
                    """Until 50 tokens after the changes; then the client leaves."""
                    tokens: list[int] = []
                    num_after = 0
                    async with client.stream("POST", "/v1/completions", json=body(number, 5000, stream=True)) as answer:
                        assert answer.status_code == 200
                        async for line in answer.aiter_lines():
                            tokens += tokens_of(line)
                            begun.put_nowait(number)
                            num_after += may_end.is_set()
                            if num_after == 50:
                                break
                    assert num_after == 50, "it ended before the changes"
                    assert tokens == expected(number, 5000)[: len(tokens)]

                async def ask_again_and_again() -> set[int]:
                    codes = set()
                    while not may_end.is_set():
                        codes.add((await client.post("/v1/completions", json=body(1, 2))).status_code)
                        codes.add((await client.get("/health")).status_code)
                    return codes

                streams = [asyncio.create_task(stream(number)) for number in range(3)]
                asking = asyncio.create_task(ask_again_and_again())
                seen: set[int] = set()
                while len(seen) < 3:
                    seen.add(await begun.get())
                code, said, errors = await command(
                    shoal, "set", "scheduler.policy=priority", "scheduler.max_num_batched_tokens=64",
                    "router.max_queued_requests_per_replica=5", "router.policy=round-robin",
                )  # fmt: skip
                assert code == 0, errors
                assert "scheduler.policy: fcfs -> priority" in said
                assert "in force at 2 replica(s) and 1 router(s)" in errors
                urgent = await client.post("/v1/completions", json=body(2, 2, priority=-1))
                assert urgent.status_code == 200, "the router still looks at no priorities"
                (code, _, errors), (_, shown, _) = await asyncio.gather(
                    command(shoal, "set", "scheduler.watermark=0.2", "scheduler.max_num_seqs=0"),
                    command(shoal, "get", "scheduler.policy", "router.max_queued_requests_per_replica"),
                )
                assert (code, "scheduler.max_num_seqs" in errors) == (2, True), errors
                assert [line.split()[1] for line in shown.splitlines()] == ["5", "priority"], shown
                may_end.set()
                assert await asking == {200}
                await asyncio.gather(*streams)

        asyncio.run(run())
        after = replicas(shoal)
        assert after.keys() == before.keys()
        assert (shoal.pids("Replica"), shoal.pids("Router")) == pids, "somebody was replaced"
        (number,) = {*after.values(), shoal.status()["config"]}
        assert number not in before.values()
        assert {r["queue_cap"] for r in shoal.status()["replicas"]} == {5}

        race = subprocess.run(
            [sys.executable, "-c", RACE, str(shoal.port)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        superseded, stale, in_time = race.stdout.splitlines()
        assert superseded.startswith("superseded by another change; in force: scheduler.watermark=0.4 ")
        assert stale.startswith("superseded by another change before anything of this one was done; in force: ")
        assert in_time == "in time"
        wait_until(lambda: {*replicas(shoal).values(), shoal.status()["config"]} != {number}, 10, "the other change")

        os.kill(shoal.pids("Replica")[0], signal.SIGKILL)
        # while nobody has noticed, and then while the replacement starts: it is not waited for, and has it in the end
        code, said, errors = asyncio.run(command(shoal, "set", "scheduler.policy=fcfs", "scheduler.watermark=0.4"))
        assert code == 0, errors
        assert said.splitlines() == ["scheduler.policy: priority -> fcfs", "scheduler.watermark: already 0.4"]
        assert "requests with a `priority` other than 0 get 400" in errors
        assert "is in force at" in errors
        number = shoal.status()["config"]
        wait_until(
            lambda: len(replicas(shoal)) == 2 and replicas(shoal).keys() != before.keys(), 30, "Serve's replacement"
        )
        wait_until(lambda: set(replicas(shoal).values()) == {number}, 10, "the configuration in force at the new one")
