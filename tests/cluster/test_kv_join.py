"""Engines and a connector, joined: real sockets, arenas, files and TCP, in one process and without Ray."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kv_engines import (
    SPACE,
    Door,
    ask,
    check,
    counters,
    engine,
    fake,
    forget,
    node,
    num_known,
    submit,
    until,
)
from replica.engine import Engine
from replica.kv_events import KV_LAYOUT
from replica.kv_messages import KVSpace, KVTier
from replica.messages import ReplicaId, ResetPrefixCache, RouterId, StepOutput, decode_up
from router.kv_tiers import KVTiers

pytestmark = pytest.mark.anyio
PROMPT = list(range(100, 170))
NUM_BLOCKS = 18  # of prompt and output: 75 of 76 tokens are computed


async def test_two_replicas_share_the_tier_of_their_node() -> None:
    async with node() as one, engine(one, "a") as first, engine(one, "b") as second:
        await ask(first, PROMPT)
        await until(lambda: num_known(second) == NUM_BLOCKS)
        await ask(second, PROMPT)
        assert counters(second)["kv_blocks_loaded"] == 17
        await until(lambda: one.core.stats(one.now).num_leased == 0)
        stats = one.core.stats(one.now)
        assert (stats.num_holders, stats.num_reserved, stats.num_stranded) == (2, 0, 0)
        assert stats.loads.given == {KVTier.HOST: 17}
    # whoever closed in good order leaves nothing


async def test_one_of_the_replicas_tells_what_the_node_counts() -> None:
    async with node() as one, engine(one, "a") as first, engine(one, "b") as second:
        await ask(first, PROMPT)
        await until(lambda: counters(first).get("tier_stored") == NUM_BLOCKS)
        assert "tier_stored" not in counters(second)
        told = counters(first)
        assert (told["tier_slots_host"], told["tier_blocks_host"], told["tier_stranded"]) == (128, NUM_BLOCKS, 0)


async def test_a_router_hears_what_a_node_has_from_one_of_its_replicas() -> None:
    view = KVTiers()

    async def listen(one: Engine, name: str) -> None:
        link = one.connect(RouterId("router"))
        async for data in link.messages():
            message = decode_up(data)
            if isinstance(message, StepOutput):
                view.hear(ReplicaId(name), message.kv_events)
        view.gone(ReplicaId(name))

    async with node(name="n1") as one, engine(one, "b") as second:
        async with engine(one, "a") as first:
            listening = [asyncio.create_task(listen(each, name)) for each, name in ((first, "a"), (second, "b"))]
            await ask(first, PROMPT)
            await until(lambda: view.num_blocks("n1")["host"] == NUM_BLOCKS)
            held = list(one.core.held(one.now)[1][KVTier.HOST])
            assert all(view.leading([h]) for h in held)
            await until(lambda: view.node_of(ReplicaId("a")) == view.node_of(ReplicaId("b")) == "n1")
            (told,) = view.describe()
            assert (told["told_by"], told["replicas"]) == ("b", 2)  # it was here before
        await listening[0]
        second.handle(second.connect(RouterId("other")), ResetPrefixCache("1"))
        await until(lambda: view.num_blocks("n1")["host"] == 0)
    await listening[1]
    assert view.describe() == []


async def test_a_replica_that_is_gone_leaves_its_blocks_and_nothing_else() -> None:
    async with node() as one:
        async with engine(one, "a") as first:
            await ask(first, PROMPT)
            await until(lambda: one.core.stats(one.now).stores.stored == NUM_BLOCKS)
        await until(lambda: one.core.stats(one.now).num_holders == 0)
        async with engine(one, "a2") as second:
            await until(lambda: num_known(second) == NUM_BLOCKS)
            await ask(second, PROMPT)
            assert counters(second)["kv_blocks_loaded"] == 17


async def test_a_connector_that_ends_takes_along_cache_only_and_the_next_one_is_found() -> None:
    door = Door()
    async with node() as one:
        door.connector = one
        async with engine(door, "a") as first:
            await ask(first, PROMPT)
            await until(lambda: one.core.stats(one.now).stores.stored == NUM_BLOCKS)
            door.connector = None
            await one.close()
            await until(lambda: not counters(first)["kv_connected"])
            forget(first)
            await ask(first, PROMPT)
            assert counters(first)["kv_blocks_loaded"] == 0
            async with node(name="node2") as other:
                door.connector = other
                await until(lambda: counters(first)["kv_connected"])
                await ask(first, PROMPT[3:])
                await until(lambda: num_known(first) >= 17)
                forget(first)
                await ask(first, PROMPT[3:])
                assert counters(first)["kv_blocks_loaded"] > 0


async def test_a_replica_that_was_given_up_is_welcome_again_when_its_ranks_have_let_go() -> None:
    """Nothing but the end of the copiers' socket says so, and an idle replica has no plan to tell it by."""
    now = [0.0]
    async with node() as one, engine(one, "a") as first:
        await ask(first, PROMPT)
        await until(lambda: one.core.stats(one.now).stores.stored == NUM_BLOCKS)
        one._clock = lambda: now[0]
        now[0] = one.core._called_at + 3.0
        for _ in range(6):  # others call, and nobody hears this replica
            now[0] += 3.0
            one.act(one.core.on_time(now[0]))
        await until(lambda: not counters(first)["kv_connected"])
        await until(lambda: counters(first)["kv_connected"])
        forget(first)
        await until(lambda: num_known(first) == NUM_BLOCKS)
        await ask(first, PROMPT)
        assert counters(first)["kv_blocks_loaded"] == 17


async def test_what_is_on_disk_is_found_after_a_restart(tmp_path: Path) -> None:
    async with node(folder=tmp_path, num_disk_slots=64) as one, engine(one, "a") as first:
        await ask(first, PROMPT)
        await until(lambda: one.core.stats(one.now).num_on_disk == NUM_BLOCKS)
    async with node(folder=tmp_path, num_disk_slots=64) as again, engine(again, "b") as second:
        await until(lambda: num_known(second) == NUM_BLOCKS)
        await ask(second, PROMPT)
        assert counters(second)["kv_blocks_loaded"] == 17
        assert again.core.stats(again.now).loads.given == {KVTier.DISK: 17}


def _damage(folder: Path, how: str) -> None:
    (slabs,) = folder.glob("*/slabs-000")
    data = bytearray(slabs.read_bytes())
    match how:
        case "flipped":
            data[5 * 4096 + 7] ^= 1
            slabs.write_bytes(data)
        case "cut":
            slabs.write_bytes(data[: 5 * 4096])
        case "deleted":
            slabs.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "deleted"])
async def test_f_07_what_is_damaged_on_disk_is_computed_and_stored_again(tmp_path: Path, how: str) -> None:
    async with node(folder=tmp_path, num_disk_slots=64) as one, engine(one, "a") as first:
        await ask(first, PROMPT)
        await until(lambda: one.core.stats(one.now).num_on_disk == NUM_BLOCKS)
    _damage(tmp_path, how)
    async with node(folder=tmp_path, num_disk_slots=64) as again, engine(again, "b") as second:
        await until(lambda: num_known(second) == NUM_BLOCKS)
        await ask(second, PROMPT)
        loaded = counters(second)["kv_blocks_loaded"]
        assert (loaded < 17) if how != "deleted" else loaded == 0
        assert again.figures()["tier_corrupt"] >= 1
        await until(lambda: num_known(second) < NUM_BLOCKS)
        for _ in range(17):  # each time one more of those that are missing is found to be
            forget(second)
            await ask(second, PROMPT)
        await until(lambda: again.core.stats(again.now).num_on_disk == NUM_BLOCKS)  # it was stored again


async def test_a_reset_empties_memory_and_disk(tmp_path: Path) -> None:
    async with node(folder=tmp_path, num_disk_slots=64) as one, engine(one, "a") as first:
        await ask(first, PROMPT)
        await until(lambda: one.core.stats(one.now).num_on_disk == NUM_BLOCKS)
        first.handle(first.connect(RouterId("r")), ResetPrefixCache("1"))
        await until(lambda: one.core.stats(one.now).num_found == 0)
    async with node(folder=tmp_path, num_disk_slots=64) as again, engine(again, "b") as second:
        await ask(second, PROMPT)
        assert counters(second)["kv_blocks_loaded"] == 0


async def test_blocks_of_another_node_come_over_tcp_into_the_arena(tmp_path: Path) -> None:
    token = b"token" * 8
    async with node(name="n1", folder=tmp_path, num_disk_slots=64) as one, node(name="n2") as two:
        addresses = [one.peers.listen("127.0.0.1", token), two.peers.listen("127.0.0.1", token)]
        for connector in (one, two):
            connector.peers.set_peers(addresses)
        async with engine(one, "a") as first, engine(two, "b") as second:
            await ask(first, PROMPT)
            await until(lambda: num_known(second) == NUM_BLOCKS)
            await ask(second, PROMPT)
            assert counters(second)["kv_blocks_loaded"] == 17
            assert two.core.stats(two.now).loads.given == {KVTier.REMOTE: 17}
            await until(lambda: one.core.stats(one.now).num_leased == 0)
            # and back: it is the second one's now, also when the first one's node is gone
            two.peers.set_peers([])
            await until(lambda: two.core.stats(two.now).num_peers == 0)
            forget(second)
            await ask(second, PROMPT)
            assert two.core.stats(two.now).loads.given[KVTier.HOST] == 17


async def test_f_12_a_reset_reaches_other_nodes_and_what_they_give(tmp_path: Path) -> None:
    """Also one that was not there: it finds out when it comes back, and keeps what was stored after it knew."""
    token = b"token" * 8
    async with node(name="n1") as one, engine(one, "a") as first:
        address = one.peers.listen("127.0.0.1", token)
        async with node(name="n2", folder=tmp_path, num_disk_slots=64) as two, engine(two, "b") as second:
            two.peers.set_peers([address])
            one.peers.set_peers([two.peers.listen("127.0.0.1", token)])
            await ask(second, PROMPT)
            await until(lambda: two.core.stats(two.now).num_on_disk == num_known(first) == NUM_BLOCKS)
            first.handle(first.connect(RouterId("r")), ResetPrefixCache("1"))
            await until(lambda: two.core.generation == one.core.generation == 1)
            await until(lambda: num_known(second) == 0)
            assert two.core.stats(two.now).num_found == two.core.stats(two.now).num_on_disk == 0
            forget(first)
            await ask(first, PROMPT)
            assert counters(first)["kv_blocks_loaded"] == 0
            forget(second)
            await until(lambda: num_known(second) == NUM_BLOCKS)  # computed after it, and found by both
            await ask(second, PROMPT)
            assert counters(second)["kv_blocks_loaded"] == 17
            await until(lambda: two.core.stats(two.now).num_on_disk >= 17)
        one.peers.set_peers([])
        async with node(name="n2", folder=tmp_path, num_disk_slots=64) as again:
            assert again.core.generation == 1, "it was cleared on disk as well"
            again.peers.listen("127.0.0.1", token)
            again.peers.set_peers([address])
            await until(lambda: again.core.stats(again.now).num_peers == 1)
            assert again.core.stats(again.now).num_on_disk >= 17
        first.handle(first.connect(RouterId("r2")), ResetPrefixCache("2"))
        await until(lambda: one.core.generation == 2)
        async with node(name="n2", folder=tmp_path, num_disk_slots=64) as late:
            assert late.core.stats(late.now).num_on_disk >= 17
            late.peers.listen("127.0.0.1", token)
            late.peers.set_peers([address])
            await until(lambda: late.core.generation == 2)
            assert late.core.stats(late.now).num_on_disk == 0


async def test_f_12_who_is_asked_by_somebody_cleared_forgets_and_gives_nothing() -> None:
    token = b"token" * 8
    async with node(name="n1") as one, node(name="n2") as two, engine(two, "b") as second:
        two.peers.listen("127.0.0.1", token)
        await ask(second, PROMPT)
        await until(lambda: two.core.stats(two.now).num_found == NUM_BLOCKS)
        hashes = list(two.core.held(two.now)[1][KVTier.HOST])
        lease = await two.peers.lease_for_peer(one.identity, hashes[:2], 1.0, generation=0)
        assert min(lease.slots) >= 0
        two.peers.release_of_peer(lease)
        lease = await two.peers.lease_for_peer(one.identity, hashes[:2], 1.0, generation=3)
        assert (lease.slots, two.core.generation, two.core.stats(two.now).num_found) == ([-1, -1], 3, 0)
        two.peers.release_of_peer(lease)


async def test_f_06_two_who_compute_the_same_at_once_store_it_once_and_load_what_is_whole() -> None:
    async with node() as one, engine(one, "a") as first, engine(one, "b") as second:
        told = [submit(each, PROMPT)[0] for each in (first, second)]
        for sequence in told:
            await until(lambda sequence=sequence: sequence.finish_reason is not None)  # type: ignore[misc]
            check(sequence, PROMPT)
        await until(lambda: one.core.stats(one.now).stores.stored == NUM_BLOCKS)
        await until(lambda: one.core.stats(one.now).num_reserved == one.core.stats(one.now).num_leased == 0)


async def test_f_06_what_a_slow_writer_has_not_written_is_computed(tmp_path: Path) -> None:
    """The writer stops in the middle of its blocks; whoever asks then gets those that are whole, and the same text."""
    runner = fake()
    runner.copies.most = 1
    async with node() as one, engine(one, "a", runner=runner) as first, engine(one, "b") as second:
        told, _ = submit(first, PROMPT)
        await until(lambda: one.core.stats(one.now).stores.stored >= 8)
        runner.copies.most = 0
        await until(lambda: told.finish_reason is not None)
        check(told, PROMPT)
        num_whole = one.core.stats(one.now).num_found
        assert 8 <= num_whole < NUM_BLOCKS
        await until(lambda: num_known(second) >= num_whole)
        await ask(second, PROMPT)
        assert 0 < counters(second)["kv_blocks_loaded"] <= num_whole
        runner.copies.most = None
        await until(lambda: one.core.stats(one.now).num_found == NUM_BLOCKS)
        await until(lambda: one.core.stats(one.now).num_reserved == one.core.stats(one.now).num_leased == 0)


async def test_f_09_the_same_setting_finds_what_is_on_disk_and_another_block_size_nothing(tmp_path: Path) -> None:
    async def fill(space: KVSpace) -> float:
        """Blocks loaded on the way."""
        runner = fake(block_size=space.block_size)
        async with (
            node(space=space, folder=tmp_path, num_disk_slots=32) as one,
            engine(one, "a", runner=runner) as first,
        ):
            num_there = one.core.stats(one.now).num_on_disk
            await until(lambda: num_known(first) == num_there)
            await ask(first, PROMPT)
            await until(lambda: one.core.stats(one.now).num_on_disk == 75 // space.block_size)
            return counters(first)["kv_blocks_loaded"]

    assert [await fill(SPACE), await fill(SPACE), await fill(KVSpace("fake", 8, 64, 1, KV_LAYOUT))] == [0, 17, 0]


FILL = """
import asyncio, pathlib, sys
from benchmarks.kv_engines import ask, engine, node, until
async def main():
    async with node(folder=pathlib.Path(sys.argv[1]), num_disk_slots=64) as one, engine(one, "a") as first:
        await ask(first, list(range(100, 170)))
        await until(lambda: one.core.stats(one.now).num_on_disk == 18)
asyncio.run(main())
"""


async def test_f_10_another_process_with_other_hashes_of_python_finds_what_this_one_stored(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", FILL, str(tmp_path), env=environment)
    assert await child.wait() == 0
    async with node(folder=tmp_path, num_disk_slots=64) as one, engine(one, "a") as first:
        await until(lambda: num_known(first) == NUM_BLOCKS)
        await ask(first, PROMPT)
        assert counters(first)["kv_blocks_loaded"] == 17


@pytest.mark.parametrize("who", ["connector", "replica"])
@pytest.mark.parametrize("when", ["store", "load"])
async def test_whoever_ends_in_the_middle_of_copies(who: str, when: str) -> None:
    runner = fake()
    async with node() as one, engine(one, "other") as other, engine(one, "a", runner=runner) as first:
        if when == "load":
            await ask(other, PROMPT)
            await until(lambda: num_known(first) == NUM_BLOCKS)
        runner.copies.most = 0
        told, _ = submit(first, PROMPT)
        if when == "load":
            await until(lambda: one.core.stats(one.now).num_leased == 17)
            await until(lambda: runner.copies.is_busy)
        else:
            await until(lambda: told.finish_reason is not None)
            await until(lambda: one.core.stats(one.now).num_reserved > 0)
        if who == "replica":
            await first.close()
            await until(lambda: one.core.stats(one.now).num_holders == 1)
            stats = one.core.stats(one.now)
            assert (stats.num_leased, stats.num_reserved, stats.num_quarantined, stats.num_stranded) == (0, 0, 0, 0)
            return
        await one.close()
        await until(lambda: not counters(first)["kv_connected"])
        runner.copies.most = None
        await until(lambda: told.finish_reason is not None)
        check(told, PROMPT)
        await ask(first, PROMPT[2:])
        await until(lambda: first.core.blocks.num_free == first.core.blocks.num_blocks)
        first.core.validate()


@pytest.mark.parametrize("seed", range(3))
async def test_random_aborts_tiny_tiers_two_nodes_and_a_connector_that_ends(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    token, door = b"t" * 32, Door()
    prompts = [[rng.randrange(3, 999) for _ in range(12)] for _ in range(3)]
    prompts = [
        head + [rng.randrange(3, 999) for _ in range(rng.randrange(4, 60))] for head in prompts for _ in range(4)
    ]
    knobs: dict[str, Any] = {"eviction": "cost"} if seed % 2 else {}
    async with (
        node(24, name="n1", folder=tmp_path, num_disk_slots=40, **knobs) as one,
        node(30, name="n2", tier_admission="second_use") as two,
    ):
        addresses = [one.peers.listen("127.0.0.1", token), two.peers.listen("127.0.0.1", token)]
        for connector in (one, two):
            connector.peers.set_peers(addresses)
        door.connector = two
        async with engine(one, "a") as first, engine(one, "b", num_blocks=40) as second, engine(door, "c") as third:
            for turn in range(12):
                under_way = []
                for each in (first, second, third):
                    some = rng.sample(prompts, 3)
                    under_way += [(*submit(each, prompt), prompt, rng.random() < 0.3) for prompt in some]
                    if rng.random() < 0.5:
                        forget(each)
                for told, abort, _, is_aborted in under_way:
                    if is_aborted:
                        for _ in range(rng.randrange(20)):
                            await asyncio.sleep(0)
                        if told.finish_reason is None:
                            abort()
                for told, _, prompt, is_aborted in under_way:
                    await until(lambda told=told: told.finish_reason is not None)  # type: ignore[misc]
                    if not is_aborted:
                        check(told, prompt)
                if turn == 8:
                    door.connector = None
                    await two.close()
            assert counters(first)["kv_blocks_loaded"] > 0
            for each in (first, second, third):
                await until(lambda each=each: each.core.blocks.num_free == each.core.blocks.num_blocks)  # type: ignore[misc]
                each.core.validate()
        await until(lambda: one.core.stats(one.now).num_holders <= 1)  # what stands for its news
        stats = one.core.stats(one.now)
        assert (stats.num_leased, stats.num_reserved, stats.num_quarantined, stats.num_stranded) == (0, 0, 0, 0)
