"""PURE. The tenants of one router: who a key belongs to, what each has under way, and what becomes of both when the
tenants change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.tenant_limits import TenantAccount, TenantFigures, Visit
from router.tenants import DEFAULT_TENANT, Tenant, TenantBook


class TenantDesk:
    """Asked at each request; told when tenants change."""

    def __init__(
        self, tenants: Iterable[Tenant] = (), needs_keys: bool = False, num_routers: int = 1, now: float = 0.0
    ) -> None:
        """Raises ConfigError when two tenants have the same key. `num_routers`: they share the limits."""
        self._num_routers = num_routers
        self._needs_keys = needs_keys
        #: also of tenants that are gone while something of theirs runs
        self._accounts: dict[str, TenantAccount] = {}
        #: False: the tenants' file cannot be used, and what it said before counts
        self.is_file_good = True
        self.num_bad_files = 0
        self.exchange(tenants, now)

    def exchange(self, tenants: Iterable[Tenant], now: float) -> None:
        """Other tenants, as a whole. What runs goes on and counts where it began. Raises ConfigError, and then nothing
        has changed.
        """
        self._book = TenantBook(tenants, self._needs_keys)
        for name, tenant in self._book.by_name.items():
            if (account := self._accounts.get(name)) is not None:
                account.configure(tenant, now)
            else:
                self._accounts[name] = TenantAccount(tenant, self._num_routers, now)
        self._forget_gone()

    @property
    def names(self) -> list[str]:
        return list(self._book.by_name)

    def name_of(self, authorization: bytes | None) -> str | None:
        """See `TenantBook.name_of`."""
        return self._book.name_of(authorization)

    def opens_everything(self, name: str) -> bool:
        """Whether this tenant may use what concerns all tenants: the operator's keys, and everybody where no key is
        needed.
        """
        return name == DEFAULT_TENANT or not self._needs_keys

    def tenant(self, name: str) -> Tenant | None:
        """None: it is gone since its key was looked at."""
        return self._book.by_name.get(name)

    def may_enter(self, name: str) -> bool:
        """Whether `enter` would let it in."""
        account = self._accounts.get(name)
        return account is not None and account.may_enter

    def enter(self, name: str, now: float) -> Visit:
        """Let in a request of a tenant that is there. Raises TenantConcurrencyError."""
        return self._accounts[name].enter(now)

    def rate_headers(self, name: str, now: float) -> dict[str, str]:
        """See `TenantAccount.rate_headers`."""
        account = self._accounts.get(name)
        return {} if account is None else account.rate_headers(now)

    def refused(self, name: str, code: str) -> None:
        """For the figures; it had not come in."""
        if (account := self._accounts.get(name)) is not None:
            account.refused(code)

    def figures(self) -> Mapping[str, TenantFigures]:
        """By tenant. Who was removed stays until all of its requests have ended."""
        self._forget_gone()
        return {name: account.figures for name, account in self._accounts.items()}

    def _forget_gone(self) -> None:
        for name in [name for name in self._accounts if name not in self._book.by_name]:
            if not self._accounts[name].figures.num_running:
                del self._accounts[name]
