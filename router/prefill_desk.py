"""PURE. The requests of one router that have two replicas, and the prefill replicas they may use.

Decides when a request is placed at a decode replica (first look, by estimates) and again when it has its seat (second
look: what D has itself is known then, and the queues are those of that moment). Orders collect in `outbox`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from replica.messages import KVSource, RefusalReason, ReplicaId, RequestId, Seated
from router.disaggregation import HandOverConfig, Side, Verdict, decide, fallback_line, side
from router.hand_over import HandOver, Stage
from router.instructions import Instruction
from router.journal import Journal
from router.replica_view import ReplicaView
from router.tracked import Tracked

#: D waits longer for `Continue` than the router for both of its tries
_MARGIN_S = 5.0


class PrefillDesk:
    """Knows hand-overs until the last sequence of each was continued."""

    def __init__(self, config: HandOverConfig, router_name: str, journal: Journal) -> None:
        self.config = config
        self._router_name = router_name
        self._journal = journal
        self.views: dict[ReplicaId, ReplicaView] = {}
        self.outbox: list[Instruction] = []
        self._hand_overs: dict[RequestId, HandOver] = {}
        self._legs: dict[RequestId, HandOver] = {}
        #: tokens of those that wait for a seat: P's will get them
        self._num_coming = 0
        #: attempts so far: names come from it
        self._num_begun = 0
        self.counters = {"remote": 0, "local": 0, "second_look_local": 0, "prefill_failed": 0}

    def __len__(self) -> int:
        return len(self._hand_overs)

    def __contains__(self, request_id: RequestId) -> bool:
        """Some sequence of it is to be continued."""
        return request_id in self._hand_overs

    def requests(self) -> list[RequestId]:
        """Those that have two replicas, or wait for a seat."""
        return list(self._hand_overs)

    # ---- decisions ----

    def begin(self, request: Tracked, decode: ReplicaView, now: float) -> KVSource | None:
        """A fresh request is on its way to `decode`: how it is to wait there, or None if it is to be computed there."""
        if not self.views or request.is_returning:
            return None
        verdict = self._look(request, decode, None, now)
        self.counters["remote" if verdict.is_remote else "local"] += 1
        if not verdict.is_remote:
            return None
        config, self._num_begun = self.config, self._num_begun + 1
        source = KVSource(
            f"{request.request_id}@{self._router_name}.{self._num_begun}",
            2 * config.prefill_timeout_s + _MARGIN_S,
            config.transfer_timeout_s,
        )
        self._hand_overs[request.request_id] = HandOver(request, decode.replica_id, source)
        self._num_coming += request.num_tokens
        return source

    def seated(self, message: Seated, decode: ReplicaView, now: float) -> None:
        """D has a seat and blocks. The first sequence's word counts for all: they share what P computes."""
        hand_over = self._hand_overs.get(RequestId(message.request_id))
        if hand_over is None or hand_over.source.hand_over != message.hand_over:
            return
        request = hand_over.request
        if not message.is_waiting:
            hand_over.open.discard(message.index)
        if not hand_over.open:
            self._drop_leg(hand_over, is_there=True)
            self._end(hand_over)
        elif hand_over.stage is Stage.SEATING and message.is_waiting:
            self._num_coming -= request.num_tokens
            hand_over.is_coming = False
            hand_over.num_cached_tokens = message.num_cached_tokens
            num_uncached = request.num_tokens - message.num_cached_tokens * request.num_sequences
            self._note(hand_over, now, "has its seat", cached_tokens=message.num_cached_tokens)
            if self._look(request, decode, num_uncached, now).is_remote:
                self._prefill(hand_over, now)
            else:
                self.counters["second_look_local"] += 1
                self._compute_there(hand_over, now, "computing there is faster after all")

    def _look(self, request: Tracked, decode: ReplicaView, num_uncached: int | None, now: float) -> Verdict:
        is_seated = num_uncached is not None
        line = fallback_line([decode, *self.views.values()])
        # the request itself is counted among what was sent to D, and is no work there
        own = 0 if is_seated else -request.num_tokens
        at_decode = side(decode, num_uncached, request.num_tokens, own, line)
        best = self._best(request, line, now)
        config = self.config
        if decode.kv_bytes_per_token:
            config = msgspec.structs.replace(config, bytes_per_token=decode.kv_bytes_per_token)
        verdict = decide(config, at_decode, None if best is None else best[1], is_seated)
        what = "prompt is computed " + ("elsewhere" if verdict.is_remote else "where it decodes")
        self._journal.note(request.request_id, now, what, why=verdict.reason, **verdict.terms)
        return verdict

    def _best(self, request: Tracked, line: tuple[float, float, float], now: float) -> tuple[ReplicaView, Side] | None:
        """The prefill replica that would have the first token soonest."""
        hand_over = self._hand_overs.get(request.request_id)
        tried = set() if hand_over is None else hand_over.tried
        able = [v for v in self.views.values() if v.is_placeable(now) and v.replica_id not in tried]
        able = [v for v in able if v.has_room_for(request.num_sequences)]
        coming = self._num_coming / max(1, len(self.views))
        sides = [(v, side(v, None, request.num_tokens, coming, line)) for v in able]
        return min(
            sides, key=lambda pair: (pair[1].first_token_s, pair[0].num_placed, pair[0].replica_id), default=None
        )

    # ---- what replicas say of legs ----

    def request_of(self, leg_id: RequestId, replica_id: ReplicaId, index: int) -> RequestId | None:
        """Whose first token this is; None: nobody's any more. The client gets it, then `prefilled` is called."""
        hand_over = self._legs.get(leg_id)
        if hand_over is None or hand_over.prefill_id != replica_id or index not in hand_over.open:
            return None
        return hand_over.request_id

    def on_reply(self, leg_id: RequestId, refusal: RefusalReason | None, now: float) -> None:
        """P's answer to a submission."""
        hand_over = self._legs.get(leg_id)
        if hand_over is None or hand_over.is_answered:
            return
        self._answered(hand_over)
        if refusal is not None:
            self._failed(hand_over, now, f"refused: {refusal}", is_there=False)

    def prefilled(self, leg_id: RequestId, tokens: dict[int, list[int]], ended: set[int], now: float) -> None:
        """First tokens of a leg are with the client; `ended`: sequences that are over with them."""
        hand_over = self._legs.get(leg_id)
        if hand_over is None:
            return
        self._answered(hand_over)  # its answer came before, or was lost
        self.outbox += hand_over.prefilled(tokens, ended)
        if not hand_over.open:
            self._note(hand_over, now, "first tokens here, the decode replica goes on")
            self._end(hand_over)

    def leg_failed(self, leg_id: RequestId, why: str, now: float) -> None:
        """P gave a sequence back, or its step failed."""
        if (hand_over := self._legs.get(leg_id)) is not None:
            self._failed(hand_over, now, why, is_there=True)

    def lost(self, replica_id: ReplicaId, now: float) -> None:
        """The stream of a P broke."""
        self.views.pop(replica_id, None)
        for hand_over in [h for h in self._hand_overs.values() if h.prefill_id == replica_id]:
            self._failed(hand_over, now, "its replica was lost", is_there=False)

    # ---- ends ----

    def stop(self, request_id: RequestId) -> None:
        """The request ended, or has left its decode replica. Idempotent."""
        if (hand_over := self._hand_overs.get(request_id)) is not None:
            self._drop_leg(hand_over, is_there=True)
            self._end(hand_over)

    def next_deadline(self) -> float | None:
        return min((h.deadline for h in self._hand_overs.values() if h.deadline is not None), default=None)

    def on_time(self, now: float) -> None:
        """Give up on prefills that took too long, and on replicas that are silent."""
        for hand_over in list(self._hand_overs.values()):
            if hand_over.prefill_id is None or hand_over.deadline is None:
                continue
            if hand_over.deadline <= now:
                self._failed(hand_over, now, "it took too long", is_there=True)
            elif (view := self.views.get(hand_over.prefill_id)) is not None and view.is_silent(now):
                self._failed(hand_over, now, "its replica is silent", is_there=True)

    def validate(self, is_at: Callable[[RequestId, ReplicaId, int], bool]) -> None:
        """`is_at`: a request is at that replica with that epoch. Raises AssertionError."""
        for hand_over in self._hand_overs.values():
            assert hand_over.stage is not Stage.OVER, f"{hand_over.request_id}: over, and still known"
            assert hand_over.open, f"{hand_over.request_id}: nobody is to be continued"
            place = (hand_over.request_id, hand_over.decode_id, hand_over.epoch)
            assert is_at(*place), f"{hand_over.request_id} has left its decode replica"
            assert hand_over.prefill_id is None or hand_over.prefill_id in self.views, "its prefill replica is gone"
            assert (hand_over.deadline is None) == (hand_over.stage is Stage.SEATING), "a wait without a deadline"
        under_way = {h.leg_id: h for h in self._hand_overs.values() if h.prefill_id is not None}
        assert under_way == self._legs, "legs without a hand-over, or the contrary"
        coming = sum(h.request.num_tokens for h in self._hand_overs.values() if h.is_coming)
        assert coming == self._num_coming, "coming tokens are counted wrongly"
        for view in self.views.values():
            sent = [h for h in self._legs.values() if h.prefill_id == view.replica_id and not h.is_answered]
            assert view.unanswered_sequences == sum(h.sent_sequences for h in sent), f"{view.replica_id}: unanswered"
            assert view.unanswered_tokens == sum(h.sent_tokens for h in sent), f"{view.replica_id}: unanswered tokens"

    # ---- inside ----

    def _prefill(self, hand_over: HandOver, now: float) -> None:
        request = hand_over.request
        best = self._best(request, fallback_line(list(self.views.values())), now)
        if best is None:
            self._compute_there(hand_over, now, "no prefill replica is up and has room")
            return
        view = best[0]
        order = hand_over.prefill_at(view.replica_id, now + self.config.prefill_timeout_s)
        hand_over.sent_sequences = len(order.indices)
        hand_over.sent_tokens = request.num_tokens * len(order.indices) // request.num_sequences
        view.sent(hand_over.sent_sequences, hand_over.sent_tokens)
        self._legs[order.leg_id] = hand_over
        self.outbox.append(order)
        self._note(hand_over, now, "prefill placed", replica=view.replica_id, leg=order.leg_id)

    def _failed(self, hand_over: HandOver, now: float, why: str, is_there: bool) -> None:
        """Another P once, then D."""
        self.counters["prefill_failed"] += 1
        self._note(hand_over, now, "prefill failed", replica=hand_over.prefill_id, why=why)
        self._drop_leg(hand_over, is_there)
        if hand_over.may_try_again:
            self._prefill(hand_over, now)
        else:
            self._compute_there(hand_over, now, "no prefill replica was left to try")

    def _compute_there(self, hand_over: HandOver, now: float, why: str) -> None:
        self._note(hand_over, now, "the decode replica computes the prompt", why=why)
        self.outbox += hand_over.compute_there()
        self._end(hand_over)

    def _drop_leg(self, hand_over: HandOver, is_there: bool) -> None:
        if hand_over.prefill_id is None:
            return
        self._answered(hand_over)
        del self._legs[hand_over.leg_id]
        self.outbox += hand_over.drop_leg(is_there)

    def _answered(self, hand_over: HandOver) -> None:
        if hand_over.is_answered or hand_over.prefill_id is None:
            return
        hand_over.is_answered = True
        if (view := self.views.get(hand_over.prefill_id)) is not None:
            view.answered(hand_over.sent_sequences, hand_over.sent_tokens)

    def _end(self, hand_over: HandOver) -> None:
        if (leg := self._legs.pop(hand_over.leg_id, None)) is not None:
            self._answered(leg)
        if hand_over.is_coming:
            self._num_coming -= hand_over.request.num_tokens
            hand_over.is_coming = False
        hand_over.close()
        del self._hand_overs[hand_over.request_id]

    def _note(self, hand_over: HandOver, now: float, what: str, **detail: object) -> None:
        self._journal.note(hand_over.request_id, now, what, **detail)
