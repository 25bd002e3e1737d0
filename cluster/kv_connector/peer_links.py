"""ASYNC. A connector and those of other nodes: whom it hears, what it takes from them, what it gives them.

To the core another connector is a holder like any: while it reads slabs of ours it has a lease, and beats.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable
from typing import Protocol

import msgspec

from cluster.kv_connector.arena import Arena
from cluster.kv_connector.core import ConnectorCore
from cluster.kv_connector.instructions import Fetch, Instruction, MemberId
from cluster.kv_connector.tcp_giver import TcpGiver
from cluster.kv_connector.tcp_socket import Identity
from cluster.kv_connector.tcp_transport import FetchStats, TcpTransport
from cluster.kv_connector.tcp_wire import PeerError
from cluster.kv_connector.transport import PeerAddress, ReadLease
from replica.kv_messages import (
    Acquire,
    Acquired,
    Beat,
    FromConnector,
    Hello,
    KVPeer,
    KVSpace,
    KVTier,
    Release,
    TierEvent,
    ToConnector,
)

#: between two attempts to hear a peer
AGAIN_S = 1.0
logger = logging.getLogger(__name__)


class Node(Protocol):
    """What the connector is to this."""

    core: ConnectorCore
    arena: Arena
    space: KVSpace
    identity: KVPeer

    @property
    def now(self) -> float: ...
    def act(self, told: list[Instruction]) -> None: ...
    def join(self, hello: Hello, hear: _Hear, *, is_peer: bool = True) -> MemberId | None: ...
    def say(self, number: MemberId, message: ToConnector) -> None: ...
    def leave(self, number: MemberId) -> None: ...


class _Hear(Protocol):
    def __call__(self, message: FromConnector | None, /) -> object: ...


class _Reader(msgspec.Struct):
    """A connector that reads of ours, as long as it does."""

    member: MemberId
    leases: set[int] = msgspec.field(default_factory=set)


class PeerLinks:
    """Silent until `listen`. Implements `SlabSource`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lease_ids = itertools.count(1)
        self._readers: dict[KVPeer, _Reader] = {}
        self._asked: dict[int, asyncio.Future[list[int]]] = {}
        self._giver: TcpGiver | None = None
        self._transport: TcpTransport | None = None
        #: the member that hears what this node has
        self._news: MemberId | None = None
        self._heard: dict[PeerAddress, asyncio.Task[None]] = {}
        self.address: PeerAddress | None = None
        self._is_closed = False

    @property
    def stats(self) -> FetchStats | None:
        """Of what was taken; None: there is nobody to take from."""
        return None if self._transport is None else self._transport.stats

    def listen(self, host: str, token: bytes, port: int = 0) -> PeerAddress:
        """From now on others may come, and this may go to them. `token`: of the cluster. Raises OSError."""
        if self.address is None:
            node = self._node
            identity = Identity(node.identity, node.space, node.space.block_bytes, token)
            self._giver = TcpGiver(host, identity, self, node.arena.slab, port=port)
            self._giver.generation = node.core.generation
            self._transport = TcpTransport(identity, node.arena.slab)
            self._join_news()
            self.address = PeerAddress(node.identity, host, self._giver.port)
        return self.address

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """All that there are now, whoever told it; the others are gone."""
        wanted = {one for one in peers if one.peer.peer_id != self._node.identity.peer_id}
        for gone in self._heard.keys() - wanted:
            self._heard.pop(gone).cancel()
        for fresh in wanted - self._heard.keys():
            self._heard[fresh] = asyncio.get_running_loop().create_task(self._hear(fresh))

    def resync(self, peer_id: str) -> None:
        """It is to tell everything anew."""
        for address in [one for one in self._heard if one.peer.peer_id == peer_id]:
            self._heard.pop(address).cancel()
            self._heard[address] = asyncio.get_running_loop().create_task(self._hear(address))

    async def fetch(self, order: Fetch) -> list[bool]:
        """See `Transport.fetch`."""
        address = next((one for one in self._heard if one.peer.peer_id == order.peer_id), None)
        if address is None or self._transport is None:
            return [False] * len(order.hashes)
        return await self._transport.fetch(address, order.hashes, order.slots, order.within_s, order.generation)

    def beat(self) -> None:
        """Those who stand for others here live as long as their connections do."""
        for reader in list(self._readers.values()):
            self._node.say(reader.member, Beat())
        if self._news is not None:
            self._node.say(self._news, Beat())

    async def close(self) -> None:
        """Idempotent. When it returns no thread reads or writes the arena."""
        self._is_closed = True
        tasks = list(self._heard.values())
        self._heard.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._giver is not None:
            await self._giver.close()
        if self._transport is not None:
            await self._transport.close()

    # ---- what this node gives: `SlabSource` ----

    async def lease_for_peer(
        self, reader: KVPeer, hashes: list[bytes], within_s: float, generation: int = 0
    ) -> ReadLease:
        """See `SlabSource`: the first of them that are here, up to one that is not."""
        self._node.act(self._node.core.on_generation(generation, self._node.now))
        found = self._readers.get(reader)
        if found is None:
            hello = Hello(reader, "connector", self._node.space, wants_events=False)
            member = self._node.join(hello, self._on_answer)
            if member is None:
                return ReadLease([-1] * len(hashes))
            found = self._readers[reader] = _Reader(member)
        lease_id = next(self._lease_ids)
        found.leases.add(lease_id)
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._asked[lease_id] = answer
        try:
            self._node.say(found.member, Acquire(lease_id, hashes, within_s))
            slots = await answer
        except BaseException:
            self._end_lease(lease_id)
            raise
        finally:
            self._asked.pop(lease_id, None)
        return ReadLease([*slots, *[-1] * (len(hashes) - len(slots))], lease_id)

    def release_of_peer(self, lease: ReadLease) -> None:
        """See `SlabSource`."""
        self._end_lease(lease.lease_id)

    def held_blocks(self) -> dict[KVTier, list[bytes]]:
        """See `SlabSource`. Whoever hears it has missed nothing: what has changed is told to the others before."""
        told, held = self._node.core.held(self._node.now)
        self._node.act(told)
        return held

    def _on_answer(self, message: FromConnector | None) -> None:
        if isinstance(message, Acquired):
            answer = self._asked.get(message.lease_id)
            if answer is not None and not answer.done():
                answer.set_result(message.slots)

    def _end_lease(self, lease_id: int) -> None:
        for peer, reader in list(self._readers.items()):
            if lease_id in reader.leases:
                reader.leases.discard(lease_id)
                self._node.say(reader.member, Release([lease_id]))
                if not reader.leases:  # nothing of ours is read by it: it may come again as somebody new
                    del self._readers[peer]
                    self._node.leave(reader.member)

    # ---- what this node has ----

    def _join_news(self) -> None:
        node = self._node
        news = KVPeer(f"news of {node.identity.peer_id}", node.identity.incarnation)
        self._news = node.join(Hello(news, "news", node.space), self._on_news)

    def _on_news(self, message: FromConnector | None) -> None:
        if isinstance(message, TierEvent) and self._giver is not None:
            self._giver.publish(message.stored, message.removed, message.is_cleared, message.generation)
        elif message is None and self._news is not None:  # it stood still for a lease: everybody hears all of it again
            asyncio.get_running_loop().call_soon(self._rejoin)

    def _rejoin(self) -> None:
        if self._news is not None and not self._is_closed:
            self._node.leave(self._news)
            self._join_news()
            if self._giver is not None:
                self._giver.publish(self.held_blocks(), [], True, self._node.core.generation)

    # ---- what others have ----

    async def _hear(self, address: PeerAddress) -> None:
        node, peer_id = self._node, address.peer.peer_id
        assert self._transport is not None, "listen() first"
        while True:
            node.act(node.core.on_peer(peer_id))
            try:
                async with contextlib.aclosing(self._transport.subscribe(address)) as events:  # type: ignore[type-var]
                    async for event in events:
                        node.act(node.core.on_peer_event(peer_id, event, node.now))
            except PeerError as error:
                logger.info("connector %s at %s:%d: %s", peer_id, address.host, address.port, error)
            finally:
                if not self._is_closed:
                    node.act(node.core.on_peer_gone(peer_id))
            await asyncio.sleep(AGAIN_S)
