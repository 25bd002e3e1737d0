"""What a full tier gives up, on a drawn trace with prefixes (`docs/findings.md` has a recorded one)."""

from __future__ import annotations

from benchmarks.kv_eviction import Pool, Way, chains, run
from cluster.simulation.traces import synthetic


def test_both_orders_find_all_that_fits_and_hardly_differ_where_it_does_not() -> None:
    prompts = chains(one for one in synthetic(1, 2500) if one.prefix_ids)
    bound = run(prompts, Way("lru"), 30_000)
    assert bound == run(prompts, Way("cost"), 30_000), "nothing was given up"
    lru, cost = (run(prompts, Way(eviction), 4_000) for eviction in ("lru", "cost"))
    assert 0.3 * bound.hits < lru.hits < bound.hits
    assert cost.hits > 0.9 * lru.hits
    assert cost == run(prompts, Way("cost"), 4_000), "the same again"


def test_stored_on_second_sight_what_comes_twice_is_found_the_third_time() -> None:
    prompt = [bytes([i]) * 16 for i in range(8)]
    found = [run([prompt] * times, Way("lru", "second_use"), 100) for times in (1, 2, 3, 4)]
    assert [one.stored for one in found] == [0, 8, 8, 8]
    assert [one.hits for one in found] == [0, 0, 1 / 3, 1 / 2]


def test_the_pool_before_it() -> None:
    pool = Pool(3)
    a, b = [b"1", b"2", b"3"], [b"1", b"4"]
    assert [pool.use(a), pool.use(a), pool.use(b), pool.use(a)] == [0, 3, 1, 2]
    assert Pool(0).use(a) == 0
