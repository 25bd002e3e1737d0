"""Group E: what a client sees where one replica computes its prompt and another one the rest. What carries the KV is in
`tests/unit/test_pd_flow.py`, `tests/cluster/test_disaggregation.py` and `tests/equivalence/test_pd.py`.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from replica.fake_runner import expected_output
from replica.messages import Role
from router.disaggregation import HandOverConfig
from tests.api.calls import COMPLETIONS, answer, chunks_of, complete, error_of
from tests.api.fake_text import EOS, fake_vocab_size
from tests.api.harness import ApiUnderTest, fake_api

P, D = Role.PREFILL, Role.DECODE
ALWAYS = HandOverConfig(decision="always")
#: three blocks of 16 and a bit
PROMPT = [*range(50, 103)]
WHOLE: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


def tokens(told: dict[str, Any]) -> list[int]:
    return list(told["choices"][0]["token_ids"])


def reference(prompt: list[int]) -> list[int]:
    return expected_output(prompt, WHOLE["max_tokens"], vocab_size=fake_vocab_size(), eos=frozenset(EOS))


def desk(api: ApiUnderTest, name: str) -> int:
    """A count of the router's hand-overs."""
    return int(api.peek(lambda: api.backend.dispatcher.desk.counters[name]))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("roles", [(P, D), ()], ids=["P and D", "one replica"])
def test_e_07_one_request_id_twice_at_once(roles: tuple[Role, ...]) -> None:
    """Each runs under an id of our own, with the name on both answers."""
    prompts = [[7, *PROMPT], [8, *PROMPT]]
    expected = [reference(prompt) for prompt in prompts]
    with fake_api(roles=roles, is_open=False, hand_over=ALWAYS) as api:

        def ask(prompt: list[int]) -> Any:
            body = {"prompt": prompt, "temperature": 0, **WHOLE}
            return api.http.post(COMPLETIONS, json=body, headers={"x-request-id": "dup"})

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, prompt) for prompt in prompts]
            api.until(lambda: api.backend.load() == 2)
            for replica in api.replicas:
                replica.runner.open()
            for one, wanted in zip(asked, expected, strict=True):
                assert tokens(answer(one.result())) == wanted
                assert one.result().headers["x-request-id"] == "dup"
        assert desk(api, "remote") == (2 if roles else 0)
        # pools and runners of both are looked at when the server ends
        samples = [line.rpartition(" ")[2] for line in api.http.get("/metrics").text.splitlines() if line[:1] != "#"]
        assert min(map(float, samples)) >= 0


def test_e_13_the_whole_text_is_that_of_one_replica() -> None:
    """Repeated words in the middle, lengths around whole blocks; log probabilities as well."""
    words = [3, 4, 5] + [60, 61, 62, 63] * 70 + [*range(70, 100)]
    lengths = (15, 16, 17, 303, 304, 305)
    told = []
    for roles in ((), (P, D)):
        with fake_api(roles=roles, hand_over=ALWAYS) as api:
            asked = {**WHOLE, "max_tokens": 48, "logprobs": 2}
            told.append([answer(complete(api, prompt=words[-length:], **asked)) for length in lengths])
            assert desk(api, "remote") == (len(lengths) if roles else 0)
    assert all(len(tokens(one)) == 48 for one in told[0])
    assert [one["choices"] for one in told[0]] == [one["choices"] for one in told[1]]


def test_e_16_streams_and_failures_of_either_side_reach_the_client() -> None:
    """A stream comes whole; a request under which steps of D fail is a 502 that says so, a failure of P is made good by
    D, and a refusal is the client's. Two hundred requests leave no connection open.
    """
    with fake_api(roles=(P, D), hand_over=ALWAYS) as api:
        prefill, decode = (replica.runner for replica in api.replicas)
        before = 0
        for number in range(50):
            # each is new to D, so that it waits for P
            decode.is_poisoned = True
            assert "failed" in error_of(complete(api, prompt=[number, 3, *PROMPT], **WHOLE), 502)
            decode.is_poisoned = False
            chunks = chunks_of(complete(api, prompt=[number, 4, *PROMPT], **WHOLE, stream=True))
            streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
            assert streamed == reference([number, 4, *PROMPT])
            prefill.is_poisoned = True
            assert tokens(answer(complete(api, prompt=[number, 5, *PROMPT], **WHOLE))) == reference(
                [number, 5, *PROMPT]
            )
            prefill.is_poisoned = False
            assert "context" in error_of(complete(api, prompt=[5] * 9000), 400)
            before = before or num_descriptors()
        assert desk(api, "prefill_failed") == 50
        assert num_descriptors() <= before + 2
