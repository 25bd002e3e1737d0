"""What goes wrong with prompts that are handed over, at each step of it: `kill -9` of whoever takes part, and a link
that is cut. As in `kv_faults.py`, the moment is seen: somebody is stopped, so that nothing gets beyond it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.kv_faults import Missed, NotHere, kill
from benchmarks.link_cut import NoLink, cut
from benchmarks.pd_live import ASKED, CONTINUED, PLACED, PdWorld, Places
from replica.kv_messages import KV_LEASE_S

Hold = Callable[[PdWorld, Places], Awaitable[bool]]
#: a replica that is silent longer is silent for its router too
WITHIN_S = 2.5


def _of(told: list[dict[str, Any]], places: Places, name: str) -> tuple[float, float]:
    """A counter of P and of the decode replica on the other node; 0: it is not up."""
    prefill = [one["counters"][name] for one in told if one["role"] == "prefill"]
    decode = [one["counters"][name] for one in told if one["replica_id"] == places.decode_id]
    return sum(prefill), sum(decode)


async def _seat_asked(world: PdWorld, places: Places) -> bool:
    """D does not answer."""
    os.kill(places.decode, signal.SIGSTOP)
    began = time.time()
    return await world.until_journal(
        lambda one: one.step == ASKED and one.decode_id == places.decode_id and one.at > began, WITHIN_S
    )


async def _seated(world: PdWorld, places: Places) -> bool:
    """D has its seat, P was asked and does not hear it."""
    os.kill(places.prefill, signal.SIGSTOP)
    began = time.time()
    return await world.until_journal(lambda one: one.step == PLACED and one.at > began, WITHIN_S)


async def _prefilling(world: PdWorld, places: Places) -> bool:
    """P has begun, and does not end."""

    def computes(told: list[dict[str, Any]]) -> bool:
        return any(one["role"] == "prefill" and one["running"] > 0 for one in told)

    if not await world.until(computes, WITHIN_S):
        return False
    os.kill(places.prefill, signal.SIGSTOP)
    began = time.time()
    has_one = await world.until_journal(lambda one: one.step == PLACED and one.at < began, WITHIN_S)
    return has_one and computes(await world.status())


async def _on_the_way(world: PdWorld, places: Places) -> bool:
    """P has offered blocks that its connector does not take, and D waits for them."""
    os.kill(places.prefill_connector, signal.SIGSTOP)

    def are(told: list[dict[str, Any]]) -> bool:
        return _of(told, places, "kv_storing")[0] > 0 and _of(told, places, "kv_awaited")[1] > 0

    return await world.until(are, WITHIN_S)


async def _continued(world: PdWorld, places: Places) -> bool:
    """D has the first token, and no blocks: its connector fetches nothing."""
    os.kill(places.decode_connector, signal.SIGSTOP)
    began = time.time()
    return await world.until_journal(
        lambda one: one.step == CONTINUED and one.decode_id == places.decode_id and one.at > began, WITHIN_S
    ) and await world.until(lambda told: _of(told, places, "kv_awaited")[1] > 0, WITHIN_S)


#: moment -> how it is reached, and who then stands still
MOMENTS: dict[str, tuple[Hold, str]] = {
    "seat_asked": (_seat_asked, "decode"),
    "seated": (_seated, "prefill"),
    "prefilling": (_prefilling, "prefill"),
    "on_the_way": (_on_the_way, "prefill_connector"),
    "continued": (_continued, "decode_connector"),
}
VICTIMS = ("prefill", "decode", "prefill_connector", "decode_connector")


async def _go_on(world: PdWorld) -> None:
    """What a fault leaves has to be good for hand-overs again."""
    await world.until_whole()
    await world.until_handed_over()


def _killed(victim: str, moment: str) -> Callable[[PdWorld], Awaitable[None]]:
    reach, whose = MOMENTS[moment]

    async def fault(world: PdWorld) -> None:
        for _ in range(5):
            places = await world.places()
            held = getattr(places, whose)
            if await reach(world, places):
                await kill(world, getattr(places, victim))
                if victim != whose:
                    os.kill(held, signal.SIGCONT)
                return await _go_on(world)
            os.kill(held, signal.SIGCONT)
            await asyncio.sleep(world.rng.uniform(0.3, 1.0))
        raise Missed("nobody was there, five times")

    return fault


async def _in_vain(world: PdWorld, places: Places, seconds: float) -> None:
    """For so long; somebody has to wait for blocks that do not come."""
    end = time.monotonic() + seconds
    before = _of(await world.status(), places, "kv_failed_loads")[1]
    was_in_vain = await world.until(lambda told: _of(told, places, "kv_failed_loads")[1] > before, seconds)
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    if not was_in_vain:
        raise Missed("nobody waited in vain")


def _link_cut(seconds: float) -> Callable[[PdWorld], Awaitable[None]]:
    async def fault(world: PdWorld) -> None:
        places = await world.places()
        try:
            with cut(places.prefill_connector, places.decode_connector):
                await _in_vain(world, places, seconds)
        except NoLink as error:
            raise NotHere(str(error)) from error
        await _go_on(world)

    return fault


def _frozen(whose: str, seconds: float) -> Callable[[PdWorld], Awaitable[None]]:
    async def fault(world: PdWorld) -> None:
        places = await world.places()
        pid = getattr(places, whose)
        os.kill(pid, signal.SIGSTOP)
        try:
            await _in_vain(world, places, seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        await _go_on(world)

    return fault


PD_FAULTS = {f"{victim}_killed_{moment}": _killed(victim, moment) for moment in MOMENTS for victim in VICTIMS}
PD_FAULTS |= {
    "link_cut_5_s": _link_cut(5.0),
    "link_cut_beyond_lease": _link_cut(KV_LEASE_S + 2.0),
    "prefill_connector_frozen_beyond_lease": _frozen("prefill_connector", KV_LEASE_S + 2.0),
    "decode_connector_frozen_beyond_lease": _frozen("decode_connector", KV_LEASE_S + 2.0),
}
#: what fits a minute
PD_SHORT = (
    "prefill_killed_prefilling",
    "decode_killed_continued",
    "prefill_connector_killed_on_the_way",
    "link_cut_5_s",
)
