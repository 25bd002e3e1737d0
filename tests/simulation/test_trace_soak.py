"""A slice of `benchmarks/trace_soak.py`, with requests drawn like the traces': the million is `make soak`."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.length_runner import LengthRunner
from benchmarks.trace_book import Book
from benchmarks.trace_shapes import COST, Client, clients, random_shape
from benchmarks.trace_soak import Phase, length_runner, run_phase, run_token_phase
from cluster.simulation.traces import PromptText, TraceRequest, read_azure, read_mooncake, shifted, synthetic
from replica.messages import FinishReason, SequenceOutput
from replica.router_output import RouterOutput
from replica.step import NewSequence, StepPlan

SCALE = 1 / 32


@pytest.mark.parametrize("seed", [0, 4, 5, 9])
def test_a_slice_of_the_traces_ends_whole(seed: int) -> None:
    _, result = run_phase(seed, synthetic(seed, 200), SCALE)
    assert result.num_requests == sum(result.ends.values()) == 200
    assert result.num_validations > 0


@pytest.mark.parametrize("seed", [1, 4])
def test_a_slice_with_a_fake_kv_cache_says_what_it_would_say_alone(seed: int) -> None:
    result = run_token_phase(seed, synthetic(seed, 100), SCALE)
    assert result.num_output_tokens > 500


def test_the_slices_together_preempt_hit_the_cache_and_refuse() -> None:
    """So the checks above have something to look at."""
    results = [run_phase(seed, synthetic(seed, 150), SCALE)[1] for seed in (0, 4)]
    assert sum(result.num_preemptions for result in results) > 5
    assert sum(result.num_cached_tokens for result in results) > 1000
    assert len({end for result in results for end in result.ends}) >= 4


def _phase() -> Phase:
    rows = synthetic(3, 40)
    shape = random_shape(3, 4000, 300)
    return Phase(shape, clients(shape, rows, SCALE), length_runner(shape, 4000))


def test_a_lost_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = _phase()
    update = phase.core.update

    def forgetful(*args: object) -> dict[object, RouterOutput]:
        outputs = update(*args)  # type: ignore[arg-type]
        for output in outputs.values():
            output.outputs = [r for r in output.outputs if r.finish_reason is None or not r.request_id.endswith("7")]
        return outputs  # type: ignore[return-value]

    monkeypatch.setattr(phase.core, "update", forgetful)
    with pytest.raises(AssertionError, match="never ended"):
        phase.run()


def test_a_leaked_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = _phase()
    assert phase.core.blocks._take(1)
    with pytest.raises(AssertionError):
        phase.run()


def test_a_stall_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = _phase()
    monkeypatch.setattr(phase.core.scheduler._rules.admission, "admit", lambda *args: None)
    with pytest.raises(AssertionError, match="stalled"):
        phase.run()


def test_a_second_end_and_a_wrong_number_of_tokens_are_found() -> None:
    shape = random_shape(3, 4000, 300)
    client: Client = next(c for c in clients(shape, synthetic(3, 40), SCALE) if len(c.request.sequences) == 1)
    limit = client.request.sequences[0].sampling.max_tokens
    end = SequenceOutput(client.request.request_id, 0, [7] * limit, FinishReason.LENGTH)
    book = Book(shape)
    book.accepted(client)
    with pytest.raises(AssertionError, match="limit"):
        book.take({client.router_id: RouterOutput([msgspec.structs.replace(end, new_token_ids=[7] * (limit + 1))])})
    book = Book(shape)
    book.accepted(client)
    book.take({client.router_id: RouterOutput([end])})
    with pytest.raises(AssertionError, match="has ended before"):
        book.take({client.router_id: RouterOutput([end])})


def test_the_length_runner_refuses_a_block_table_that_is_too_short() -> None:
    runner: LengthRunner = length_runner(random_shape(3, 4000, 300), 4000)
    sampling = next(clients(random_shape(3, 4000, 300), synthetic(3, 5), SCALE)).request.sequences[0].sampling
    with pytest.raises(AssertionError, match="room for 16"):
        runner.execute(StepPlan(0, [0], [0], [17], new=[NewSequence(0, [5] * 17, 17, [0], sampling)]))
    assert COST.base_s > 0


def test_both_formats_are_read() -> None:
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:15:46.6805900,374,44\n"]
    azure += ["2023-11-16 18:15:50.6805990,1,0\n", "\n"]
    first, second = read_azure(azure)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.0, abs=1e-4)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (1, 1), "at least one of each"
    row = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}\n'
    assert read_mooncake([row]) == [TraceRequest(1.5, 600, 5, (0, 9))]
    with pytest.raises(ValueError, match="head line"):
        read_azure(["a,b\n"])


def test_prompts_share_what_their_ids_share() -> None:
    text = PromptText(1, 49152)
    one = text.prompt(1, TraceRequest(0.0, 1500, 1, (0, 1, 2)), 1 / 16)
    other = text.prompt(2, TraceRequest(0.0, 1536, 1, (0, 1, 3)), 1 / 16)
    assert (len(one), len(other)) == (93, 96)
    assert one[:64] == other[:64]
    assert one[64:] != other[64:93]
    assert PromptText(2, 49152).prompt(1, TraceRequest(0.0, 1500, 1, (0, 1, 2)), 1 / 16) != one
    assert text.prompt(1, TraceRequest(0.0, 90, 1), 1) != text.prompt(2, TraceRequest(0.0, 90, 1), 1)


def test_another_hour_has_the_same_requests() -> None:
    rows = synthetic(1, 300)
    turned = shifted(rows, 5)
    assert [row.arrival_s for row in turned] == sorted(row.arrival_s for row in turned)

    def lengths(some: list[TraceRequest]) -> list[tuple[int, int]]:
        return sorted((row.num_prompt_tokens, row.num_output_tokens) for row in some)

    assert lengths(turned) == lengths(rows)
    assert shifted(rows, 5) == turned != shifted(rows, 6)
