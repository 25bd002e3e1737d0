"""Serve runs our scaling policy on the replicas' own figures: more under streams, fewer after, no token lost."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import drain
from benchmarks.checked_streams import Load
from cluster.cli import main
from tests.cluster.shoal_process import ShoalProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: a step of the fake runner is 7.5 ms and 0.27 for each stream: at 12 ms a replica is for a dozen of them
TARGETS = {
    "autoscaling.max_replicas": "3",
    "autoscaling.tpot_target_ms": "12",
    "autoscaling.cool_down_s": "2",
}


@pytest.mark.long
def test_one_three_one_under_streams(capsys: pytest.CaptureFixture[str]) -> None:
    knobs = [part for key, value in TARGETS.items() for part in ("--set", f"{key}={value}")]
    with ShoalProcess(*knobs) as shoal:

        async def run() -> None:
            await drain.until_up(shoal.url, 1)
            many = Load(shoal.url, num_long=40, long_tokens=700, per_s=4.0, short_tokens=5)
            few = Load(shoal.url, num_long=3, long_tokens=2500, per_s=0)
            async with few:
                async with many:
                    await drain.until_up(shoal.url, 3)
                # the few go on, so that whoever leaves has to hand streams over
                await drain.until_up(shoal.url, 1)
                assert few.num_open, "they ended before the replicas left; nothing was shown"
            assert many.errors == []
            assert few.errors == []

        asyncio.run(run())
        assert main(["scale", "--replicas", "2", "--port", str(shoal.port)]) == 2
        assert "autoscaling decides how many replicas there are, 1 to 3" in capsys.readouterr().err
