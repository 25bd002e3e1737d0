"""vLLM's scheduler without a model, for `benchmarks/engine_cost.py` to be measured beside. Runs in vLLM's environment.

    VENV/bin/python benchmarks/engine_rival.py MODEL_FOLDER      # one JSON object a line, in and out

`{"decode": 256}` gives microseconds per running request and step, `{"admit": 32768}` milliseconds for one prompt. Same
load, clock and way to choose the least disturbed turn as ours. It counts less than ours: no load snapshot, no encoding.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from typing import Any

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONHASHSEED": "0"})

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
VOCAB = 49152
PROMPT_TOKENS = 512


class Rival:
    """Scheduler and hasher with prefix caching on."""

    def __init__(self, model: str, max_num_seqs: int, token_budget: int, num_blocks: int) -> None:
        max_len = 65536
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, prefix_caching_hash_algo="sha256")
        config = VllmConfig(
            model_config=ModelConfig(
                model=model, dtype="bfloat16", max_model_len=max_len, hf_overrides={"max_position_embeddings": max_len}
            ),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=token_budget,
                max_model_len=max_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )
        cache.block_size, cache.num_gpu_blocks = BLOCK_SIZE, num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self._count = 0

    def request(self, prompt: list[int], max_tokens: int) -> Any:
        self._count += 1
        return Request(
            request_id=f"request-{self._count}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=max_tokens, temperature=0.0),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def step(self) -> tuple[float, float]:
        """Seconds for schedule and update. The made-up runner is not counted."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        scheduled = time.thread_time()
        ids = list(plan.num_scheduled_tokens)
        sampled = [[7 + (i & 1023)] for i in range(len(ids))]
        for i, request_id in enumerate(ids):
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens < request.num_tokens:
                sampled[i] = []  # its prompt goes on
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        )
        began = time.thread_time()
        self.scheduler.update_from_output(plan, result)
        return scheduled - started, time.thread_time() - began

    def run(self) -> None:
        while self.scheduler.running:
            self.step()


def decode(model: str, num_running: int, num_steps: int = 160) -> dict[str, float]:
    rng = random.Random(1)
    blocks_each = (PROMPT_TOKENS + num_steps + 80) // BLOCK_SIZE + 2
    rival = Rival(model, max(num_running, 8), 8192, num_running * blocks_each + 64)
    for _ in range(num_running):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        rival.scheduler.add_request(rival.request(prompt, 60_000))
    scheduler = rival.scheduler
    while len(scheduler.waiting) or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        rival.step()
    for _ in range(16):
        rival.step()
    gc.collect()
    gc.freeze()
    parts = [rival.step() for _ in range(num_steps)]
    gc.unfreeze()
    turns = [parts[i : i + BLOCK_SIZE] for i in range(0, len(parts), BLOCK_SIZE)]
    schedule, update = min(
        ([statistics.fmean(column) for column in zip(*turn, strict=True)] for turn in turns), key=sum
    )
    names = ("schedule", "update", "total")
    parts_s = (schedule, update, schedule + update)
    return {name: 1e6 * part / num_running for name, part in zip(names, parts_s, strict=True)}


def admit(model: str, num_tokens: int, num_prompts: int = 7) -> dict[str, float]:
    rng = random.Random(2)
    rival = Rival(model, 64, 65536, (num_tokens // BLOCK_SIZE + 8) * (num_prompts * 2 + 6))
    found = []
    for _ in range(num_prompts):
        prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
        started = time.thread_time()
        rival.scheduler.add_request(rival.request(prompt, 4))
        submit = time.thread_time() - started
        schedule, update = rival.step()
        rival.run()
        request = rival.request(list(prompt), 4)
        started = time.thread_time()
        hits = rival.scheduler.kv_cache_manager.get_computed_blocks(request)
        lookup = time.thread_time() - started
        assert hits[1] >= num_tokens - BLOCK_SIZE, "the whole prompt is cached"
        rival.scheduler.add_request(request)
        hit_schedule = rival.step()[0]
        rival.run()
        found.append((submit, schedule, update, lookup, hit_schedule))
    names = ("submit", "schedule", "update", "lookup", "hit_schedule")
    return {name: 1e3 * min(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}


def main() -> None:
    model = sys.argv[1]
    for line in sys.stdin:
        order = json.loads(line)
        found = decode(model, order["decode"]) if "decode" in order else admit(model, order["admit"])
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
