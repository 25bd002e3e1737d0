"""ASYNC. Experimental: slabs by NIXL, which reads the other connector's arena itself (RDMA, or UCX over TCP and shared
memory). Needs the package `nixl`; its import loads torch.

The giver is asked over TCP as for slabs (`tcp_wire`: token, space, incarnation); it leases, says slots and checksums,
and holds the lease until it hears that the reading is done, or the connection ends.

Tried here with nixl 1.5.1 on CPUs, two agents in one process (UCX); not on RDMA, not on a GPU's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import socket
import time
from typing import Any

import msgspec
import xxhash

from cluster.kv_connector.tcp_socket import Identity, connect, read_frame, write_frame
from cluster.kv_connector.tcp_wire import MAX_WANT_BYTES, PeerError, Want, decode_want, encode
from cluster.kv_connector.transport import PeerAddress, SlabSource
from replica.arena_map import ArenaMap
from replica.errors import ConfigError
from replica.kv_messages import KVPeer

NIXL = "nixl"
CONNECT_S = 2.0
#: between two looks whether a reading is done
_POLL_S = 0.0005
logger = logging.getLogger(__name__)


class Offer(msgspec.Struct, frozen=True):
    """Of the giver, at first: NIXL's own description of it, and where its arena is."""

    metadata: bytes
    address: int
    slot_bytes: int


class Leased(msgspec.Struct, frozen=True):
    """Slots (-1: not there) and the xxh3 of their slabs. Until the next frame, whatever it is."""

    slots: list[int]
    digests: list[int]


_decode_offer = msgspec.msgpack.Decoder(Offer).decode
_decode_leased = msgspec.msgpack.Decoder(Leased).decode


class NixlEnd:
    """This connector's agent, with its arena registered. Raises ConfigError without NIXL. Blocking, for a thread."""

    def __init__(self, identity: Identity, arena: ArenaMap, source: SlabSource | None = None) -> None:
        try:
            api: Any = importlib.import_module("nixl._api")
            name = f"{identity.me.peer_id}-{identity.me.incarnation}"
            self.agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # its own errors, and those of its libraries
            raise ConfigError(f"kv_cache.transport: 'nixl' does not work here: {error}; allowed is 'tcp'") from None
        self.identity = identity
        self.arena = arena
        self._source = source
        self._registered = self.agent.register_memory([(arena.address, arena.num_bytes, 0, "")], "DRAM")
        self._offer = Offer(self.agent.get_agent_metadata(), arena.address, arena.slot_bytes)

    async def serve(self, link: socket.socket, reader: KVPeer) -> None:
        """A giver's end: put it into `TcpGiver.others`. Ends with PeerError."""
        assert self._source is not None, "this end only takes"
        await write_frame(link, encode(self._offer))
        frame = await read_frame(link, MAX_WANT_BYTES)
        while True:
            want = decode_want(frame)
            within_s = min(max(want.within_s, 0.0), 600.0)
            lease = await self._source.lease_for_peer(reader, want.hashes, within_s, want.generation)
            try:
                digests = await asyncio.to_thread(self.digests, lease.slots)
                await write_frame(link, encode(Leased(lease.slots, digests)))
                await read_frame(link, MAX_WANT_BYTES)  # it has read them
            finally:
                self._source.release_of_peer(lease)
            frame = await read_frame(link, MAX_WANT_BYTES)

    def digests(self, slots: list[int]) -> list[int]:
        """Of their slabs; 0 for -1."""
        slab = functools.partial(self.arena.slab, num_bytes=self.identity.slab_bytes)
        return [0 if slot < 0 else xxhash.xxh3_64_intdigest(slab(slot)) for slot in slots]

    def close(self) -> None:
        """The arena may be closed then."""
        self.agent.deregister_memory(self._registered)


class NixlTransport:
    """`Transport` over NIXL; one fetch at a time for each peer."""

    def __init__(self, end: NixlEnd) -> None:
        self._end = end
        self._links: dict[PeerAddress, tuple[socket.socket, Offer, str]] = {}
        self._locks: dict[PeerAddress, asyncio.Lock] = {}
        self._running: set[asyncio.Task[list[bool]]] = set()

    async def fetch(
        self, peer: PeerAddress, hashes: list[bytes], slots: list[int], within_s: float, generation: int = 0
    ) -> list[bool]:
        """See `Transport`. Returns late if NIXL cannot give up a reading: it still writes into the slots."""
        task = asyncio.create_task(self._fetch(peer, hashes, slots, time.monotonic() + within_s, generation))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def close(self) -> None:
        """Idempotent."""
        if self._running:
            await asyncio.wait(list(self._running))
        for link, _, _ in self._links.values():
            link.close()
        self._links.clear()

    async def _fetch(
        self, peer: PeerAddress, hashes: list[bytes], slots: list[int], deadline: float, generation: int
    ) -> list[bool]:
        missing = [False] * len(hashes)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._locks.setdefault(peer, asyncio.Lock()).acquire()
        except TimeoutError:
            return missing
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                link, offer, agent = await self._connected(peer)
                await write_frame(link, encode(Want(0, hashes, max(0.0, deadline - time.monotonic()), generation)))
                leased = _decode_leased(await read_frame(link, MAX_WANT_BYTES))
            if len(leased.slots) != len(hashes) or len(leased.digests) != len(hashes):
                raise PeerError("it answered for other blocks than were asked for")
            there = [number for number, slot in enumerate(leased.slots) if slot >= 0]
            if there and not await self._read(agent, offer, [(slots[n], leased.slots[n]) for n in there], deadline):
                raise PeerError("NIXL could not read its arena in time")
            await write_frame(link, b"")
            digests = await asyncio.to_thread(self._end.digests, [slots[number] for number in there])
            for number, digest in zip(there, digests, strict=True):
                missing[number] = digest == leased.digests[number]
        except (PeerError, TimeoutError, msgspec.DecodeError) as error:
            logger.warning("KV of connector %s by NIXL: %s", peer.peer.peer_id, error or "no answer in time")
            self._drop(peer)
        finally:
            self._locks[peer].release()
        return missing

    async def _connected(self, peer: PeerAddress) -> tuple[socket.socket, Offer, str]:
        if peer not in self._links:
            link = await connect(peer, self._end.identity, CONNECT_S, wants=NIXL)
            try:
                offer = _decode_offer(await read_frame(link, MAX_WANT_BYTES))
                agent = self._end.agent.add_remote_agent(offer.metadata)
            except BaseException:
                link.close()
                raise
            self._links[peer] = link, offer, agent.decode() if isinstance(agent, bytes) else agent
        return self._links[peer]

    def _drop(self, peer: PeerAddress) -> None:
        if peer in self._links:
            link, _, agent = self._links.pop(peer)
            link.close()
            with contextlib.suppress(Exception):  # it may be gone already; NIXL's errors have no common class
                self._end.agent.remove_remote_agent(agent)

    async def _read(self, agent: str, offer: Offer, pairs: list[tuple[int, int]], deadline: float) -> bool:
        """Ours, theirs. When it returns, nothing is written any more."""
        nixl, size, mine = self._end.agent, self._end.identity.slab_bytes, self._end.arena
        ours = nixl.get_xfer_descs([(mine.address + to * mine.slot_bytes, size, 0) for to, _ in pairs], "DRAM")
        theirs = nixl.get_xfer_descs([(offer.address + it * offer.slot_bytes, size, 0) for _, it in pairs], "DRAM")
        handle = nixl.initialize_xfer("READ", ours, theirs, agent)
        state = nixl.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                with contextlib.suppress(Exception):  # cannot be given up: waited for
                    nixl.release_xfer_handle(handle)
                    return False
            await asyncio.sleep(_POLL_S)
            state = nixl.check_xfer_state(handle)
        nixl.release_xfer_handle(handle)
        return bool(state == "DONE")
