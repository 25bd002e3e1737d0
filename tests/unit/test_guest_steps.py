"""Prompts of tenants that share a replica: whose are computed first, and steps that are a guest's."""

from __future__ import annotations

import pytest

from replica import tenant_ledger
from replica.step import StepPlan
from tests.unit.engine_harness import Harness


@pytest.fixture(autouse=True)
def small_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's prompt of 100 tokens is more than it."""
    monkeypatch.setattr(tenant_ledger, "CREDIT", 40.0)


class Steps:
    """A tenant `host` that has two prompts under way and others that wait; a step has room for 32 tokens."""

    def __init__(self, **settings: object) -> None:
        self.h = Harness(**{"num_blocks": 512, "max_num_seqs": 8, "caching": False, **settings})  # type: ignore[arg-type]
        for tenant in ("small", "small-0", "small-1", "small-2"):  # not unknown, or they would have no credit
            self.h.submit(f"first of {tenant}", [1], 1, tenant=tenant)
            self.h.step()
        for number in range(4):
            self.h.submit(f"host-{number}", [number] * 100, tenant="host")
        self.h.step()

    def step(self) -> dict[str, int]:
        """Tokens that each request had in one step."""
        had = self.h.step()
        self.h.core.validate()
        return had


def test_a_guest_joins_before_the_prompts_of_a_host_and_alone() -> None:
    steps = Steps()
    steps.h.submit("guest", [9] * 10, tenant="small")
    assert steps.step() == {"guest": 10}
    assert steps.step() == {"guest": 1, "host-0": 31}


def test_of_two_steps_one_is_the_hosts() -> None:
    steps = Steps()
    steps.h.submit("first", [8] * 10, 1, tenant="small")
    assert steps.step() == {"first": 10}
    steps.h.submit("second", [9] * 10, 1, tenant="small")
    assert steps.step() == {"host-0": 32}
    assert steps.step() == {"second": 10}


def test_guests_of_several_tenants_share_a_step() -> None:
    steps = Steps()
    for number in range(3):
        steps.h.submit(f"guest-{number}", [9, number] * 5, tenant=f"small-{number}")
    assert steps.step() == {"guest-0": 10, "guest-1": 10, "guest-2": 10}


def test_a_long_prompt_of_a_guest_goes_on_before_the_hosts() -> None:
    steps = Steps()
    steps.h.submit("guest", [9] * 36, tenant="small")
    assert steps.step() == {"guest": 32}
    assert steps.step() == {"guest": 4, "host-0": 28}


def test_streams_of_a_host_are_in_a_guest_step() -> None:
    steps = Steps(max_num_batched_tokens=128)  # the first two prompts are through or nearly so
    assert steps.step()["host-0"] == 1
    steps.h.submit("guest", [9] * 10, tenant="small")
    had = steps.step()
    assert had["host-0"] == 1
    assert had["guest"] == 10


def test_a_guest_without_blocks_keeps_nobody_waiting() -> None:
    steps = Steps(num_blocks=30)  # the first host's 100 tokens, and nobody else's
    steps.h.submit("guest", [9] * 40, tenant="small")
    assert steps.step() == {"host-0": 32}
    assert steps.step() == {"host-0": 32}


def test_a_guest_without_a_lane_keeps_nobody_waiting() -> None:
    steps = Steps(max_partial_prefills=1)
    steps.h.submit("long", [9] * 50, tenant="small")
    assert steps.step() == {"host-0": 32}, "one prompt may be unfinished, and it is the host's"
    steps.h.submit("short", [8] * 10, tenant="small-0")
    assert steps.step() == {"short": 10}, "it is not left unfinished"


def test_equal_tenants_have_no_guests() -> None:
    h = Harness(num_blocks=512, max_num_seqs=8, caching=False)
    for number in range(4):
        for tenant in ("a", "b"):
            h.submit(f"{tenant}{number}", [number] * 20, 4, tenant=tenant)
    assert h.step() == {"a0": 20, "b0": 12}
    assert len(h.step()) > 2, "what is left of the step is used"


def test_a_plan_of_a_guest_step_names_it_once() -> None:
    steps = Steps()
    steps.h.submit("guest", [9] * 10, tenant="small")
    plan = steps.h.core.schedule(steps.h.now)
    assert isinstance(plan, StepPlan)
    assert len(plan.seq_ids) == len(set(plan.seq_ids)) == 1
    assert [new.num_prompt_tokens for new in plan.new] == [10]
