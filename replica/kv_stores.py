"""PURE. Which computed blocks go to the connector, a bounded number at a time.

Registered blocks wait in a backlog that holds nothing: whoever needs the pool may take them, and then they are not
stored. When there is room on the way, the oldest are pinned and *reserved*; those that the connector wants are copied,
and sealed. A sequence that is put back may have its blocks pinned at once, beyond the bound (`must_stay`), and so may
one whose prompt another replica goes on with (`replica/sink_stores.py`): these come first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from replica.block_manager import BlockManager
from replica.block_offers import Offer
from replica.copy_line import CopyJob
from replica.kv_messages import Reserve, Seal
from replica.sink_stores import SinkStores

#: hashes of one Reserve
_MOST_AT_ONCE = 64

#: blocks for another replica that are on their way at once: 92 MB of 360 KiB
_MOST_FOR_SINKS = 256
#: somebody waits for them, so an answer may take as long
_SINK_PATIENCE_S = 2.0

#: blocks on their way while a copy takes longer than to compute
_TRICKLE = 2


class Reservation:
    """Blocks that were offered together; pinned until they are refused, given up or copied."""

    __slots__ = (
        "block_ids",
        "hashes",
        "is_copying",
        "is_for_sink",
        "is_orphan",
        "is_void",
        "must_stay",
        "positions",
        "reservation_id",
        "until",
    )

    def __init__(
        self, reservation_id: int, hashes: list[bytes], block_ids: list[int], must_stay: bool, until: float
    ) -> None:
        self.reservation_id = reservation_id
        self.hashes = hashes
        self.block_ids = block_ids
        self.must_stay = must_stay
        #: given up then, without an answer
        self.until = until
        self.is_copying = False
        self.is_for_sink = False
        #: do not seal it
        self.is_void = False
        #: its connector is gone
        self.is_orphan = False
        #: of those that the connector wants, in `hashes`
        self.positions: list[int] = []


class BlockStores:
    """Sends nothing itself."""

    def __init__(self, blocks: BlockManager, most_pinned: int, patience_s: float) -> None:
        """`patience_s`: an offer waits so long for its answer."""
        self._blocks = blocks
        self._most_pinned = most_pinned
        self._patience_s = patience_s
        self.sinks = SinkStores(blocks)
        self._backlog: dict[bytes, Offer] = {}
        self._reservations: dict[int, Reservation] = {}
        #: given up before they were answered
        self._unwanted: set[int] = set()
        #: hash -> on its way
        self._under_way: set[bytes] = set()
        self._num_pinned = 0
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._reservations)

    def is_under_way(self, block_hash: bytes) -> bool:
        return block_hash in self._under_way

    def offer(self, offers: Iterable[Offer]) -> None:
        """These were registered."""
        self._backlog.update((offer.block_hash, offer) for offer in offers)

    def reserve(self, known: Container[bytes], is_worth_it: bool, now: float) -> Reserve | None:
        """As many of the backlog as may be on their way; `known`: the connector has those already. While it is not
        worth it, hardly any: what is pinned is missed, and a few are enough to see when that changes.
        """
        most = self._most_pinned if is_worth_it else min(_TRICKLE, self._most_pinned)
        room, backlog = min(_MOST_AT_ONCE, most - self._num_pinned), self._backlog
        offers: list[Offer] = []
        while backlog and len(offers) < room:
            offer = backlog.pop(next(iter(backlog)))
            block_hash = offer.block_hash
            is_there = self._blocks.has(block_hash, offer.block_id)
            if is_there and block_hash not in known and block_hash not in self._under_way:
                offers.append(offer)
        return self._begin(offers, False, now + self._patience_s)

    def reserve_for_sinks(self, now: float) -> list[Reserve]:
        """What was computed for others, whatever else is on its way, and also if the connector is said to have it:
        that may have changed, and then somebody would wait in vain.
        """
        self.sinks.collect()
        messages: list[Reserve] = []
        room = _MOST_FOR_SINKS - sum(len(r.block_ids) for r in self._reservations.values() if r.is_for_sink)
        while room > 0 and (offers := self.sinks.pop(min(_MOST_AT_ONCE, room), self.is_under_way)):
            message = self._begin(offers, True, now + _SINK_PATIENCE_S)
            assert message is not None, "something is offered"
            self._reservations[message.reservation_id].is_for_sink = True
            messages.append(message)
            room -= len(offers)
            self._blocks.unpin([offer.block_id for offer in offers])  # the reservation has its own
            for offer in offers:
                self._backlog.pop(offer.block_hash, None)
        return messages

    def keep(self, blocks: list[Offer], known: Container[bytes], now: float) -> Reserve | None:
        """Of a sequence that is put back: all of these that are not there yet, whatever is on its way."""
        for reservation in self._reservations.values():
            reservation.must_stay |= any(one.block_hash in reservation.hashes for one in blocks)
        missing = [one for one in blocks if one.block_hash not in known and one.block_hash not in self._under_way]
        return self._begin(missing, True, now + self._patience_s)

    def reserved(self, reservation_id: int, slots: list[int]) -> CopyJob | Seal | None:
        """Answered: copies to be made, or how to end it; None if it is of no concern."""
        if reservation_id in self._unwanted:
            self._unwanted.discard(reservation_id)
            return Seal(reservation_id, [])
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.is_copying:
            return None
        wanted = [i for i, slot in enumerate(slots[: len(reservation.hashes)]) if slot >= 0]
        if not wanted:
            self._forget(reservation)
            return Seal(reservation_id, [])
        refused = set(range(len(reservation.hashes))) - set(wanted)
        self._drop_pins([reservation.block_ids[i] for i in refused])
        self._under_way.difference_update(reservation.hashes[i] for i in refused)
        reservation.positions, reservation.is_copying = wanted, True
        reservation.hashes = [reservation.hashes[i] for i in wanted]
        reservation.block_ids = [reservation.block_ids[i] for i in wanted]
        pairs = list(zip(reservation.block_ids, (slots[i] for i in wanted), strict=True))
        return CopyJob(pairs, False, reservation)

    def copied(self, reservation: Reservation, ok: bool) -> tuple[Seal | None, list[bytes]]:
        """Its copies are over. The hashes are those that can be found from now on."""
        is_good = ok and not reservation.is_void
        self._forget(reservation)
        if reservation.is_orphan:
            return None, []
        if not is_good:
            return Seal(reservation.reservation_id, []), []
        return Seal(reservation.reservation_id, reservation.positions), reservation.hashes

    def give_up(self, now: float = float("inf"), with_kept: bool = True) -> bool:
        """Take back what was offered, not answered, and has waited long enough. Returns whether there was any."""
        late = [
            reservation
            for reservation in self._reservations.values()
            if not reservation.is_copying
            and reservation.until <= now + 1e-9
            and (with_kept or not reservation.must_stay)
        ]
        for reservation in late:
            self._unwanted.add(reservation.reservation_id)
            self._forget(reservation)
        return bool(late)

    def void_all(self) -> None:
        """What is on its way must not be found: the cache was emptied. Copies go on, and are not sealed."""
        self.sinks.clear(is_again=False)
        self._void()

    def forget_connector(self) -> None:
        """It is gone, and with it whatever it was asked. Copies go on."""
        self.sinks.clear(is_again=True)
        self._void()
        self._unwanted.clear()
        for reservation in self._reservations.values():
            reservation.is_orphan = True

    def next_deadline(self) -> float | None:
        """When something is given up."""
        return min((r.until for r in self._reservations.values() if not r.is_copying), default=None)

    def validate(self) -> None:
        """Raises AssertionError."""
        reservations = self._reservations.values()
        assert self._num_pinned == sum(len(r.block_ids) for r in reservations), "pins are counted wrongly"
        assert self._under_way == {h for r in reservations for h in r.hashes}, "what is under way is not clear"
        assert not self._unwanted & self._reservations.keys(), "given up and not"

    def _void(self) -> None:
        self._backlog.clear()
        self.give_up()
        for reservation in self._reservations.values():
            reservation.is_void = True

    def _begin(self, offers: list[Offer], must_stay: bool, until: float) -> Reserve | None:
        if not offers:
            return None
        hashes, block_ids = [one.block_hash for one in offers], [one.block_id for one in offers]
        reservation = Reservation(self._next_id, hashes, block_ids, must_stay, until)
        self._next_id += 1
        self._reservations[reservation.reservation_id] = reservation
        self._blocks.pin(block_ids)
        self._num_pinned += len(block_ids)
        self._under_way.update(hashes)
        parents, positions = [one.parent for one in offers], [one.position for one in offers]
        return Reserve(reservation.reservation_id, hashes, must_stay, parents, positions)

    def _forget(self, reservation: Reservation) -> None:
        del self._reservations[reservation.reservation_id]
        self._under_way.difference_update(reservation.hashes)
        self._drop_pins(reservation.block_ids)

    def _drop_pins(self, block_ids: list[int]) -> None:
        self._num_pinned -= len(block_ids)
        self._blocks.unpin(block_ids)
