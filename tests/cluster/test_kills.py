"""kill -9 and SIGSTOP of replica processes without Ray: a slice of `benchmarks/kills.py`, whose long form is the claims
`admission.kills` and `admission.frozen`.
"""

from __future__ import annotations

import pytest

from benchmarks.kills import freeze, random_kills

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_random_kills_cost_no_token_and_double_none() -> None:
    found = await random_kills(8, seed=5, num_clients=4)
    assert found.faults == []
    assert found.left == []
    assert found.num_hit > 0


async def test_a_replica_that_was_frozen_and_fenced_wakes_up_to_nothing() -> None:
    """It is silent for longer than `give_up_silent_s`: what ran there and what waited there goes on elsewhere. Then it
    says what it had to say, and takes new requests.
    """
    found = await freeze(4.5, give_up_silent_s=3.5, num_tokens=(20, 60))
    assert found.faults == []
    assert found.left == []
    assert 0 < found.num_waiting < found.num_hit
