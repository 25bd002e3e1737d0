"""PURE. What its tenant makes of a request: the priority that it may have, and whose it is to a replica."""

from __future__ import annotations

import msgspec

from replica.errors import InvalidRequestError
from router.openai_api import PRIORITIES, ChatOrCompletion
from router.prepare import PreparedRequest
from router.tenants import Tenant

#: no priority is smaller
MOST_URGENT = -PRIORITIES


def priority_of(request: ChatOrCompletion, tenant: Tenant, policy: str) -> int:
    """What the request is sorted by. One that names none gets 0, or the nearest that its tenant may have; where
    priorities are not looked at there is nothing to hold it to.

    Raises InvalidRequestError for one outside of the tenant's range.
    """
    if tenant.priority is None or policy != "priority":
        return request.priority
    low, high = tenant.priority
    if "priority" not in request.model_fields_set:
        return min(max(request.priority, low), high)
    if not low <= request.priority <= high:
        raise InvalidRequestError(
            f"priority is {request.priority}; allowed for the tenant {tenant.name!r}: {low} to {high}.", "priority"
        )
    return request.priority


def most_urgent(tenant: Tenant, policy: str) -> int:
    """No request of the tenant can be more urgent."""
    if policy != "priority":
        return 0
    return MOST_URGENT if tenant.priority is None else tenant.priority[0]


def for_tenant(prepared: PreparedRequest, tenant: Tenant, priority: int) -> PreparedRequest:
    """The same as this tenant's request, which is sorted by `priority`."""
    turn, _, arrived_s = prepared.generate.order_key
    generate = msgspec.structs.replace(
        prepared.generate,
        order_key=(turn, priority, arrived_s),
        tenant=tenant.name,
        tenant_weight=tenant.weight,
    )
    return msgspec.structs.replace(prepared, generate=generate)
