"""PURE. What one tenant may have at one router: requests at once, and tokens a minute.

Routers do not ask each other: each keeps its own account, with its part of the limits. Of R routers each lets in
ceil(`max_concurrent_requests` / R) at once, so all together at most R - 1 above the limit; token rates are divided
exactly. Only who comes in is refused. What runs is never cut, whatever the limits become.
"""

from __future__ import annotations

import msgspec

from replica.errors import TenantConcurrencyError, TenantTokensError
from router.tenants import Tenant

#: how much the duration of the latest request counts in the forecast of when a place becomes free
_NEWEST = 0.2
#: sums of floats: who waited as long as was said must not be a trifle early
_NO_TIME_S = 1e-6


class TokenBucket:
    """Holds one minute's tokens, fills evenly. Output is taken as it comes, so the level may fall below zero: the debt
    is paid before anybody else of the tenant comes in.
    """

    __slots__ = ("_at", "_level", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = self._level = per_minute
        self._at = now

    @property
    def per_minute(self) -> float:
        return self._per_minute

    def level(self, now: float) -> float:
        """Tokens in it."""
        self._advance(now)
        return self._level

    def configure(self, per_minute: float, now: float) -> None:
        """More is there at once; what is there above a lower limit is lost, and no debt is made of it."""
        self._advance(now)
        more = max(0.0, per_minute - self._per_minute)
        self._level = min(self._level + more, per_minute)
        self._per_minute = per_minute

    def take(self, num_tokens: int, now: float) -> None:
        """Below zero if need be; a negative number gives back."""
        self._advance(now)
        self._level = min(self._level - num_tokens, self._per_minute)

    def wait_s(self, num_tokens: int, now: float) -> float:
        """How long until a prompt of this length may come in. One that is longer than a whole minute's tokens waits
        until the bucket is full, and then leaves a debt: it would never come in otherwise.
        """
        needed = min(float(num_tokens), self._per_minute)
        return max(0.0, (needed - self.level(now)) * 60 / self._per_minute)

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._level + (now - self._at) * self._per_minute / 60, self._per_minute)
            self._at = now


class TenantFigures(msgspec.Struct):
    """What is exported of one tenant. All but `num_running` only grow."""

    num_running: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    #: by the code of the refusal
    refusals: dict[str, int] = {}


class TenantAccount:
    """One tenant at this router."""

    def __init__(self, tenant: Tenant, num_routers: int, now: float) -> None:
        self._num_routers = num_routers
        self._mean_s = 0.0
        self._bucket: TokenBucket | None = None
        self.figures = TenantFigures()
        self.configure(tenant, now)

    def configure(self, tenant: Tenant, now: float) -> None:
        """Other limits, from now on."""
        self.tenant = tenant
        if tenant.tokens_per_minute is None:
            self._bucket = None
            return
        per_minute = tenant.tokens_per_minute / self._num_routers
        if self._bucket is None:
            self._bucket = TokenBucket(per_minute, now)
        else:
            self._bucket.configure(per_minute, now)

    @property
    def may_enter(self) -> bool:
        """Whether `enter` would let a request in."""
        limit = self.tenant.max_concurrent_requests
        return limit is None or self.figures.num_running < -(-limit // self._num_routers)

    def enter(self, now: float) -> Visit:
        """Let a request in. Raises TenantConcurrencyError."""
        limit = self.tenant.max_concurrent_requests
        running = self.figures.num_running
        if limit is not None and running >= (share := -(-limit // self._num_routers)):
            raise TenantConcurrencyError(
                f"The tenant {self.tenant.name!r} has {running} requests under way{self._here}; allowed: {share}"
                + (f" ({limit} over {self._num_routers} routers)." if self._num_routers > 1 else "."),
                # that many of them end in the mean time of one
                self._mean_s / running,
            )
        self.figures.num_running += 1
        self.figures.num_requests += 1
        return Visit(self, now)

    def charge(self, num_tokens: int, now: float) -> None:
        """A prompt wants to come in. Raises TenantTokensError, and then nothing is charged."""
        if self._bucket is None:
            return
        if (wait_s := self._bucket.wait_s(num_tokens, now)) > _NO_TIME_S:
            level, per_minute = self._bucket.level(now), self._bucket.per_minute
            whole = self.tenant.tokens_per_minute
            raise TenantTokensError(
                f"The prompt has {num_tokens} tokens, and of its tokens a minute the tenant {self.tenant.name!r} has "
                f"{max(0, int(level))} left{self._here}; allowed: {per_minute:.15g}"
                + (f" ({whole:.15g} over {self._num_routers} routers)." if self._num_routers > 1 else "."),
                wait_s,
            )
        self._bucket.take(num_tokens, now)

    def take(self, num_tokens: int, now: float) -> None:
        """Used, or given back if negative."""
        if self._bucket is not None:
            self._bucket.take(num_tokens, now)

    def left(self, duration_s: float) -> None:
        """A request that was let in has ended."""
        self.figures.num_running -= 1
        self._mean_s += (duration_s - self._mean_s) * (_NEWEST if self._mean_s else 1.0)

    def rate_headers(self, now: float) -> dict[str, str]:
        """OpenAI's names, for the tenant's whole limit: what is left is what would be if it stood the same at all
        routers. Nothing without a limit. (Its figures of requests are requests a minute, which are not limited here.)
        """
        whole, bucket = self.tenant.tokens_per_minute, self._bucket
        if whole is None or bucket is None:
            return {}
        level = bucket.level(now)
        return {
            "x-ratelimit-limit-tokens": f"{whole:.15g}",
            "x-ratelimit-remaining-tokens": str(max(0, int(level * self._num_routers))),
            "x-ratelimit-reset-tokens": f"{(bucket.per_minute - level) * 60 / bucket.per_minute:.3f}s",
        }

    def refused(self, code: str) -> None:
        refusals = self.figures.refusals
        refusals[code] = refusals.get(code, 0) + 1

    @property
    def _here(self) -> str:
        return " at this router" if self._num_routers > 1 else ""


class Visit:
    """One request between the tenant's door and its end, whichever end that is."""

    __slots__ = ("_account", "_charged", "_entered_at", "_has_ended", "_is_accepted")

    def __init__(self, account: TenantAccount, now: float) -> None:
        self._account = account
        self._entered_at = now
        self._charged = 0
        self._is_accepted = False
        self._has_ended = False

    @property
    def tenant(self) -> Tenant:
        """As it is now."""
        return self._account.tenant

    def charge_prompt(self, num_tokens: int, now: float) -> None:
        """The whole prompt, cached or not: nobody knows that yet. Raises TenantTokensError."""
        self._account.charge(num_tokens, now)
        self._charged = num_tokens

    def accepted(self, num_prompt_tokens: int) -> None:
        """A replica took it: the prompt is not given back any more."""
        self._is_accepted = True
        self._account.figures.num_prompt_tokens += num_prompt_tokens

    def generated(self, num_tokens: int, now: float) -> None:
        """Output came."""
        self._account.figures.num_generated_tokens += num_tokens
        self._account.take(num_tokens, now)

    def refused(self, code: str) -> None:
        self._account.refused(code)

    def end(self, now: float) -> None:
        """Takes effect once. What no replica took costs no tokens."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._is_accepted and self._charged:
            self._account.take(-self._charged, now)
        self._account.left(now - self._entered_at)
