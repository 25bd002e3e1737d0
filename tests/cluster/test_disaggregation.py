"""Prefill and decode on different replicas, over real sockets and in real time: every answer is that of an undisturbed
run, whoever is lost at whichever moment.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replica.messages import GenerateRequest, RequestId, Role, SamplingParams, SequenceInput
from router.breakdown import PARTS
from router.disaggregation import HandOverConfig
from tests.cluster.harness import ClusterUnderTest, cluster, collect, request, until
from tests.cluster.test_data_plane import at_baseline, reference

pytestmark = pytest.mark.anyio
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
ALWAYS = HandOverConfig(decision="always")
#: five blocks and a half
PROMPT = list(range(3, 47))


async def answer(c: ClusterUnderTest, asked: GenerateRequest) -> dict[int, list[int]]:
    return await collect(await c.routers[0].generate(asked))


def steps(c: ClusterUnderTest, role: Role) -> int:
    return sum(len(replica.runner.plans) for replica in c.replicas if replica.role is role)


@pytest.mark.parametrize("roles", [(P, D), (P, D, D), (P, P, D), (P, D, BOTH)], ids=["1P1D", "1P2D", "2P1D", "mixed"])
async def test_answers_are_those_of_one_replica(roles: tuple[Role, ...]) -> None:
    async with cluster(roles=roles, hand_over=ALWAYS) as c:
        asked = [request(f"r{i}", [i + 3, *PROMPT[: 5 * i]], 1 + i % 4, n=1 + i % 2) for i in range(9)]
        answers = await asyncio.gather(*(answer(c, one) for one in asked))
        for one, found in zip(asked, answers, strict=True):
            for sequence in one.sequences:
                expected = reference(sequence.prompt_token_ids, sequence.sampling.max_tokens)
                assert found[sequence.index] == expected, one.request_id
        assert c.routers[0].dispatcher.desk.counters["remote"] > 0
        for one in asked:
            told = await c.routers[0].explain(one.request_id, 5.0)
            assert told is not None
            parts: Any = told["parts_s"]
            assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"], rel=0.01)
            # replicas tell durations of their own; what they tell twice would make the rest negative
            assert min(parts.values()) > -0.01, parts
        assert steps(c, P) > 0
        await until(lambda: at_baseline(c))


async def test_the_first_token_comes_while_the_decode_replica_computes_nothing() -> None:
    async with cluster(roles=(P, D), is_open=False, hand_over=ALWAYS) as c:
        prefill, decode = c.replicas
        prefill.runner.open()
        stream = await c.routers[0].generate(request("r", PROMPT, 4))
        first = await anext(aiter(stream))
        assert [token for event in first for token in event.token_ids] == reference(PROMPT, 4)[:1]
        decode.runner.open()  # until now no step of it could end
        assert await collect(stream) == {0: reference(PROMPT, 4)[1:]}


async def test_a_stop_string_in_the_first_token_ends_both() -> None:
    async with cluster(roles=(P, D), hand_over=ALWAYS) as c:
        stream = await c.routers[0].generate(request("r", PROMPT, 50))
        stream.finish(0)
        await until(lambda: at_baseline(c))
        assert c.routers[0].dispatcher.num_requests == 0


@pytest.mark.parametrize("victim", [0, 1], ids=["P", "D"])
@pytest.mark.parametrize("moment", ["seat", "first token"])
async def test_whoever_is_lost_the_answer_is_whole(victim: int, moment: str) -> None:
    """`seat`: D has its seat and P its prompt; then the token is here, and D has not gone on."""
    async with cluster(roles=(P, D, P, D), is_open=False, hand_over=ALWAYS) as c:
        router = c.routers[0]
        task = asyncio.create_task(router.generate(request("r", PROMPT, 6)))
        await until(lambda: any(replica.runner.plans for replica in c.replicas if replica.role is P))
        prefill = next(replica for replica in c.replicas if replica.role is P and replica.runner.plans)
        decode = next(r for r in c.replicas if r.name == router.dispatcher.replica_of(RequestId("r")))
        if moment == "first token":
            prefill.runner.open()
            await task
        await (prefill, decode)[victim].die()
        for replica in c.replicas:
            replica.runner.open()
        assert await collect(await task) == {0: reference(PROMPT, 6)}
        dead = (prefill, decode)[victim]
        await until(lambda: all(r.engine.core.num_unfinished == 0 for r in c.replicas if r is not dead))


async def test_a_client_that_leaves_is_told_to_both() -> None:
    async with cluster(roles=(P, D), is_open=False, hand_over=ALWAYS) as c:
        task = asyncio.create_task(c.routers[0].generate(request("r", PROMPT, 6)))
        await until(lambda: bool(c.replicas[0].runner.plans))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: c.routers[0].dispatcher.num_requests == 0)
        for replica in c.replicas:
            replica.runner.open()
        await until(lambda: at_baseline(c))


async def test_a_prefill_replica_that_hangs_is_given_up() -> None:
    """Another one does it; when all hang, D."""
    hasty = HandOverConfig(decision="always", prefill_timeout_s=0.05)
    async with cluster(roles=(P, P, D), is_open=False, hand_over=hasty) as c:
        c.replicas[2].runner.open()
        assert await answer(c, request("r", PROMPT, 6)) == {0: reference(PROMPT, 6)}
        assert all(replica.runner.plans for replica in c.replicas)
        for replica in c.replicas:
            replica.runner.open()
        await until(lambda: at_baseline(c))


async def test_what_is_asked_of_one_replica_comes_from_two() -> None:
    """Seeds, rules over the output, log probabilities of prompt and output: told once each."""
    sampling = SamplingParams(
        max_tokens=5, temperature=0.9, seed=7, num_logprobs=2, num_prompt_logprobs=1, presence_penalty=1.0
    )
    found = []
    for roles in ((BOTH,), (P, D)):
        async with cluster(roles=roles, hand_over=ALWAYS) as c:
            asked = GenerateRequest(RequestId("r"), [SequenceInput(0, PROMPT, sampling)])
            events = [event async for step in await c.routers[0].generate(asked) for event in step]
            found.append(
                (
                    [token for event in events for token in event.token_ids],
                    [told for event in events for told in event.logprobs],
                    [told for event in events for told in event.prompt_logprobs],
                    events[-1].finish_reason,
                )
            )
    assert found[0] == found[1]
    assert len(found[0][1]) == 5
    assert len(found[0][2]) == len(PROMPT) - 1
