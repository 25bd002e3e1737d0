"""PURE. Places of a queue by tenant: to whom the next one goes, and who has to make way for it.

The next place goes to the waiting tenant that has the fewest for its weight. A full queue is not the property of
whoever filled it: a tenant takes the place of another's last request if the other has at least as many for its weight
afterwards. So the exchange is never undone, and a tenant alone may have them all.
"""

from __future__ import annotations

from collections.abc import Mapping


class Places:
    """How many of the places each tenant has."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def take(self, tenant: str, num_sequences: int) -> None:
        """`tenant` gets so many more (less, if negative)."""
        self._counts[tenant] = self._counts.get(tenant, 0) + num_sequences

    def has_others(self, tenant: str) -> bool:
        """Somebody else has places."""
        return any(count and name != tenant for name, count in self._counts.items())

    def share(self, tenant: str, weight: float, num_more: int = 0) -> float:
        """Its places for its weight, with `num_more` of them."""
        return (self._counts.get(tenant, 0) + num_more) / weight
