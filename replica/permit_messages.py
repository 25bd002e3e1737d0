"""PURE. Part of the contract: how routers and a replica agree on places in its queue (`replica/permits.py`)."""

from __future__ import annotations

import msgspec

from replica.stages import WireRecord


class Permit(WireRecord, frozen=True):
    """For as many places as a request has sequences: with them the router has parted with `used` of its term."""

    term: int
    used: int


class Wish(WireRecord, frozen=True):
    """A request that a router holds: it needs so many places at once. The smaller `value` comes first."""

    num_sequences: int
    value: float


class Ask(msgspec.Struct, frozen=True, tag="ask", gc=False):
    """Router to replica, of one tenant: of the permits of `term` the router has parted with `used`, and these requests
    wait for places, in place of what the ask before said (`replica/permits.py`).
    """

    number: int
    term: int
    used: int
    wishes: list[Wish] = []
    tenant: str = ""
    tenant_weight: float = 1.0


class Grant(msgspec.Struct, frozen=True, tag="grant", gc=False):
    """Replica to router: places are reserved for a tenant, `granted` in all since `term` began."""

    term: int
    granted: int
    tenant: str = ""
