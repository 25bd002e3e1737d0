"""PURE. What clients of the trace soak are owed, and what they got: each request ends exactly once, with the right
number of tokens, and nobody overtakes whom the policy protects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush

from benchmarks.trace_shapes import Client, Shape
from replica.messages import FinishReason, RequestId, SequenceOutput
from replica.router_output import RouterOutputs

#: gets a client, the index of one of its sequences, and all tokens of that
TokenCheck = Callable[[Client, int, list[int]], None]


class Life:
    """One accepted request."""

    __slots__ = ("client", "first_seq_id", "has_begun", "limit_s", "num_open", "overtaken")

    def __init__(self, client: Client, first_seq_id: int, limit_s: float) -> None:
        self.client = client
        self.first_seq_id = first_seq_id
        self.num_open = len(client.request.sequences)
        self.has_begun = False
        #: nobody who arrives later may begin before it
        self.limit_s = limit_s
        self.overtaken = 0

    def __lt__(self, other: Life) -> bool:
        return self.first_seq_id < other.first_seq_id


class Book:
    """All clients of one phase. Raises AssertionError when somebody gets what is not due. With `check_tokens` the
    tokens themselves are kept and handed over when their sequence ends.
    """

    def __init__(self, shape: Shape, check_tokens: TokenCheck | None = None) -> None:
        self._shape = shape
        self._check_tokens = check_tokens
        self._tokens: dict[int, list[int]] = {}
        self._max_tokens = shape.num_blocks * shape.engine.cache.block_size
        self._lives: dict[RequestId, Life] = {}
        self._by_first: dict[int, Life] = {}
        self._waiting: list[tuple[float, Life]] = []
        self._counts: dict[int, int] = {}
        self._next_seq_id = 0
        #: ends by finish reason, or by reason of refusal
        self.ends: Counter[str] = Counter()
        self.num_output_tokens = 0
        self.most_overtaken = 0

    @property
    def num_open(self) -> int:
        return len(self._lives)

    @property
    def num_ended(self) -> int:
        return self.ends.total()

    def refused(self, client: Client, reason: str) -> None:
        assert client.request.request_id not in self._lives, f"{client.request.request_id} lives and is refused"
        self.ends[f"refused: {reason}"] += 1

    def accepted(self, client: Client) -> None:
        request = client.request
        life = Life(client, self._next_seq_id, client.arrival_s + self._shape.key_span_s(request))
        self._next_seq_id += len(request.sequences)
        self._lives[request.request_id] = life
        self._by_first[life.first_seq_id] = life
        heappush(self._waiting, (life.limit_s, life))

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._lives

    def aborted(self, request_id: RequestId) -> None:
        """Its client has gone: nothing may come for it any more."""
        life = self._lives[request_id]
        for seq_id in range(life.first_seq_id, life.first_seq_id + len(life.client.request.sequences)):
            self._counts.pop(seq_id, None)
            self._tokens.pop(seq_id, None)
        self._end(life, FinishReason.ABORT)

    def begun(self, seq_ids: list[int]) -> None:
        """Sequences in the order in which they joined a step; those that had been there before are not counted."""
        for seq_id in seq_ids:
            life = self._by_first.get(seq_id)
            if life is not None and not life.has_begun:
                life.has_begun = True
                self._count_overtaken(life.client.arrival_s)

    def take(self, outputs: RouterOutputs) -> None:
        """What a step, or the queue, had for the routers."""
        counts = self._counts
        for output in outputs.values():
            for seq_id in output.seq_ids:
                counts[seq_id] += 1
            if self._check_tokens is not None:
                for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
                    self._tokens[seq_id].append(token_id)
            for record in output.outputs:
                self._take_record(record)

    def check_over(self) -> None:
        """Everybody has ended, and nothing is left of anybody."""
        assert not self._lives, f"never ended: {list(self._lives)[:5]}"
        assert not self._counts, f"tokens of nobody: {list(self._counts)[:5]}"

    def _take_record(self, record: SequenceOutput) -> None:
        life = self._lives.get(record.request_id)
        assert life is not None, f"{record.request_id} has ended before, or never was: {record}"
        seq_id = life.first_seq_id + record.index
        count = self._counts.get(seq_id, 0) + len(record.new_token_ids)
        if self._check_tokens is not None:
            self._tokens.setdefault(seq_id, []).extend(record.new_token_ids)
        if record.finish_reason is None:
            self._counts[seq_id] = count
            return
        self._counts.pop(seq_id, None)
        self._check_count(life, record, count)
        if self._check_tokens is not None:
            self._check_tokens(life.client, record.index, self._tokens.pop(seq_id))
        self.num_output_tokens += count
        life.num_open -= 1
        assert life.num_open >= 0, f"{record.request_id} ended more often than it has sequences"
        if not life.num_open:
            self._end(life, record.finish_reason)

    def _check_count(self, life: Life, record: SequenceOutput, count: int) -> None:
        sequence = life.client.request.sequences[record.index]
        limit = min(sequence.sampling.max_tokens, self._max_tokens - len(sequence.prompt_token_ids))
        match record.finish_reason:
            case FinishReason.LENGTH:
                assert count == limit, f"{record.request_id}: {count} tokens, limit {limit}"
            case FinishReason.STOP:
                assert count == life.client.num_output_tokens, f"{record.request_id}: {count} tokens at its end token"
            case FinishReason.SHED | FinishReason.DEADLINE:
                assert count == 0, f"{record.request_id} had begun and ends as {record.finish_reason}"
            case FinishReason.ERROR:
                assert count <= limit, f"{record.request_id}: {count} tokens, limit {limit}"
            case other:
                raise AssertionError(f"{record.request_id} ends as {other}")

    def _end(self, life: Life, reason: FinishReason) -> None:
        self.ends[reason.value] += 1
        life.has_begun = True
        del self._lives[life.client.request.request_id], self._by_first[life.first_seq_id]

    def _count_overtaken(self, arrival_s: float) -> None:
        """Who arrived at `arrival_s` has just begun: whose limit was before that?"""
        passed = []
        while self._waiting and self._waiting[0][0] < arrival_s:
            entry = heappop(self._waiting)
            if not entry[1].has_begun:
                passed.append(entry)
        for entry in passed:
            life = entry[1]
            life.overtaken += 1
            self.most_overtaken = max(self.most_overtaken, life.overtaken)
            may_pass = self._shape.may_pass
            assert may_pass is None or life.overtaken <= may_pass, (
                f"{life.client.request.request_id} was overtaken by {life.overtaken}; allowed: {may_pass}"
            )
            heappush(self._waiting, entry)
