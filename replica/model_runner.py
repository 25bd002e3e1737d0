"""TORCH. The model runner: loads a folder, owns the KV pool, carries out step plans. Knows nothing of queues."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from replica.block_copier import BlockCopier, best_copy
from replica.collective import Collective, NoPeers
from replica.config import EngineConfig, resolve
from replica.errors import ConfigError, EngineError, ModelLoadError
from replica.grammar import GrammarCompiler, GrammarError
from replica.hardware import detect_hardware
from replica.input_batch import InputBatch, SequenceStore
from replica.memory_check import check_pool
from replica.messages import TokenLogprobs
from replica.models import kv_pool
from replica.models.decoder import read_config
from replica.models.decoder_config import ModelShape
from replica.models.loading import LoadSettings, check_ranks, load_decoder
from replica.sampler import NOT_FINITE
from replica.sampling_rules import prompt_logprobs
from replica.shard import Shard
from replica.side_files import eos_token_ids
from replica.step import COPY_WAIT_S, OpenArena, RunnerInfo, StepPlan, StepResult

logger = logging.getLogger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchModelRunner:
    """Implements `replica.step.ModelRunner` on a CPU. Construct and call it on one thread: so OpenMP wants it.

    With several ranks each has a runner, and all are given the same plans. Rank 0 chooses the tokens; the others are
    told by `adopt` before their next plan. Construction talks to the peers too (the self-test): all at the same time.

    Raises ModelLoadError for a folder it cannot serve, ConfigError for settings that cannot work with this model.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        kv_layer_major: bool = False,
        self_test: bool = True,
        *,
        shard: Shard = Shard(),
        collective: Collective | None = None,
        open_arena: OpenArena | None = None,
    ) -> None:
        """`open_arena` finds the arena of a KVConnector; None: its KV cannot be copied."""
        hardware = detect_hardware()
        config = resolve(config, hardware)
        self._folder = folder
        self._model = read_config(folder)
        check_ranks(self._model, shard.size)
        assert shard.size == 1 or collective is not None, "ranks need something to talk over"
        self._shard, self._collective = shard, collective or NoPeers()
        self._dtype = _DTYPES[config.model.dtype]
        max_len = max_length(config, self._model)
        threads = config.parallel.num_threads or 1
        torch.set_num_threads(threads)
        self._num_blocks = _pool_size(config, self._model, self._dtype, shard)
        self._block_size = config.cache.block_size
        self._is_exact = config.cache.exact_kv
        if not config.parallel.ranks_may_be_remote:  # they share the pool, and this machine
            check_pool(config.cache, hardware.memory_bytes, 1, self._model, self._dtype.itemsize)
        settings = LoadSettings(
            dtype=self._dtype,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_len=max_len,
            threads=threads,
            layer_major=kv_layer_major,
            shard=shard,
            collective=self._collective,
        )
        with torch.inference_mode():
            loaded = load_decoder(folder, self._model, settings)
        self._decoder = loaded.decoder
        #: (weights, KV pool) of this rank, in bytes. Weights as read, before any padding of a layout
        self.held_bytes = (
            loaded.weight_bytes,
            self._num_blocks * kv_pool.block_bytes(self._model, self._block_size, self._dtype, shard),
        )
        eos = eos_token_ids(folder)
        self._grammars = GrammarCompiler(folder / "tokenizer.json", self._model.vocab_size, eos)
        window = self._model.window
        #: of all layers; None: some layer sees everything, or no sequence gets longer than that
        self._window = window if window is not None and window < max_len else None
        self._store_arguments = (
            self._block_size,
            self._num_blocks,
            max_len,
            self._model.vocab_size,
            eos,
            self._grammars,
        )
        self._store = self._new_store()
        #: what the last step of a rank that does not choose still has to be told: seq_ids of the plan, batch
        self._untold: tuple[list[int], InputBatch] | None = None
        #: when True, `last_logits` gets a copy of the logits of every token that a sequence gets (for tests)
        self.capture_logits = False
        #: seq_id -> float32 logits [tokens of the step, vocab]; more than one with accepted drafts
        self.last_logits: dict[int, torch.Tensor] = {}
        self._closed = False
        #: between the pool and the arena of a KVConnector
        self.copies: BlockCopier | None = None
        if open_arena is not None and not kv_layer_major:
            coder = kv_pool.coder_of(loaded.decoder.pool, config.cache.offload_dtype)
            slabs = kv_pool.slabs(loaded.decoder.pool)
            self.copies = BlockCopier(slabs, shard.rank, open_arena, best_copy(), coder=coder)
        #: outcome of the start-up self-test; None when it was not run
        self.is_invariant: bool | None = None
        verdict = "invariance not tested"
        if self_test:
            verdict = self._run_self_test(min(max_len, self._num_blocks * self._block_size))
        self.info = RunnerInfo(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_model_len=max_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=eos,
            model_fingerprint=self._fingerprint(loaded.digest, max_len),
            description=f"cpu, {config.model.dtype}, {threads} threads, {loaded.description}; {verdict}",
            window=self._window,
            block_bytes=0 if self.copies is None else self.copies.part_bytes * shard.size,
            kv_degree=1 if self._model.num_kv_heads % shard.size == 0 else shard.size,
        )

    def _new_store(self) -> SequenceStore:
        return SequenceStore(*self._store_arguments, with_rules=not self._shard.rank, window=self._window)

    def _run_self_test(self, room: int) -> str:
        from replica.self_test import check_invariance

        started = time.perf_counter()
        try:
            self.is_invariant = check_invariance(self, self._model.vocab_size, self._num_blocks, self._block_size, room)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._folder.name} is not served: in the self-test {error}") from None
        if not self.is_invariant:
            logger.warning(
                "the invariance self-test FAILED: what a request is answered may depend on the requests beside it"
            )
        self._store, self._untold = self._new_store(), None
        self.last_logits.clear()
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return f"invariance self-test {'passed' if self.is_invariant else 'FAILED'} in {elapsed_ms:.0f} ms"

    def _fingerprint(self, digest: str, max_len: int) -> str:
        """Of all that KV blocks depend on: past its usual length a model may rotate differently. Other kernels, and
        another number of ranks, add in another order: that counts unless `kv_cache.exact_kv` is off.
        """
        sums = (self._shard.size, self._decoder.kernels) if self._is_exact else ("within rounding",)
        parts = (repr(self._model), self._dtype, max_len > self._model.usual_length, *sums)
        text = json.dumps([*map(str, parts), digest])
        return hashlib.sha256(text.encode()).hexdigest()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out `plan`; see `replica.step`. Raises EngineError on a plan that cannot be right."""
        if self._closed:
            raise EngineError("the model runner is closed")
        started = time.perf_counter()
        if self._untold is not None and plan.seq_ids:
            raise EngineError(f"rank {self._shard.rank} was not told the tokens of the step before step {plan.step}")
        self._store.apply(plan)
        if self.copies is None:
            return self._compute(plan, started)
        self.copies.take(plan)
        if plan.waits_for_copies:
            self.copies.wait(COPY_WAIT_S)
        result = self._compute(plan, started)
        copied, failed_below, copy_s = self.copies.progress()
        return msgspec.structs.replace(result, copied=copied, failed_below=failed_below, copy_s=copy_s)

    def _compute(self, plan: StepPlan, started: float) -> StepResult:
        if not plan.seq_ids:
            return StepResult(plan.step, [], [], time.perf_counter() - started)
        batch = self._store.assemble(plan)
        if self._shard.rank:
            self._decoder.forward(batch)
            self._untold = (plan.seq_ids, batch)
            return StepResult(plan.step, [], [], time.perf_counter() - started)
        if batch.ruled or batch.prompt_rows or self._store.failed:
            result = self._choose_by_rules(plan, batch)
        else:
            tokens, logits = self._decoder.forward(batch)
            result = self._take(plan, batch, tokens, logits)
        return msgspec.structs.replace(result, duration_s=time.perf_counter() - started)

    def adopt(self, result: StepResult) -> None:
        """Tell a rank that does not choose which tokens rank 0 chose in the last step. Nothing to do on rank 0.

        A sequence that is not in `result` because it failed gets a token of no meaning: the next plan drops it.
        """
        if self._untold is None:
            return
        (seq_ids, batch), self._untold = self._untold, None
        chosen = {
            seq_id: [token_id, *result.more.get(seq_id, [])]
            for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True)
        }
        tokens = np.full(batch.num_chosen, -1, np.int32)  # behind a rejected draft; equal to no draft
        for first in np.flatnonzero(np.diff(batch.sampled, prepend=-1)).tolist():
            of_one = chosen.get(seq_ids[batch.sampled[first]], [0])
            tokens[first : first + len(of_one)] = of_one
        self._store.append(batch, tokens)

    @property
    def kv_pool(self) -> torch.Tensor:
        """This rank's, as `models/kv_pool.py` allocates it."""
        return self._decoder.pool

    def begin_anew(self) -> None:
        """Keep the weights, forget every sequence: a peer was replaced, and what it knew is gone."""
        if self.copies is not None:
            self.copies.begin_anew()
        self._store, self._untold = self._new_store(), None

    def tell_copies(self, tell: Callable[[int, int], None]) -> None:
        """See `replica.rank_loop.RankRunner`."""
        if self.copies is not None:
            self.copies.on_progress = tell

    def agree(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Rank 0's `result` on every rank, over the peers themselves: for the self-test, before anything else carries
        messages. One token a sequence; float32 holds token ids exactly. 0: none is due, -1: there is none to choose.
        """
        tokens = torch.zeros(len(plan.seq_ids))
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            tokens[plan.seq_ids.index(seq_id)] = token_id + 1
        for seq_id in result.not_finite:
            tokens[plan.seq_ids.index(seq_id)] = -1
        self._collective.sum_(tokens)
        told = list(zip(plan.seq_ids, tokens.tolist(), strict=True))
        pairs = [(s, int(t) - 1) for s, t in told if t > 0]
        not_finite = [s for s, t in told if t < 0]
        return StepResult(
            plan.step, [s for s, _ in pairs], [t for _, t in pairs], result.duration_s, not_finite=not_finite
        )

    def _take(self, plan: StepPlan, batch: InputBatch, tokens: NDArray[np.int32], logits: torch.Tensor) -> StepResult:
        """The chosen tokens as a result, drafts judged."""
        kept = self._store.append(batch, tokens)
        owners = [plan.seq_ids[i] for i in batch.sampled[kept].tolist()]
        chosen = tokens[kept].tolist()
        if self.capture_logits:
            rows: dict[int, list[int]] = {}
            for row, seq_id in zip(kept.tolist(), owners, strict=True):
                rows.setdefault(seq_id, []).append(row)
            self.last_logits.update({seq_id: logits[of_one].clone() for seq_id, of_one in rows.items()})
        if not batch.drafted and NOT_FINITE not in chosen:  # 1 us for 256 rows
            return StepResult(plan.step, owners, chosen)
        not_finite = sorted({seq_id for seq_id, token_id in zip(owners, chosen, strict=True) if token_id == NOT_FINITE})
        first: dict[int, int] = {}
        more: dict[int, list[int]] = {}
        for seq_id, token_id in zip(owners, chosen, strict=True):
            if seq_id in not_finite:
                continue
            if seq_id in first:
                more.setdefault(seq_id, []).append(token_id)
            else:
                first[seq_id] = token_id
        return StepResult(plan.step, list(first), list(first.values()), more=more, not_finite=not_finite)

    def _choose_by_rules(self, plan: StepPlan, batch: InputBatch) -> StepResult:
        """The step in three: logits, what rules make of them, the choice. A rule that cannot be kept ends its own
        sequence only.
        """
        _, logits = self._decoder.forward(batch)
        rows = logits.numpy()
        seq_ids = [plan.seq_ids[i] for i in batch.sampled]
        failed = {seq_id: why for seq_id, why in self._store.failed.items() if seq_id in plan.seq_ids}
        told: dict[int, list[TokenLogprobs]] = {}
        not_finite: set[int] = set()
        for part in batch.prompt_rows:
            of_part = rows[part.first : part.first + len(part.next_ids)]
            if not np.isfinite(of_part.max(axis=1)).all():
                not_finite.add(part.seq_id)
            elif part.seq_id not in failed:
                told[part.seq_id] = prompt_logprobs(of_part, part.next_ids, part.num_top)
        for index, rules, output in batch.ruled:
            if not np.isfinite(rows[index].max()):
                continue  # no token will be chosen
            try:
                rules.apply(rows[index], output)
            except GrammarError as error:
                failed[seq_ids[index]] = _cannot_go_on(error)
            except Exception:  # a bug in one sequence's rules may not stop the step of the others
                logger.exception("the rules of sequence %d failed", seq_ids[index])
                failed[seq_ids[index]] = "The rules of this request could not be applied."
        tokens = self._decoder.choose(batch)
        logprobs: dict[int, TokenLogprobs] = {}
        for index, rules, _ in batch.ruled:
            if seq_ids[index] in failed or tokens[index] == NOT_FINITE:
                continue
            try:
                if (entry := rules.chosen(int(tokens[index]))) is not None:
                    logprobs[seq_ids[index]] = entry
            except GrammarError as error:
                failed[seq_ids[index]] = _cannot_go_on(error)
        result = self._take(plan, batch, tokens, logits)
        not_finite.update(result.not_finite)
        chosen = zip(result.seq_ids, result.token_ids, strict=True)
        kept = [(seq_id, token_id) for seq_id, token_id in chosen if seq_id not in failed and seq_id not in not_finite]
        return msgspec.structs.replace(
            result,
            seq_ids=[seq_id for seq_id, _ in kept],
            token_ids=[token_id for _, token_id in kept],
            logprobs=logprobs,
            prompt_logprobs=told,
            failed=failed,
            not_finite=sorted(not_finite - set(failed)),
        )

    def prepare_grammar(self, grammar: str) -> None:
        """See `replica.step.ModelRunner`."""
        self._grammars.compile(grammar)

    def close(self) -> None:
        """Drop weights and KV pool. Idempotent."""
        self._closed = True
        if self.copies is not None:
            self.copies.close()
            self.copies = None
        self.__dict__.pop("_decoder", None)
        self.last_logits.clear()


def _cannot_go_on(error: GrammarError) -> str:
    return f"The output cannot go on under its grammar and bans: {str(error).rstrip('.')}."


def max_length(config: EngineConfig, model: ModelShape) -> int:
    wanted = config.model.max_model_len or model.usual_length
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"model.max_model_len={wanted} is longer than the model's context; at most {model.max_position_embeddings}"
        )
    return wanted


def _pool_size(config: EngineConfig, model: ModelShape, dtype: torch.dtype, shard: Shard) -> int:
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    assert config.cache.kv_cache_gib is not None, "resolve() fills it"
    return kv_pool.count_blocks(model, config.cache.block_size, dtype, config.cache.kv_cache_gib, shard)
