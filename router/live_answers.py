"""ASYNC. What a router tells of its requests to who asks: what it remembers, joined with what replicas say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from replica.messages import ReplicaId, RequestId, RouterId
from router.pairing import PairingDispatcher
from router.questions import Answers, Questions
from router.replica_client import ReplicaClient
from router.why import explain, living, num_living


class LiveAnswers:
    """`clients`: the links to replicas, as they come and go."""

    def __init__(
        self,
        dispatcher: PairingDispatcher,
        router_id: RouterId,
        clients: Mapping[ReplicaId, ReplicaClient],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._router_id = router_id
        self._clients = clients
        self._clock = clock
        self._wall_clock = wall_clock
        self.questions = Questions(lambda replica_id, message: clients[replica_id].send(message))

    async def explain(self, name: str, timeout_s: float) -> dict[str, object] | None:
        """As `router.backend.Backend`."""
        entry, namesakes = self._dispatcher.journal.of(RequestId(name)), self._dispatcher.journal.under(name)
        if entry is None and namesakes:
            entry = namesakes[0]
        request_id = RequestId(name) if entry is None else entry.request_id
        answers = await self._ask(request_id, 0, timeout_s)
        accounts = {replica_id: answer.accounts for replica_id, answer in answers.items()}
        told = explain(entry, accounts, self._clock(), self._wall_clock())
        if told is None:
            return None
        others = [other.request_id for other in namesakes if other is not entry]
        return {"request_id": request_id, "same_x_request_id": others, **self._who_answered(answers), **told}

    async def living(self, limit: int, timeout_s: float) -> dict[str, object]:
        """As `router.backend.Backend`."""
        answers = await self._ask("", limit, timeout_s)
        entries = list(self._dispatcher.journal.living())
        accounts = {replica_id: answer.accounts for replica_id, answer in answers.items()}
        counts = {replica_id: answer.num_requests for replica_id, answer in answers.items()}
        return {
            **self._who_answered(answers),
            "num_requests": num_living(entries, counts),
            "requests": living(entries, accounts, self._router_id, self._clock(), limit),
        }

    async def _ask(self, request_id: str, limit: int, timeout_s: float) -> Answers:
        return await self.questions.ask(self._connected(), request_id, limit, timeout_s)

    def _connected(self) -> list[ReplicaId]:
        return [r for r, view in self._dispatcher.all_views.items() if view.is_connected and r in self._clients]

    def _who_answered(self, answers: Answers) -> dict[str, object]:
        return {"router_id": self._router_id, "silent_replicas": [r for r in self._connected() if r not in answers]}
