"""Tenants without HTTP: whose key it is, when somebody may come in again, and what changes when tenants do."""

from __future__ import annotations

import pytest

from replica.errors import ConfigError, InvalidRequestError, TenantConcurrencyError, TenantTokensError
from router.openai_api import parse_completion
from router.tenant_desk import TenantDesk
from router.tenant_limits import TokenBucket, Visit
from router.tenant_request import priority_of
from router.tenants import Tenant, TenantBook, default_tenant, digest_of, hashed


def tenant(name: str = "a", *keys: str, **limits: object) -> Tenant:
    return Tenant(name, frozenset(digest_of(hashed(key)) for key in keys), **limits)  # type: ignore[arg-type]


def desk(*tenants: Tenant, num_routers: int = 1, needs_keys: bool = True) -> TenantDesk:
    return TenantDesk(tenants, needs_keys, num_routers)


# ---- keys ----


def test_a_key_opens_its_own_tenant_and_no_other() -> None:
    book = TenantBook([tenant("a", "ka", "ka2"), tenant("b", "kb"), default_tenant(["operator"])], needs_keys=True)
    assert [book.name_of(b"Bearer " + key) for key in (b"ka", b"ka2", b"kb", b"operator")] == ["a", "a", "b", "default"]
    assert book.name_of(b"bearer   ka ") == "a"  # the scheme's case and blanks are not the key
    for wrong in (None, b"", b"ka", b"Basic ka", b"Bearer", b"Bearer kA", b"Bearer " + hashed("ka").encode()):
        assert book.name_of(wrong) is None, wrong


def test_where_no_key_is_needed_strangers_are_the_default_tenant() -> None:
    book = TenantBook([tenant("a", "ka")], needs_keys=False)
    assert [book.name_of(given) for given in (None, b"Bearer x", b"Bearer ka")] == ["default", "default", "a"]


def test_a_book_without_keys_lets_nobody_in_where_keys_are_needed() -> None:
    assert TenantBook([], needs_keys=True).name_of(b"Bearer x") is None


def test_one_key_of_two_tenants_is_refused_without_telling_it() -> None:
    with pytest.raises(ConfigError, match=r"'a' and 'b' have the same key \(sha256:[0-9a-f]{8}\.\.\.\)") as caught:
        TenantBook([tenant("a", "secret"), tenant("b", "secret")], needs_keys=True)
    assert "secret" not in str(caught.value)


# ---- priorities ----


@pytest.mark.parametrize(
    ("given", "allowed", "priority"),
    [(None, (-2, 5), 0), (None, (1, 5), 1), (None, (-9, -3), -3), (1, (1, 5), 1), (5, (1, 5), 5), (7, None, 7)],
)
def test_a_priority_within_the_range(given: int | None, allowed: tuple[int, int] | None, priority: int) -> None:
    body = b'{"prompt": "x"}' if given is None else b'{"prompt": "x", "priority": %d}' % given
    assert priority_of(parse_completion(body), tenant(priority=allowed), "priority") == priority


def test_a_priority_outside_of_the_range_is_told_with_it() -> None:
    request = parse_completion(b'{"prompt": "x", "priority": -4}')
    with pytest.raises(InvalidRequestError, match=r"^priority is -4; allowed for the tenant 'a': 0 to 3\.$") as caught:
        priority_of(request, tenant(priority=(0, 3)), "priority")
    assert caught.value.param == "priority"
    # an explicit 0 is no priority where nobody looks at it
    assert priority_of(parse_completion(b'{"prompt": "x", "priority": 0}'), tenant(priority=(1, 3)), "fcfs") == 0


# ---- requests at once ----


def test_a_place_is_free_again_when_a_request_ends_and_only_once() -> None:
    at = desk(tenant(max_concurrent_requests=2))
    first, second = at.enter("a", 0.0), at.enter("a", 0.0)
    with pytest.raises(TenantConcurrencyError, match=r"has 2 requests under way; allowed: 2\.$"):
        at.enter("a", 1.0)
    first.end(2.0)
    first.end(2.0)
    at.enter("a", 3.0)
    with pytest.raises(TenantConcurrencyError):
        at.enter("a", 3.0)
    second.end(4.0)
    assert at.figures()["a"].num_running == 1


def test_the_forecast_follows_the_time_that_requests_take() -> None:
    at = desk(tenant(max_concurrent_requests=2))
    at.enter("a", 0.0).end(30.0)
    at.enter("a", 30.0)
    at.enter("a", 30.0)
    with pytest.raises(TenantConcurrencyError) as caught:
        at.enter("a", 31.0)
    assert caught.value.retry_after_s == pytest.approx(15.0)


@pytest.mark.parametrize(("limit", "num_routers", "share"), [(8, 2, 4), (8, 3, 3), (1, 4, 1), (5, 1, 5)])
def test_a_router_lets_in_its_part_rounded_up(limit: int, num_routers: int, share: int) -> None:
    at = desk(tenant(max_concurrent_requests=limit), num_routers=num_routers)
    for _ in range(share):
        at.enter("a", 0.0)
    with pytest.raises(TenantConcurrencyError, match=rf"allowed: {share}"):
        at.enter("a", 0.0)


# ---- tokens a minute ----


def test_a_bucket_fills_evenly_and_not_above_a_minutes_tokens() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.take(600, 0.0)
    assert bucket.level(10.0) == pytest.approx(100)
    assert bucket.wait_s(150, 10.0) == pytest.approx(5.0)
    assert bucket.level(1e6) == 600


def test_output_may_leave_a_debt_that_is_paid_first() -> None:
    at = desk(tenant(tokens_per_minute=60))
    visit = at.enter("a", 0.0)
    visit.charge_prompt(10, 0.0)
    visit.accepted(10)
    visit.generated(80, 0.0)  # it runs, so nothing cuts it
    visit.end(0.0)
    with pytest.raises(TenantTokensError, match=r"The prompt has 5 tokens, .* has 0 left; allowed: 60\.$") as caught:
        at.enter("a", 0.0).charge_prompt(5, 0.0)
    assert caught.value.retry_after_s == pytest.approx(35.0)
    at.enter("a", 35.0).charge_prompt(5, 35.0)


def test_a_prompt_longer_than_a_minutes_tokens_waits_for_a_full_bucket() -> None:
    at = desk(tenant(tokens_per_minute=100))
    at.enter("a", 0.0).charge_prompt(1, 0.0)
    with pytest.raises(TenantTokensError):
        at.enter("a", 0.0).charge_prompt(1000, 0.0)
    at.enter("a", 60.0).charge_prompt(1000, 60.0)


def test_what_no_replica_took_costs_nothing() -> None:
    at = desk(tenant(tokens_per_minute=100))
    visit = at.enter("a", 0.0)
    visit.charge_prompt(100, 0.0)
    visit.end(0.0)
    at.enter("a", 0.0).charge_prompt(100, 0.0)


def test_token_rates_are_divided_among_routers() -> None:
    at = desk(tenant(tokens_per_minute=100), num_routers=4)
    at.enter("a", 0.0).charge_prompt(25, 0.0)
    with pytest.raises(
        TenantTokensError, match=r"left at this router; allowed: 25 \(100 over 4 routers\)\.$"
    ) as caught:
        at.enter("a", 0.0).charge_prompt(5, 0.0)
    assert caught.value.retry_after_s == pytest.approx(12.0)


# ---- other tenants while it runs ----


def test_a_lower_limit_cuts_nobody_and_lets_nobody_in() -> None:
    at = desk(tenant(max_concurrent_requests=3))
    visits = [at.enter("a", 0.0) for _ in range(3)]
    at.exchange([tenant(max_concurrent_requests=1, weight=2.5)], 1.0)
    assert at.figures()["a"].num_running == 3
    assert visits[0].tenant.weight == 2.5
    for visit in visits[:2]:
        visit.end(2.0)
    with pytest.raises(TenantConcurrencyError):
        at.enter("a", 2.0)
    visits[2].end(2.0)
    at.enter("a", 2.0)


def test_other_token_limits_make_no_debt_and_forgive_none() -> None:
    bucket = TokenBucket(100, 0.0)
    bucket.configure(10, 0.0)
    assert bucket.level(0.0) == 10
    bucket.take(30, 0.0)
    bucket.configure(5, 0.0)
    assert bucket.level(0.0) == -20
    bucket.configure(50, 0.0)
    assert bucket.level(0.0) == 25


def test_a_tenant_that_is_gone_is_forgotten_when_its_last_request_has_ended() -> None:
    at = desk(tenant("a", "ka"), tenant("b", "kb"))
    visit = at.enter("a", 0.0)
    at.exchange([tenant("b", "kb")], 1.0)
    assert at.name_of(b"Bearer ka") is None
    assert at.tenant("a") is None
    assert set(at.figures()) == {"a", "b", "default"}
    visit.generated(3, 2.0)
    visit.end(2.0)
    assert set(at.figures()) == {"b", "default"}


def test_tenants_that_cannot_be_leave_the_old_ones() -> None:
    at = desk(tenant("a", "ka"))
    with pytest.raises(ConfigError):
        at.exchange([tenant("b", "k"), tenant("c", "k")], 1.0)
    assert at.name_of(b"Bearer ka") == "a"
    assert at.tenant("b") is None


def test_a_visit_belongs_to_the_account_it_began_in() -> None:
    """Removed and back again while something runs: the count goes on."""
    at = desk(tenant(max_concurrent_requests=1))
    visit: Visit = at.enter("a", 0.0)
    at.exchange([], 1.0)
    at.exchange([tenant(max_concurrent_requests=1)], 2.0)
    with pytest.raises(TenantConcurrencyError):
        at.enter("a", 2.0)
    visit.end(3.0)
    at.enter("a", 3.0)
