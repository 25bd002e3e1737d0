"""Slabs by NIXL on CPUs, where the package is installed."""

from __future__ import annotations

import pytest

from cluster.kv_connector.nixl_transport import NIXL, NixlEnd, NixlTransport
from tests.cluster.test_kv_tcp import NUM_SLOTS, Source, Taker, content, giving, name_of

pytest.importorskip("nixl._api", reason="nixl is not installed: its transport is not verified here")
pytestmark = pytest.mark.anyio


async def test_slabs_arrive() -> None:
    source, taker = Source(60), Taker()
    async with giving(source) as (giver, peer, arena):
        end = NixlEnd(giver._identity, arena.map, source)
        giver.others[NIXL] = end.serve
        mine = NixlEnd(taker.transport._identity, taker.arena.map)
        transport = NixlTransport(mine)
        for numbers in ([3, 61, 5], list(range(NUM_SLOTS))):
            slots = list(reversed(range(len(numbers))))
            arrived = await transport.fetch(peer, [name_of(number) for number in numbers], slots, 20.0)
            assert arrived == [number < 60 for number in numbers]
            for number, slot in zip(numbers, slots, strict=True):
                assert number >= 60 or bytes(taker.arena.slab(slot)) == content(number)
        source.may_answer.clear()
        assert await transport.fetch(peer, [name_of(1)], [0], 0.05) == [False]
        source.may_answer.set()
        assert await transport.fetch(peer, [name_of(1)], [0], 20.0) == [True]
        await transport.close()
        mine.close()
        await giver.close()
        end.close()
    await taker.transport.close()
    await taker.arena.close()
