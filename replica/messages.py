"""PURE. The contract between router and replica: everything that crosses the data plane.

All of it is frozen plain data. `msgspec` is both the type and the wire format (MessagePack): one
definition, no second schema to drift, no pickle from the network, and about 1 us per message.

Down the stream go `Submit`, `Abort`, `Ask` and questions; up come `SubmitReply`, `StepOutput` (one per engine step and
router, carrying every sequence of that router and the replica's load), `Grant` and `Draining`.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

from replica.hand_over_messages import Continue as Continue
from replica.hand_over_messages import KVSink as KVSink
from replica.hand_over_messages import KVSource as KVSource
from replica.hand_over_messages import Seated as Seated
from replica.kv_tier import KVTier as KVTier
from replica.permit_messages import Ask as Ask
from replica.permit_messages import Grant as Grant
from replica.permit_messages import Permit as Permit
from replica.permit_messages import Wish as Wish
from replica.stages import Chunk as Chunk
from replica.stages import Preempted as Preempted
from replica.stages import PreemptionCause as PreemptionCause
from replica.stages import SequenceAccount as SequenceAccount
from replica.stages import SequenceState as SequenceState
from replica.stages import Stages as Stages
from replica.stages import WaitCause as WaitCause
from replica.stages import WireRecord

#: the data plane's one gRPC method, and the longest message on it: a 100,000-token prompt is about 0.5 MB
METHOD = "/shoal.Replica/Connect"
MAX_MESSAGE_BYTES = 64 << 20
#: gRPC options of both ends: message sizes, and pings that find a dead host within 10 s
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
#: every router hears from a replica at least this often, so that silence means something
HEARTBEAT_S = 1.0

#: how much work llguidance may spend on one grammar: the same at the router, which checks it, and in the runner. Work
#: and not seconds, so that a grammar is accepted everywhere or nowhere. `step_*` bound one token's mask.
GRAMMAR_LIMITS: dict[str, int] = {
    "max_grammar_size": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 6_000,
    "max_lexer_states": 20_000,
}
#: upper bounds of the buckets of `ReplicaLoad.step_token_counts`, in tokens of a step; vLLM's
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: the same for `ReplicaLoad.step_sequence_counts`, in sequences, and `ReplicaLoad.step_second_counts`, in seconds
STEP_SEQUENCE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEP_SECOND_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
#: longest grammar in bytes
MAX_GRAMMAR_BYTES = 256 << 10

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
RouterId = NewType("RouterId", str)

#: (tenant turn, priority, arrival in seconds since the epoch): fixed by the router. What it means for the order is a
#: matter of the policy (`replica/order.py`).
OrderKey = tuple[float, int, float]


def aged_priority(order_key: OrderKey, ageing_s: float) -> float:
    """What router and replicas sort by under `priority`: `ageing_s` seconds of waiting are worth one level. Smaller
    goes first.
    """
    return order_key[1] * ageing_s + order_key[2]


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `MOVED` never reaches a client: the router continues the sequence elsewhere. `INVALID`
    reaches it as an error; so do `NOT_FINITE` and `DEADLINE`, and `SHED` unless another replica takes the request.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    MOVED = "moved"
    #: the sequence cannot go on as it was asked for, here or elsewhere: a grammar that cannot be followed, say
    INVALID = "invalid"
    #: the model computed NaN or infinity for it, and would again elsewhere: there is no token to choose
    NOT_FINITE = "not_finite"
    #: of a request that had not begun, all sequences at once: it made way for a more urgent one. Another replica may
    #: take it.
    SHED = "shed"
    #: of a request that had not begun, all sequences at once: its deadline has passed
    DEADLINE = "deadline"


class RefusalReason(enum.StrEnum):
    """Why a replica or router did not take a request."""

    QUEUE_FULL = "queue_full"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"
    #: the replica mends itself and will be ready again
    NOT_READY = "not_ready"
    #: longer than the context or the pool
    NEVER_FITS = "never_fits"
    #: more sequences in one request than the whole queue holds
    TOO_MANY_SEQUENCES = "too_many_sequences"
    #: no tokens, or ids that do not exist: a router checks that first
    INVALID = "invalid"
    #: an earlier attempt of the same request is still here
    DUPLICATE = "duplicate"
    #: too much work that is more urgent is queued
    SHED = "shed"
    #: its deadline had passed when it came
    DEADLINE = "deadline"


#: another replica would say the same
FINAL_REFUSALS = frozenset(
    {RefusalReason.NEVER_FITS, RefusalReason.TOO_MANY_SEQUENCES, RefusalReason.INVALID, RefusalReason.DEADLINE}
)


class Role(enum.StrEnum):
    """What a replica does (`docs/disaggregation.md`)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class SamplingParams(WireRecord, frozen=True):
    """How to choose the tokens of one sequence. Already validated and resolved by the router."""

    max_tokens: int
    #: 0 means greedy
    temperature: float = 1.0
    #: 0 means off
    top_k: int = 0
    top_p: float = 1.0
    #: the random number of output position i is a function of (seed, i) alone; 64 bit, unsigned
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    #: tokens less likely than this share of the likeliest are out; 0 means off
    min_p: float = 0.0
    #: over prompt and output: a logit above 0 is divided by it, one below multiplied; 1 means off
    repetition_penalty: float = 1.0
    #: over the output: taken off once, and once for each occurrence
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: token id -> what is added to its logit
    logit_bias: dict[int, float] = {}
    #: not empty: no other token may be chosen
    allowed_token_ids: tuple[int, ...] = ()
    #: no output may contain one of these token sequences
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: how many of the likeliest tokens to tell beside the chosen one at each output position; None: tell nothing
    num_logprobs: int | None = None
    #: the same over the prompt; the prefix cache is then not read, since its logits are not kept
    num_prompt_logprobs: int | None = None
    #: a grammar in llguidance's notation that the output follows; empty: none. Ends the sequence when it is complete.
    grammar: str = ""

    @property
    def has_rules(self) -> bool:
        """True if any token needs more than the sampler (`replica/sampling_rules.py`)."""
        return bool(
            self.min_tokens
            or self.num_logprobs is not None
            or self.num_prompt_logprobs is not None
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.grammar
        )


class SequenceInput(WireRecord, frozen=True):
    """One token stream of a request. `output_token_ids` is not empty when a stream is resumed."""

    index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []


class GenerateRequest(WireRecord, frozen=True):
    """What a router asks of a replica: accepted as a whole (all sequences) or refused as a whole."""

    request_id: RequestId
    sequences: list[SequenceInput]
    order_key: OrderKey = (0.0, 0, 0.0)
    cache_salt: str = ""
    #: seconds since the epoch, or None: when the request must have begun. What began in time is brought to its end.
    deadline_s: float | None = None
    #: resumed or moved in: it was accepted before, so no cap applies to any of its sequences
    is_returning: bool = False
    #: whose request it is, and that tenant's share of the work beside others
    tenant: str = ""
    tenant_weight: float = 1.0
    #: another replica computes the prompts: wait for it with a seat and blocks
    kv_source: KVSource | None = None
    #: another replica goes on: store the prompts' KV for it
    kv_sink: KVSink | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(sequence.prompt_token_ids) for sequence in self.sequences)


class ReplicaLoad(WireRecord, frozen=True):
    """What a replica tells about itself with each message. Counts are sequences, tokens or blocks.

    `counters` only grow during an incarnation; their names are in `docs/metrics.md`.
    """

    num_queued: int = 0
    num_returning: int = 0
    num_running: int = 0
    #: prompt tokens of queued and returning sequences
    num_queued_prompt_tokens: int = 0
    #: known tokens without KV yet, over all unfinished sequences
    num_uncomputed_tokens: int = 0
    #: tokens with KV that the next ones see, over the running sequences
    num_context_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    queue_cap: int = 0
    step: int = 0
    #: queued sequences that will leave the queue a second, as a forecast; 0 when unknown, or nobody is queued
    drain_rate: float = 0.0
    counters: dict[str, float] = {}
    #: steps by their number of tokens: one count a bound of `STEP_TOKEN_BOUNDS`, the last for longer ones; only grow
    step_token_counts: list[int] = []
    #: steps by the sequences in them, and by their duration; only grow
    step_sequence_counts: list[int] = []
    step_second_counts: list[int] = []
    #: how long the one that waits longest (queued or returning) has been waiting
    oldest_wait_s: float = 0.0
    #: slots of the running sequences' blocks without a token, over all slots of referenced blocks
    kv_fragmentation: float = 0.0
    #: under a policy with classes: (priority, `aged_priority`) of the last in the queue, whose place a more urgent
    #: request might take; None: nobody's
    last_queued: tuple[int, float] | None = None
    #: False while it mends itself: alive, but nothing can be placed there
    is_ready: bool = True
    #: it drains, was mended meanwhile, and takes returning requests until its time is up
    takes_returning: bool = False
    #: places in the queue that are reserved for requests which routers hold
    num_permits: int = 0
    #: of `num_uncomputed_tokens`, those that another replica computes
    num_awaited_tokens: int = 0
    #: seconds of a step, as measured: base, what each decode adds, and each prompt token; zeros: not measured
    step_line: tuple[float, float, float] = (0.0, 0.0, 0.0)
    #: prompt tokens that the next step may have
    num_step_prompt_tokens: int = 0


class TokenLogprobs(WireRecord, frozen=True):
    """How likely the token at one position was, and what else was likely, by the model's own distribution: before
    temperature, penalties, bias and masks.
    """

    logprob: float
    #: 1 is the likeliest
    rank: int
    #: likeliest first
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []


class SequenceOutput(WireRecord, frozen=True):
    """New tokens of one sequence in one step; the last one carries `finish_reason`."""

    request_id: RequestId
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: the stop token id that ended the sequence, None for eos
    stop_reason: int | None = None
    #: of the prompt, how many tokens came from the prefix cache
    num_cached_tokens: int = 0
    #: one entry a new token, where asked for
    logprobs: list[TokenLogprobs] = []
    #: with the first output of a sequence that asked for them: prompt positions 1, 2, ... (the first token has none)
    prompt_logprobs: list[TokenLogprobs] = []
    #: with the first token, and with the finish reason
    stages: Stages | None = None
    #: with `INVALID`, `SHED` and `DEADLINE`: a sentence for the client
    message: str = ""
    #: with its first token at this replica: how `StepOutput.seq_ids` will call it
    seq_id: int | None = None


class KVEvent(WireRecord, frozen=True):
    """A change of the set of cached block hashes. `stored` and `removed` hold block hashes; `cleared` empties first.

    With tier `pool`, of the replica's own pool, and `node`, if told, is that of its connector. With another one, of
    that node's tiers: `removed` are on none of them, `cleared` is all of them.
    """

    stored: list[bytes] = []
    removed: list[bytes] = []
    cleared: bool = False
    tier: KVTier = KVTier.POOL
    #: `KVPeer.peer_id` of a connector
    node: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit", gc=False):
    """Router to replica: take this request. `epoch` numbers the attempts of one request."""

    request: GenerateRequest
    epoch: int = 0
    permit: Permit | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort", gc=False):
    """Router to replica: end the sequences of a request (all of them, or those of `indices`)."""

    request_id: RequestId
    indices: list[int] | None = None


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset", gc=False):
    """Router to replica: forget every cached prefix. Running sequences keep their blocks, but nobody finds them."""

    reset_id: str


class Explain(msgspec.Struct, frozen=True, tag="explain", gc=False):
    """Router to replica: tell of a request, living or lately ended; with an empty id, of the `limit` requests that have
    been here longest.
    """

    question_id: str
    request_id: str = ""
    limit: int = 100


class Explained(msgspec.Struct, frozen=True, tag="explained", gc=False):
    """Replica to router: all that it knows, whichever router it belongs to. Nothing: it does not know the request."""

    question_id: str
    accounts: list[SequenceAccount]
    #: unfinished requests there, told of or not
    num_requests: int = 0


class ResetDone(msgspec.Struct, frozen=True, tag="reset_done", gc=False):
    """Replica to router: the prefix cache is empty."""

    reset_id: str


class SubmitReply(msgspec.Struct, frozen=True, tag="reply", gc=False):
    """Replica to router: accepted, or refused with a reason. Sent before any output of the request."""

    request_id: RequestId
    epoch: int
    load: ReplicaLoad
    refusal: RefusalReason | None = None
    message: str = ""


class StepOutput(msgspec.Struct, frozen=True, tag="step", gc=False):
    """Replica to router: what one step gave for this router's sequences, plus load and KV events.

    Most sequences get one token and nothing else is to be said: those are in `seq_ids` and `token_ids`, two parallel
    columns. `outputs` holds the rest, and the first token of each sequence at this replica, which gives its `seq_id`.
    A router without a token in the step gets a coalesced one at most every 50 ms.
    """

    incarnation: str
    load: ReplicaLoad
    outputs: list[SequenceOutput] = []
    kv_events: list[KVEvent] = []
    seq_ids: list[int] = []
    token_ids: list[int] = []


class Draining(msgspec.Struct, frozen=True, tag="draining", gc=False):
    """Replica to router: place nothing here any more; what still runs at `deadline_s` will be moved."""

    deadline_s: float


DownMessage = Submit | Abort | Ask | ResetPrefixCache | Explain | Continue
UpMessage = SubmitReply | StepOutput | Grant | Seated | Draining | ResetDone | Explained

_encoder = msgspec.msgpack.Encoder()
_down_decoder = msgspec.msgpack.Decoder(DownMessage)
_up_decoder = msgspec.msgpack.Decoder(UpMessage)


def encode(message: DownMessage | UpMessage) -> bytes:
    """Message to wire bytes."""
    return _encoder.encode(message)


def decode_down(data: bytes) -> DownMessage:
    """Wire bytes to a message for the replica. Raises `msgspec.DecodeError` on anything else."""
    return _down_decoder.decode(data)


def decode_up(data: bytes) -> UpMessage:
    """Wire bytes to a message for the router. Raises `msgspec.DecodeError` on anything else."""
    return _up_decoder.decode(data)
