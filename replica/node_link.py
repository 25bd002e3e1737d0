"""ASYNC. The engine's seam to the connector of its node (`KVLink` in `kv_events.py`), over the Unix socket
(`kv_link.py`).

The engine's own process maps nothing: ranks open the arena themselves, at the place that a plan tells them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from replica.arena_map import ArenaMap
from replica.kv_events import KVEvents
from replica.kv_link import KVLink, KVLinkHandler
from replica.kv_messages import ArenaPlace, FromConnector, Hello, KVPeer, KVSpace, ToConnector, Welcome

logger = logging.getLogger(__name__)
#: the name of the socket for this space. Raises OSError while there is none
FindDoor = Callable[[KVSpace], Awaitable[str]]


class NodeLink(KVLinkHandler):
    """Of one replica; `holder` is who it is to the connector."""

    def __init__(self, holder: KVPeer, find: FindDoor) -> None:
        self._holder, self._find_door = holder, find
        self._link: KVLink | None = None
        self._events: KVEvents | None = None
        self._space: KVSpace | None = None
        self._door = ""
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_connected

    def start(self, space: KVSpace, events: KVEvents) -> None:
        """See `replica.kv_events.KVLink`."""
        self._space, self._events = space, events
        self._link = KVLink(Hello(self._holder, "engine", space), self._find, self)
        self._link.start()

    def send(self, message: ToConnector) -> object:
        """See `replica.kv_events.KVLink`."""
        return self._link is not None and self._link.send(message)

    async def close(self) -> None:
        """See `replica.kv_events.KVLink`."""
        self._is_closed = True
        if self._link is not None:
            await self._link.close()

    async def _find(self) -> str:
        assert self._space is not None, "start() first"
        self._door = await self._find_door(self._space)
        return self._door

    # ---- told by the link ----

    def on_connected(self, welcome: Welcome, arena: ArenaMap) -> None:
        """See `KVLinkHandler`."""
        arena.close()
        assert self._space is not None, "start() first"
        assert self._events is not None, "start() first"
        logger.info(
            "connected to KV connector %s: %d slots of %d bytes",
            welcome.connector.peer_id, welcome.num_slots, welcome.slot_bytes,
        )  # fmt: skip
        connector = welcome.connector
        place = ArenaPlace(self._door, self._holder, self._space, connector.incarnation, connector.peer_id)
        if not self._is_closed:
            self._events.on_connected(place, welcome.lease_s)

    def on_message(self, message: FromConnector) -> None:
        """See `KVLinkHandler`."""
        if self._events is not None and not self._is_closed:
            self._events.on_message(message)

    def on_lost(self, reason: str) -> None:
        """See `KVLinkHandler`."""
        logger.warning("the KV connector is gone (%s): KV that is not in the pool is computed", reason)
        if self._events is not None and not self._is_closed:
            self._events.on_gone()

    def on_refused(self, message: str) -> None:
        """See `KVLinkHandler`."""
        logger.error("the KV connector of this node does not want this replica: %s", message)
