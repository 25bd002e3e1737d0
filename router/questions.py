"""ASYNC. Asks every replica what it knows of a request, or which sequences have been there longest."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable

from replica.messages import Explain, Explained, ReplicaId

#: what each replica said; those missing did not answer in time
Answers = dict[ReplicaId, Explained]


class _Pending:
    """One question under way."""

    def __init__(self, replica_ids: Iterable[ReplicaId]) -> None:
        self.waiting_for = set(replica_ids)
        self.answers: Answers = {}
        self.done = asyncio.Event()
        self.check()

    def check(self) -> None:
        if not self.waiting_for:
            self.done.set()


class Questions:
    """Questions under way. `send` takes a message to one replica. A replica that is gone or silent costs the asker its
    time-out and nobody anything else.
    """

    def __init__(self, send: Callable[[ReplicaId, Explain], None]) -> None:
        self._send = send
        self._pending: dict[str, _Pending] = {}

    async def ask(self, replica_ids: Iterable[ReplicaId], request_id: str, limit: int, timeout_s: float) -> Answers:
        """What came within `timeout_s`."""
        question, pending = Explain(uuid.uuid4().hex, request_id, limit), _Pending(replica_ids)
        self._pending[question.question_id] = pending
        try:
            for replica_id in list(pending.waiting_for):
                self._send(replica_id, question)
            async with asyncio.timeout(timeout_s):
                await pending.done.wait()
        except TimeoutError:
            pass
        finally:
            del self._pending[question.question_id]
        return pending.answers

    def answered(self, replica_id: ReplicaId, answer: Explained) -> None:
        """Answers to forgotten questions change nothing."""
        pending = self._pending.get(answer.question_id)
        if pending is not None and replica_id in pending.waiting_for:
            pending.answers[replica_id] = answer
            self._leave(pending, replica_id)

    def gone(self, replica_id: ReplicaId) -> None:
        """It will not answer."""
        for pending in self._pending.values():
            self._leave(pending, replica_id)

    def _leave(self, pending: _Pending, replica_id: ReplicaId) -> None:
        pending.waiting_for.discard(replica_id)
        pending.check()
