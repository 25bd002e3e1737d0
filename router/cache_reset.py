"""ASYNC. Asks every replica to empty its prefix cache, and waits until all have said that it is."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable

from replica.errors import DeadlineExceededError, NoReplicaError
from replica.messages import ReplicaId, ResetPrefixCache


class _Pending:
    """One question: who has yet to answer."""

    def __init__(self, replica_ids: Iterable[ReplicaId]) -> None:
        self.waiting_for = set(replica_ids)
        self.num_asked = len(self.waiting_for)
        self.done = asyncio.Event()

    def heard_of(self, replica_id: ReplicaId) -> None:
        self.waiting_for.discard(replica_id)
        if not self.waiting_for:
            self.done.set()


class CacheResets:
    """Questions under way. `send` takes a message to one replica."""

    def __init__(self, send: Callable[[ReplicaId, ResetPrefixCache], None]) -> None:
        self._send = send
        self._pending: dict[str, _Pending] = {}

    async def run(self, replica_ids: Iterable[ReplicaId], timeout_s: float) -> int:
        """Returns how many were asked, after all of them have answered. Raises `NoReplicaError`, or
        `DeadlineExceededError` that names who did not answer.
        """
        reset_id, pending = uuid.uuid4().hex, _Pending(replica_ids)
        if not pending.waiting_for:
            raise NoReplicaError("no replica is up, so there is no prefix cache to reset", 2.0)
        self._pending[reset_id] = pending
        try:
            for replica_id in list(pending.waiting_for):
                self._send(replica_id, ResetPrefixCache(reset_id))
            async with asyncio.timeout(timeout_s):
                await pending.done.wait()
        except TimeoutError:
            num_done = pending.num_asked - len(pending.waiting_for)
            raise DeadlineExceededError(
                f"{num_done} of {pending.num_asked} replicas reset their prefix cache within {timeout_s:g} s; "
                f"no answer from: {', '.join(sorted(pending.waiting_for))}"
            ) from None
        finally:
            del self._pending[reset_id]
        return pending.num_asked

    def answered(self, replica_id: ReplicaId, reset_id: str) -> None:
        """A replica's cache is empty. Answers to forgotten questions change nothing."""
        if reset_id in self._pending:
            self._pending[reset_id].heard_of(replica_id)

    def gone(self, replica_id: ReplicaId) -> None:
        """A replica left for good, and its cache with it."""
        for pending in self._pending.values():
            pending.heard_of(replica_id)
