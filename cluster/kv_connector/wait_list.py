"""PURE. Leases that wait for a block that nobody has yet, by its hash."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kv_connector.holders import Lease


class WaitList:
    """Each lease waits for the hash behind its last block. Does not know why a hash may be there now."""

    def __init__(self) -> None:
        self._next: dict[Lease, bytes] = {}
        self._leases: dict[bytes, dict[Lease, None]] = {}
        #: hashes of which something has changed
        self._noted: dict[bytes, None] = {}
        #: those that are looked at now
        self._due: list[Lease] = []

    def __len__(self) -> int:
        return len(self._next)

    def all(self) -> list[Lease]:
        return list(self._next)

    def watch(self, lease: Lease) -> None:
        """From now on it waits for what is its next hash by now, if there is one."""
        old = self._next.pop(lease, None)
        if old is not None:
            leases = self._leases[old]
            del leases[lease]
            if not leases:
                del self._leases[old]
        if lease.num_hoped:
            block_hash = lease.hashes[len(lease.blocks)]
            self._next[lease] = block_hash
            self._leases.setdefault(block_hash, {})[lease] = None

    def note(self, block_hash: bytes) -> None:
        """Where it can be had changes now, or has changed."""
        if block_hash in self._leases:
            self._noted[block_hash] = None

    def pop(self) -> Lease | None:
        """The next that is to be looked at again; None: nobody."""
        while True:
            while self._due:
                lease = self._due.pop()
                if lease in self._next:
                    return lease
            if not self._noted:
                return None
            block_hash = next(iter(self._noted))
            del self._noted[block_hash]
            self._due = list(self._leases.get(block_hash, ()))

    def validate(self, leases: Sequence[Lease]) -> None:
        """Raises AssertionError."""
        hoping = {lease: lease.hashes[len(lease.blocks)] for lease in leases if lease.num_hoped}
        assert hoping == self._next, "who waits for a hash is not clear"
        assert hoping == {one: h for h, of_hash in self._leases.items() for one in of_hash}, (
            "both books of waits differ"
        )
