"""PURE. The running sequences as columns: what a step does to all of them alike is one array operation, not a loop.

A step of 1,024 running sequences cost 0.73 us a sequence in `schedule` and 1.5 in `update` as loops over objects, 0.13
and 0.45 as columns. What differs from one sequence to the next (a block border, an end, a first token) goes through
Python, for those rows alone: `look_at` says when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import compress

import numpy as np
import numpy.typing as npt

from replica.messages import RouterId
from replica.sequence import Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Decodes:
    """Running sequences that lack exactly one token, in admission order, as parallel columns. A copy: it stays as it
    is whatever leaves the running set.
    """

    __slots__ = ("rows", "seq_ids", "token_lists")

    def __init__(self, rows: Ints, seq_ids: list[int], token_lists: list[list[int]]) -> None:
        self.rows = rows
        self.seq_ids = seq_ids
        #: the sequences' own lists of tokens
        self.token_lists = token_lists

    def __len__(self) -> int:
        return len(self.seq_ids)

    def first(self, count: int) -> Decodes:
        """The first `count` of them."""
        if count >= len(self.seq_ids):
            return self
        return Decodes(self.rows[:count], self.seq_ids[:count], self.token_lists[:count])

    def only(self, mask: Bools) -> Decodes:
        """Those where `mask` is true."""
        flags = mask.tolist()
        return Decodes(self.rows[mask], list(compress(self.seq_ids, flags)), list(compress(self.token_lists, flags)))


class RunningSet:
    """Each running sequence owns a row, from `add` to `remove`; rows are found by `Sequence.row`, used again, and more
    are made on demand. Iteration is in admission order. Knows no blocks and decides nothing.
    """

    def __init__(self, block_size: int, is_caching: bool, window: int | None = None, num_rows: int = 16) -> None:
        """`window`: of a model all of whose layers have one, in tokens."""
        self._block_size = block_size
        self._window = window
        self._is_caching = is_caching
        self.num_tokens: Ints = np.zeros(num_rows, np.int64)
        self.num_computed: Ints = np.zeros(num_rows, np.int64)
        #: tokens that the block table covers
        self.room: Ints = np.zeros(num_rows, np.int64)
        #: the number of tokens from which on a new token needs more than to be counted; 0: every token does
        self.look_at: Ints = np.zeros(num_rows, np.int64)
        #: part of the step that the runner works on
        self.in_step: Bools = np.zeros(num_rows, np.bool_)
        self._priority: npt.NDArray[np.float64] = np.zeros(num_rows, np.float64)
        self._router: Ints = np.zeros(num_rows, np.int64)
        self._routers = _RouterNumbers()
        #: how many each tenant has, and its weight; only of those that have some
        self.tenants: dict[str, int] = {}
        self.weights: dict[str, float] = {}
        self._by_row: list[Sequence | None] = [None] * num_rows
        self._free_rows = list(range(num_rows))[::-1]
        # four columns in admission order; of the first one, the leading `len(self)` entries count
        self._order: Ints = np.zeros(num_rows, np.int64)
        self._sequences: list[Sequence] = []
        self._seq_ids: list[int] = []
        self._token_lists: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        """The one admitted last comes first."""
        return reversed(self._sequences)

    @property
    def max_priority(self) -> float:
        """Of the least urgent one; somebody runs."""
        return float(self._priority[self._order[: len(self)]].max())

    def count_tokens(self) -> tuple[int, int]:
        """Tokens that are to be computed, and those with KV that the next ones see. Rows that nobody owns hold zeros,
        so no look at who runs is needed.
        """
        num_computed = int(self.num_computed.sum())
        num_uncomputed = int(self.num_tokens.sum()) - num_computed
        if self._window is None:
            return num_uncomputed, num_computed
        return num_uncomputed, int(np.minimum(self.num_computed, self._window).sum())

    @property
    def num_unfilled_slots(self) -> int:
        """Of their blocks, slots that hold no token yet."""
        return int(self.room.sum() - self.num_computed.sum())

    def is_owned(self, row: int) -> bool:
        return self._by_row[row] is not None

    def owner(self, row: int) -> Sequence:
        """Whose row it is; somebody's."""
        sequence = self._by_row[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Take it in as the one admitted last, with the blocks it holds."""
        if not self._free_rows:
            self._make_rows()
        row = self._free_rows.pop()
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = sequence.num_computed_tokens
        self._priority[row] = sequence.order_key[1]
        self._router[row] = self._routers.take(sequence.router_id)
        self.tenants[sequence.tenant] = self.tenants.get(sequence.tenant, 0) + 1
        self.weights[sequence.tenant] = sequence.tenant_weight
        self._by_row[row] = sequence
        self._order[len(self)] = row
        self._sequences.append(sequence)
        self._seq_ids.append(sequence.seq_id)
        self._token_lists.append(sequence.token_ids)
        sequence.enter(self, row)
        self.cover(sequence)
        self.settle(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Give its row back; it keeps its counts."""
        row = sequence.leave()
        count = len(self)
        order = self._order[:count]
        position = int((order == row).argmax())
        order[position : count - 1] = order[position + 1 :].copy()
        del self._sequences[position], self._seq_ids[position], self._token_lists[position]
        self.num_tokens[row] = self.num_computed[row] = self.room[row] = 0
        self.in_step[row] = False
        self._routers.drop(sequence.router_id)
        self.tenants[sequence.tenant] -= 1
        if not self.tenants[sequence.tenant]:
            del self.tenants[sequence.tenant], self.weights[sequence.tenant]
        self._by_row[row] = None
        self._free_rows.append(row)

    def cover(self, sequence: Sequence) -> None:
        """Its block table has grown."""
        self.room[sequence.row] = len(sequence.block_ids) * self._block_size

    def settle(self, sequence: Sequence) -> None:
        """Compute again from when on its tokens need a look: call it when blocks were committed or given back, when the
        first token is out, and when it was aborted.
        """
        sampling = sequence.sampling
        if (
            sequence.first_token_at is None
            or sequence.abort_reason is not None
            or sampling.stop_token_ids
            or sampling.num_logprobs is not None
        ):
            look_at = 0
        elif self._is_caching:
            # the token that fills a block is computed one step later, when there is one token more
            look_at = min(sequence.max_total_tokens, (sequence.num_blocks_committed + 1) * self._block_size + 1)
        elif self._window is not None:  # blocks that it has passed are given back at borders
            num_full = sequence.num_computed_tokens // self._block_size
            look_at = min(sequence.max_total_tokens, (num_full + 1) * self._block_size + 1)
        else:
            look_at = sequence.max_total_tokens
        self.look_at[sequence.row] = look_at

    def split(self) -> tuple[Decodes, list[Sequence]]:
        """Who lacks one token, and who is in the middle of the prompt; both in admission order."""
        rows = self._order[: len(self)].copy()
        is_decode = self.num_tokens[rows] - self.num_computed[rows] == 1
        everyone = Decodes(rows, self._seq_ids.copy(), self._token_lists.copy())
        if is_decode.all():
            return everyone, []
        return everyone.only(is_decode), list(compress(self._sequences, (~is_decode).tolist()))

    def without_room(self, decodes: Decodes) -> list[int]:
        """Rows whose last known token has no block yet."""
        rows = decodes.rows
        found: list[int] = rows[self.num_tokens[rows] > self.room[rows]].tolist()
        return found

    def still(self, decodes: Decodes) -> Decodes:
        """Those of them that were not removed meanwhile; nobody else may have been added."""
        return decodes.only(self.num_tokens[decodes.rows] > 0)

    def advance(self, decodes: Decodes, token_ids: list[int]) -> list[int]:
        """One token was computed for each and the next one sampled. Returns the positions in `decodes` that need a
        look.
        """
        rows = decodes.rows
        self.num_computed[rows] += 1
        num_tokens = self.num_tokens[rows] + 1
        self.num_tokens[rows] = num_tokens
        # the C loop takes 27 ns a sequence, `for ... append` 35
        deque(map(list.append, decodes.token_lists, token_ids), maxlen=0)
        positions: list[int] = np.flatnonzero(num_tokens >= self.look_at[rows]).tolist()
        return positions

    def by_router(
        self, rows: Ints, seq_ids: list[int], token_ids: list[int]
    ) -> Iterator[tuple[RouterId, list[int], list[int]]]:
        """The parallel columns `seq_ids` and `token_ids`, cut into one pair of columns a router."""
        if not seq_ids:
            return
        numbers = self._router[rows]
        if (numbers == numbers[0]).all():
            yield self._routers.name(int(numbers[0])), seq_ids, token_ids
            return
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            positions = np.flatnonzero(numbers == number).tolist()
            yield (
                self._routers.name(number),
                list(map(seq_ids.__getitem__, positions)),
                list(map(token_ids.__getitem__, positions)),
            )

    def validate(self) -> None:
        """Check every column against the sequences. Raises AssertionError."""
        rows = [sequence.row for sequence in self]
        assert self._order[: len(self)].tolist() == rows, "rows are not in admission order"
        assert sorted([*rows, *self._free_rows]) == list(range(len(self._by_row))), "a row is lost or has two owners"
        assert self._seq_ids == [sequence.seq_id for sequence in self], "ids are not those of the sequences"
        assert all(a is s.token_ids for a, s in zip(self._token_lists, self, strict=True)), "tokens of somebody else"
        for sequence in self:
            row = sequence.row
            assert self._priority[row] == float(sequence.order_key[1]), f"{sequence}: priority {self._priority[row]}"
            assert self._by_row[row] is sequence, f"{sequence} does not own row {row}"
            assert self.num_tokens[row] == sequence.num_tokens, f"{sequence}: {self.num_tokens[row]} tokens counted"
            assert self.room[row] == len(sequence.block_ids) * self._block_size, f"{sequence}: room {self.room[row]}"
            assert self._routers.name(int(self._router[row])) == sequence.router_id, f"{sequence}: wrong router"
            if self._is_caching:
                committed, computed = sequence.num_blocks_committed, sequence.num_computed_tokens
                assert committed == computed // self._block_size, f"{sequence} has {committed} blocks registered"
            look_at = int(self.look_at[row])
            self.settle(sequence)
            assert look_at <= self.look_at[row], f"{sequence} would be looked at only at {look_at} tokens"
            self.look_at[row] = look_at
        for row in self._free_rows:
            assert self._by_row[row] is None, f"row {row} is free and owned"
            counts = (self.num_tokens[row], self.num_computed[row], self.room[row], self.in_step[row])
            assert not any(counts), f"row {row} is free and holds {counts}"
        self._routers.validate([sequence.router_id for sequence in self])
        assert self.tenants == Counter(sequence.tenant for sequence in self), "tenants are counted wrongly"

    def _make_rows(self) -> None:
        """Twice as many."""
        count = len(self._by_row)
        for name in ("num_tokens", "num_computed", "room", "look_at", "in_step", "_priority", "_router", "_order"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(count, column.dtype)]))
        self._by_row += [None] * count
        self._free_rows += range(2 * count - 1, count - 1, -1)


class _RouterNumbers:
    """A small number for each router that has a running sequence: array columns hold numbers, not names."""

    def __init__(self) -> None:
        self._numbers: dict[RouterId, int] = {}
        self._names: list[RouterId] = []
        self._counts: list[int] = []
        self._free: list[int] = []

    def take(self, router_id: RouterId) -> int:
        """The number of `router_id`, which has one running sequence more."""
        number = self._numbers.get(router_id)
        if number is None:
            if not self._free:
                self._free.append(len(self._names))
                self._names.append(router_id)
                self._counts.append(0)
            number = self._numbers[router_id] = self._free.pop()
            self._names[number] = router_id
        self._counts[number] += 1
        return number

    def drop(self, router_id: RouterId) -> None:
        """One less; the number of the last one is free again, so that routers may come and go for ever."""
        number = self._numbers[router_id]
        self._counts[number] -= 1
        if not self._counts[number]:
            self._free.append(self._numbers.pop(router_id))

    def name(self, number: int) -> RouterId:
        return self._names[number]

    def validate(self, router_ids: list[RouterId]) -> None:
        """Check against the routers of all running sequences. Raises AssertionError."""
        counts = {name: self._counts[number] for name, number in self._numbers.items()}
        assert counts == Counter(router_ids), "routers are counted wrongly"
        assert sorted([*self._numbers.values(), *self._free]) == list(range(len(self._names))), "a number is lost"
        assert all(self._names[number] == name for name, number in self._numbers.items()), "a number has two names"
