"""Whatever requests come, end and change, in any order: no place leaks, and no tenant gets more than its rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.errors import TenantConcurrencyError, TenantTokensError
from router.tenant_desk import TenantDesk
from router.tenant_limits import Visit
from router.tenants import Tenant
from tests.property.lengths import examples

#: (what, which, number of tokens, seconds until then)
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "generate", "end", "exchange", "remove"]),
        st.integers(0, 9),
        st.integers(1, 200),
        st.floats(0, 20),
    ),
    max_size=60,
)


@settings(max_examples=examples(25))
@given(events=_EVENTS, limit=st.integers(1, 6), num_routers=st.integers(1, 3))
def test_places_are_counted_and_none_is_lost(
    events: list[tuple[str, int, int, float]], limit: int, num_routers: int
) -> None:
    share = math.ceil(limit / num_routers)
    desk = TenantDesk([Tenant("a", max_concurrent_requests=limit, tokens_per_minute=300)], True, num_routers)
    living: list[Visit] = []
    ended: list[Visit] = []
    now = 0.0
    for what, which, num_tokens, seconds in events:
        now += seconds
        if what == "enter" and desk.tenant("a") is not None:
            if len(living) >= share:
                with pytest.raises(TenantConcurrencyError):
                    desk.enter("a", now)
                continue
            visit = desk.enter("a", now)
            living.append(visit)
            try:
                visit.charge_prompt(num_tokens, now)
            except TenantTokensError:
                living.remove(visit)
                visit.end(now)
        elif what == "generate" and living:
            visit = living[which % len(living)]
            visit.accepted(1)
            visit.generated(num_tokens, now)
        elif what == "end" and living:
            visit = living.pop(which % len(living))
            visit.end(now)
            ended.append(visit)
        elif what == "exchange":
            limit = which + 1
            share = math.ceil(limit / num_routers)
            desk.exchange([Tenant("a", max_concurrent_requests=limit, tokens_per_minute=num_tokens)], now)
        elif what == "remove":
            desk.exchange([], now)
        for visit in ended:  # a second end changes nothing
            visit.end(now)
        figures = desk.figures().get("a")
        assert (figures.num_running if figures else 0) == len(living)
    for visit in living:
        visit.end(now)
    figures = desk.figures().get("a")
    assert figures is None or figures.num_running == 0


@settings(max_examples=examples(25))
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 150), st.integers(0, 150)), min_size=1, max_size=40),
    per_minute=st.integers(50, 1000),
)
def test_over_any_time_a_tenant_uses_its_rate_and_one_burst(
    arrivals: list[tuple[float, int, int]], per_minute: int
) -> None:
    """Used up to t: a minute's tokens, what has flowed in since, and what the last one that came in took too much. And
    who waits as long as was said comes in, if nobody else of the tenant came in between.
    """
    desk = TenantDesk([Tenant("a", tokens_per_minute=per_minute)], True)
    now, used = 0.0, 0
    for seconds, num_prompt, num_output in arrivals:
        now += seconds
        visit = desk.enter("a", now)
        try:
            visit.charge_prompt(num_prompt, now)
        except TenantTokensError as error:
            visit.end(now)
            now += error.retry_after_s
            visit = desk.enter("a", now)
            visit.charge_prompt(num_prompt, now)
        assert used <= per_minute * (1 + now / 60) + 1e-3  # all debts are paid when somebody comes in
        visit.accepted(num_prompt)
        visit.generated(num_output, now)
        visit.end(now)
        used += num_prompt + num_output
