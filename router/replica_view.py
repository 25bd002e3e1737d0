"""PURE. What this router believes about one replica, as of the last message from it."""

from __future__ import annotations

from collections.abc import Iterable

from replica.messages import ReplicaId, ReplicaLoad, Role
from router.permit_stock import PermitStocks
from router.refusals import Refusals
from router.tracked import Tracked

#: replicas report at least once a second; three missed reports and nothing new is placed there
MAX_SILENCE_S = 3.0


class ReplicaView:
    """A dated belief. Exact but for what other routers did since the last message.

    What was sent and not yet answered is added on top: the answer carries a load that already counts it.
    """

    __slots__ = (
        "address",
        "incarnation",
        "is_connected",
        "is_draining",
        "kv_bytes_per_token",
        "kv_node",
        "load",
        "load_at",
        "num_news",
        "num_placed",
        "permits",
        "refusals",
        "replica_id",
        "role",
        "unanswered_sequences",
        "unanswered_tokens",
    )

    def __init__(self, replica_id: ReplicaId, address: str, incarnation: str, role: Role = Role.BOTH) -> None:
        self.replica_id = replica_id
        self.role = role
        self.address = address
        self.incarnation = incarnation
        #: as it told Serve; 0: unknown
        self.kv_bytes_per_token = 0.0
        self.is_connected = False
        self.is_draining = False
        #: whose KV tiers it reads (`kv_tiers.py`); empty: none
        self.kv_node = ""
        self.load = ReplicaLoad()
        self.load_at = float("-inf")
        #: load messages so far
        self.num_news = 0
        #: requests this router ever sent there; breaks ties
        self.num_placed = 0
        self.permits = PermitStocks()
        self.refusals = Refusals()
        self.unanswered_sequences = 0
        self.unanswered_tokens = 0

    def hear(self, load: ReplicaLoad, now: float) -> None:
        """A message of the replica came."""
        self.load, self.load_at = load, now
        self.num_news += 1
        self.refusals.look(load)

    @property
    def is_open(self) -> bool:
        """Connected, not on its way out, and not mending itself."""
        return self.is_connected and not self.is_draining and self.load.is_ready

    def is_placeable(self, now: float) -> bool:
        """Open, and heard from lately: a replica that was stopped (SIGSTOP) or cut off keeps its stream for a while."""
        return self.is_open and self._is_heard(now)

    def takes_back(self, now: float) -> bool:
        """On its way out, but its ranks were lost and are whole again: it takes what it had to give back."""
        is_there = self.is_connected and self.is_draining and self._is_heard(now)
        return is_there and self.load.is_ready and self.load.takes_returning

    def may_take_back(self, now: float) -> bool:
        """The same, or it may come to that: it is open, or mends itself."""
        is_alive = self.is_connected and self._is_heard(now)
        return is_alive and (self.takes_back(now) or not self.load.is_ready or not self.is_draining)

    def is_silent(self, now: float) -> bool:
        """Its stream stands, and nothing comes."""
        return self.is_connected and not self._is_heard(now)

    def _is_heard(self, now: float) -> bool:
        return now - self.load_at <= MAX_SILENCE_S

    @property
    def outstanding_tokens(self) -> int:
        """Work in tokens: prompts to compute, plus the contexts that each further step reads."""
        return self.load.num_uncomputed_tokens + self.load.num_context_tokens + self.unanswered_tokens

    def has_room_for(self, num_sequences: int, tenant: str = "") -> bool:
        """Places are reserved for the tenant here, or believed: the queue takes `num_sequences` more."""
        load = self.load
        num_taken = load.num_queued + load.num_permits + self.unanswered_sequences
        return num_taken + num_sequences <= load.queue_cap or self.permits.num_available(tenant) >= num_sequences

    def describe(self, description: str, now: float) -> dict[str, object]:
        """For `shoal status`; `description` is what the replica told Serve of itself."""
        load = self.load
        return {
            "replica_id": self.replica_id,
            "address": self.address,
            "role": self.role.value,
            "description": description,
            "state": self.state(now),
            "queued": load.num_queued,
            "permits": load.num_permits,
            "queue_cap": load.queue_cap,
            "returning": load.num_returning,
            "running": load.num_running,
            "kv_blocks": load.num_blocks,
            "kv_blocks_free": load.num_free_blocks,
            "kv_node": self.kv_node,
            "step": load.step,
            "oldest_wait_s": load.oldest_wait_s,
            "kv_fragmentation": load.kv_fragmentation,
            "config": f"{int(load.counters.get('config_number', 0)):08x}",
            "counters": load.counters,
        }

    def state(self, now: float) -> str:
        """In a word: up, draining, silent, or restarting its ranks."""
        if self.is_draining:
            return "draining"
        if self.is_placeable(now):
            return "up"
        return "silent" if self.load.is_ready else "restarting"

    def validate(self, unanswered: Iterable[Tracked]) -> None:
        """`unanswered`: the requests on their way there. Raises AssertionError if they are not the ones it counts."""
        sent = list(unanswered)
        assert self.unanswered_sequences == sum(r.num_sequences for r in sent), f"{self.replica_id}: unanswered"
        assert self.unanswered_tokens == sum(r.num_tokens for r in sent), f"{self.replica_id}: unanswered tokens"

    def sent(self, num_sequences: int, num_tokens: int) -> None:
        """A request of ours is on its way there."""
        self.num_placed += 1
        self.unanswered_sequences += num_sequences
        self.unanswered_tokens += num_tokens

    def answered(self, num_sequences: int, num_tokens: int) -> None:
        """It was taken or refused, or is no longer waited for."""
        self.unanswered_sequences -= num_sequences
        self.unanswered_tokens -= num_tokens
