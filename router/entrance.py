"""ASYNC. Requests begin one after the other, so that running streams do not wait for a crowd.

A server hands over whatever its sockets hold in one turn of the event loop. Sixty-four clients who were refused come
again together: at 0.3 ms each, tokens that arrive in that turn wait 20 ms behind them. Here at most `PER_TURN` of them
begin in a turn, and between two turns the loop looks at its sockets. Who has to wait is let in by tenants in rotation,
so that a crowd of one tenant does not keep others outside.

There is no deadline here: each turn lets somebody in, and who leaves is passed.
"""

from __future__ import annotations

import asyncio
from collections import deque

#: beginning is a refusal in a flood; one more costs streams 0.3 ms and saves nobody anything
PER_TURN = 1


class Entrance:
    """Of one event loop."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        #: of this turn of the loop, how many may still begin
        self._num_left = per_turn
        self._is_counting = False
        #: who waits, by tenant; the first tenant is the next
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        """Some may have left, and are passed when it is their turn."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, tenant: str) -> None:
        """Returns when it may begin: at once, if nobody else has in this turn."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._turn, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_left = self._per_turn
        while self._num_left and self._waiting:
            tenant = next(iter(self._waiting))
            of_tenant = self._waiting.pop(tenant)
            turn = of_tenant.popleft()
            if of_tenant:
                self._waiting[tenant] = of_tenant  # now the last of all tenants
            if not turn.done():
                turn.set_result(None)
                self._num_left -= 1
        self._is_counting = bool(self._waiting) or self._num_left < self._per_turn
        if self._is_counting:
            loop.call_soon(self._turn, loop)
