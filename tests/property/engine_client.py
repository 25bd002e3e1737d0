"""What the engine machine knows of its clients: what each request was promised and what it got; and its knobs."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from replica.config import SchedulerConfig
from replica.fake_runner import expected_output
from replica.messages import FinishReason, OrderKey, ReplicaId, RouterId, SamplingParams, SequenceOutput

#: so few tokens that texts repeat themselves and guesses come true now and then
VOCAB = 7
BLOCK = 4
CAP = 5
ROUTERS = [RouterId("a"), RouterId("b")]
REPLICA = ReplicaId("r")


KNOBS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(1, 24),
        "enable_chunked_prefill": st.booleans(),
        "lanes": st.sampled_from([(0, 0, 0), (3, 0, 0), (3, 1, 0), (3, 1, 2), (6, 2, 0), (0, 0, 1)]),
        "max_num_seqs": st.integers(1, 5),
        "watermark": st.sampled_from([0.0, 0.2]),
        "policy": st.sampled_from(["fcfs", "priority", "sjf"]),
        "priority_ageing_s": st.sampled_from([1.0, 1000.0]),
        "sjf_ageing_tokens_per_s": st.sampled_from([1.0, 100.0]),
        "admission_look_past": st.integers(0, 3),
        "max_head_passes": st.integers(0, 3),
        "preemption_victim": st.sampled_from(["policy", "cost"]),
        "max_preemptions": st.integers(0, 2),
        "shed_above_queued_tokens": st.sampled_from([0, 0, 40]),
        "num_speculative_tokens": st.sampled_from([0, 3]),
        "speculative_ngram": st.integers(1, 2),
        "tpot_target_ms": st.sampled_from([0, 9]),
    }
)


def scheduler_config(knobs: dict[str, Any]) -> SchedulerConfig:
    """`lanes`: threshold, most long prompts, most prompts under way."""
    threshold, max_long, max_partial = knobs["lanes"]
    return SchedulerConfig(
        long_prefill_token_threshold=threshold,
        max_long_partial_prefills=max_long,
        max_partial_prefills=max_partial,
        **{name: value for name, value in knobs.items() if name != "lanes"},
    )


class Client:
    """What one request was promised and what it got."""

    def __init__(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        output: list[int],
        sampling: SamplingParams,
        order_key: OrderKey,
        deadline: float | None,
    ) -> None:
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.resumed = output
        self.tokens: list[list[int]] = [list(output) if index == 0 else [] for index in range(len(prompts))]
        self.ends: list[FinishReason | None] = [None for _ in prompts]
        self.prompt_logprobs: list[list[float]] = [[] for _ in prompts]
        self.sampling = sampling
        self.order_key = order_key
        self.deadline = deadline

    def check_told(self, item: SequenceOutput, is_first: bool) -> None:
        """Logprobs of each token, of the prompt exactly once, whatever was preempted in the middle of it; and where the
        time went.
        """
        sampling = self.sampling
        assert len(item.logprobs) == (len(item.new_token_ids) if sampling.num_logprobs is not None else 0)
        if sampling.num_prompt_logprobs is not None and is_first and item.new_token_ids:
            told = [entry.top_token_ids for entry in item.prompt_logprobs]
            assert told == [[token_id] for token_id in self.prompts[item.index][1:]]
        else:
            assert item.prompt_logprobs == []
        if item.finish_reason is FinishReason.INVALID:
            assert item.message == "cannot go on" or (sampling.grammar and item.message == "not a grammar")
        if item.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            stages = item.stages
            assert stages is not None
            assert stages.queued_s is not None
            assert stages.prefill_s is not None
            assert stages.decode_s is not None
            assert 0 <= stages.no_room_s <= stages.queued_s + 1e-9
            if not self.resumed:  # which waits as returning before it is scheduled
                assert 0 <= stages.put_back_s <= stages.prefill_s + stages.decode_s + 1e-9
            assert len(stages.preemptions) == min(stages.num_preemptions, 16)

    def check_tokens(self, index: int, max_total: int) -> None:
        """Tokens equal the undisturbed run at every moment, whatever was preempted, shared, chunked, guessed or aborted
        around it.
        """
        tokens = self.tokens[index]
        assert tokens == expected_output(self.prompts[index], len(tokens), vocab_size=VOCAB)
        if self.ends[index] is FinishReason.LENGTH:
            assert len(tokens) == min(self.max_tokens, max_total - len(self.prompts[index]))
