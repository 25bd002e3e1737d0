"""ASYNC. A replica's ranks as one runner: same interface as `RunnerThread`, and it can be mended.

Ranks are started side by side by a `Launcher` (Ray's is `replica/worker_group.py`), come in through a `RankDoor` and
meet in *generations*: whoever is lost ends the generation, is killed and started again, the others keep their weights,
and all begin the next generation without any sequence.

    launch ──hello──> here ──join──> ready ──(steps)──> left ──join──> ready ...
                        └──────── gone (socket closed, process ended, stopped, hung) ──> launch
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from replica import group_health
from replica.errors import EngineError, InvalidRequestError, RanksLostError, ShoalError
from replica.group_figures import GroupFigures
from replica.group_health import Loss, LossCause, RankSign, StepLimits, StepSign
from replica.rank_link import Endpoint, Grammar, Join, Lead, Leave, RankDoor, RankLink
from replica.rank_seat import Launched, RankSeat, error_of
from replica.step import RunnerInfo, StepPlan, StepResult
from replica.step_channel import HAS_SHARED_MEMORY, FrameWriter, Pulse, decode_result, encode_step

logger = logging.getLogger(__name__)

#: a survivor that has not left its generation by then is killed as well
LEAVE_S = 5.0
#: starting again fails for good after so many attempts
MAX_ATTEMPTS = 3
#: what a rank may take from its launch to its first word: a process, and imports
HELLO_S = 120.0
MIB = 1 << 20
#: the slowest rank has not read a frame: look again so soon
_ROOM_S = 0.001
#: in a step that waits for copies, other ranks than the first get so much more time, else such steps would spin
_COPY_S = 0.001
#: a rank that dies makes its peers raise from a collective, and their word may come before its socket closes
_PEER_S = 0.2


class Launcher(Protocol):
    """Starts the process of a rank."""

    def __call__(self, rank: int, endpoint: Endpoint) -> Launched:
        """At once; the process comes in at `endpoint`."""
        ...


class RankGroup:
    """`size` ranks. `node` names the node of this process; `host`: where ranks of other nodes can reach it, if any.
    `tell` gets a sentence when ranks are lost, and one when the group is whole again.
    """

    def __init__(
        self,
        launcher: Launcher,
        size: int,
        node: str,
        host: str | None = None,
        use_shared_memory: bool = True,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._launcher, self._size, self._node, self._host = launcher, size, node, host
        self._use_shared_memory = use_shared_memory and HAS_SHARED_MEMORY
        #: called when ranks are lost; then `recover` mends the group
        self.on_loss: Callable[[], object] = lambda: None
        self.is_lost = False
        self._tell = tell
        self._figures = GroupFigures(size)
        self.counters = self._figures.counters
        self._why = ""
        self._changed = asyncio.Event()
        self._generation = 0
        self._writer: FrameWriter | None = None
        self._is_stepping = False
        self._num_frames = 0
        self._unsent: deque[bytes] = deque()
        self._future: asyncio.Future[StepResult] | None = None
        self._step = (0.0, 0)  # when it began, its tokens
        self._last: StepResult | None = None
        #: the step waits for copies only
        self._waits = False
        self._limits = StepLimits()
        self._grammars: dict[int, asyncio.Future[None]] = {}
        self._next_grammar_id = 0
        self._watcher: asyncio.Task[None] | None = None
        #: a rank raised, and will be blamed unless another one is gone
        self._blaming: asyncio.TimerHandle | None = None
        self._is_closed = False

    # ---- the runner's interface ----

    async def start(self) -> RunnerInfo:
        """Launch all ranks and load. Raises ModelLoadError or ConfigError as a rank did, EngineError for the rest."""
        self._loop = asyncio.get_running_loop()
        self._pulse = Pulse(self._size)
        self._door = RankDoor(self._node, self._host, self._on_hello)
        self._seats = [
            RankSeat(rank, self._size, self._pulse, self._on_seat, self._figures.lost) for rank in range(self._size)
        ]
        self._watcher = asyncio.create_task(self._watch(), name="shoal-ranks")
        began = time.monotonic()
        await self._begin_generation(is_first=True)
        logger.info("%d ranks are ready after %.1f s", self._size, time.monotonic() - began)
        return self._info()

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Begin a step at once; the future gives rank 0's result or raises RanksLostError."""
        future: asyncio.Future[StepResult] = self._loop.create_future()
        if self.is_lost:
            future.set_exception(RanksLostError(self._why))
            return future
        assert self._future is None, "one step at a time"
        self._future, self._step = future, (time.monotonic(), plan.num_tokens)
        self._waits = plan.waits_for_copies
        self._unsent.append(encode_step(plan, self._last))
        self._publish()
        return future

    async def prepare_grammar(self, grammar: str) -> None:
        """On rank 0, beside the steps. Raises InvalidRequestError, and RanksLostError if it is gone."""
        if not self._is_stepping:
            raise RanksLostError(self._why)
        done = self._loop.create_future()
        self._next_grammar_id += 1
        self._grammars[self._next_grammar_id] = done
        self._seats[0].send(Grammar(self._next_grammar_id, grammar))
        await done

    async def close(self) -> None:
        """End all ranks. Idempotent."""
        if self._is_closed or self._watcher is None:
            return
        self._is_closed = True
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._end_generation("the replica stops")
        for seat in self._seats:
            seat.stop()
        await self._wait(lambda: all(seat.ended or seat.link is None for seat in self._seats), LEAVE_S)
        for seat in self._seats:
            seat.kill()
        self._door.close()
        self._pulse.release()

    # ---- mending ----

    async def recover(self) -> None:
        """Replace who is lost and begin the next generation. Raises EngineError after `MAX_ATTEMPTS`."""
        began, why = time.monotonic(), self._why
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                replaced = await self._mend()
            except ShoalError as error:
                logger.warning("restart of the ranks, attempt %d of %d: %s", attempt, MAX_ATTEMPTS, error)
                why = str(error)
                self._end_generation(why)
            else:
                took = time.monotonic() - began
                logger.warning("ranks %s were replaced, the group steps again after %.2f s", replaced, took)
                self._figures.mended(took)
                self._tell(f"whole again after {took:.1f} s; new: {_named(replaced)}")
                return
        self._tell(f"its ranks could not be started again, so it will be replaced: {why}")
        raise EngineError(f"the ranks could not be started again in {MAX_ATTEMPTS} attempts: {why}")

    async def _mend(self) -> list[int]:
        """Who was replaced."""
        staying = [seat for seat in self._seats if not seat.ended]
        await self._wait(lambda: all(seat.has_left or seat.ended for seat in staying), LEAVE_S)
        for seat in staying:
            if not seat.has_left and not seat.ended:
                seat.lose(Loss(LossCause.HUNG, f"did not leave its step within {LEAVE_S:.0f} s, and is killed as well"))
        lost = [seat.rank for seat in self._seats if seat.ended]
        await self._begin_generation(is_first=len(lost) == self._size)
        return lost

    async def _begin_generation(self, is_first: bool) -> None:
        """All ranks here, joined and loaded. Raises what a rank raised, else EngineError."""
        self._generation += 1
        for seat in self._seats:
            if seat.launched is None or seat.ended:
                seat.start(self._launcher(seat.rank, self._door.endpoint))
            seat.expect(self._generation)
        await self._reach(lambda seat: seat.link is not None, HELLO_S, "connect")
        leader = self._seats[0]
        leader.send(Lead(self._generation))
        await self._reach(lambda seat: seat.rank > 0 or seat.led == self._generation, HELLO_S, "open a place to meet")
        self._writer = FrameWriter(self._size) if self._use_shared_memory else None
        for seat in self._seats:
            in_memory = self._writer is not None and seat.is_local
            join = Join(self._generation, *leader.place, in_memory, is_first)
            seat.join(join, [self._writer.descriptor] if self._writer is not None and in_memory else [])
            if self._writer is not None and not in_memory:
                self._writer.excuse(seat.rank)
        await self._reach(lambda seat: seat.ready == self._generation, None, "get ready")
        if self._writer is not None:
            self._writer.release()
        self._check_alike()
        self._num_frames, self._last, self.is_lost, self._is_stepping = 0, None, False, True

    def _check_alike(self) -> None:
        """Blocks are counted once for all ranks."""
        sizes = {seat.rank: seat.info.num_blocks for seat in self._seats if seat.info is not None}
        if len(set(sizes.values())) > 1:
            raise EngineError(f"the ranks have different numbers of KV blocks, {sizes}; set kv_cache.num_blocks")

    async def _reach(self, is_there: Callable[[RankSeat], bool], timeout_s: float | None, what: str) -> None:
        """Until `is_there` holds for all ranks; at the first that fails or ends, raise."""
        seats = self._seats

        def settled() -> bool:
            return all(map(is_there, seats)) or any(seat.ended or seat.error is not None for seat in seats)

        if not await self._wait(settled, timeout_s):
            late = [seat.rank for seat in seats if not is_there(seat)]
            for rank in late:
                seats[rank].lose(Loss(LossCause.SILENT, f"did not {what} within {timeout_s:g} s"))
        if (error := error_of(seats)) is not None:
            raise error

    async def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """False if `condition` did not hold in time. It is looked at whenever something was heard of a rank."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # ---- steps ----

    def _publish(self) -> None:
        while self._unsent:
            if self._writer is not None and not self._writer.has_room:
                self._loop.call_later(_ROOM_S, self._publish)
                return
            frame = self._unsent.popleft()
            self._num_frames += 1
            fits = self._writer is not None and self._writer.publish(frame)
            for seat in self._seats:
                if not (fits and seat.is_local):
                    seat.send_frame(frame)

    def _on_result(self, data: bytes) -> None:
        future, self._future = self._future, None
        if future is None:
            return  # of a generation that is over
        result = self._last = decode_result(data)
        began, num_tokens = self._step
        self._limits.learn(num_tokens, time.monotonic() - began)
        if result.copied and self._waits and self._pulse.copies()[0] < result.copied:
            self._loop.call_later(_COPY_S, self._deliver, future, result)
        else:
            self._deliver(future, result)

    def _deliver(self, future: asyncio.Future[StepResult], result: StepResult) -> None:
        """A block is copied when every rank has copied its part."""
        if result.copied:
            copied, failed_below = self._pulse.copies()
            result = msgspec.structs.replace(result, copied=copied, failed_below=failed_below)
        if not future.done():
            future.set_result(result)

    # ---- what happens to ranks ----

    def _on_hello(self, rank: int, link: RankLink) -> None:
        if not 0 <= rank < self._size or self._seats[rank].link is not None:
            link.close()
            return
        if rank == 0:
            link.on_result = self._on_result
        self._seats[rank].welcome(link)
        self._count()
        self._changed.set()

    def _on_seat(self, seat: RankSeat) -> None:
        """Something was heard of a rank."""
        self._changed.set()
        self._count()
        for done in seat.take_grammars():
            future = self._grammars.pop(done.grammar_id, None)
            if future is not None and not future.done():
                if not done.text:
                    future.set_result(None)
                else:
                    future.set_exception((InvalidRequestError if done.is_invalid else EngineError)(done.text))
        if self._is_stepping and seat.ended:
            self._lose(f"{seat} {seat.ended}")
        elif self._is_stepping and seat.failed and self._blaming is None:
            self._blaming = self._loop.call_later(_PEER_S if self._size > 1 else 0.0, self._blame, seat)

    def _blame(self, seat: RankSeat) -> None:
        """It raised in a step, and no other rank turned out to be the reason."""
        self._blaming = None
        if not self._is_stepping:
            return
        self._figures.lost(LossCause.FAILED)
        self._lose(f"{seat} {seat.failed}")

    def _count(self) -> None:
        self._figures.alive(sum(seat.is_alive for seat in self._seats))

    async def _watch(self) -> None:
        """Ranks that say nothing do not tell; so they are looked at."""
        while True:
            await asyncio.sleep(group_health.LOOK_S)
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        step = None
        if self._future is not None:
            began, num_tokens = self._step
            step = StepSign(now - began, self._limits.limit_s(num_tokens))
        signs: Iterable[RankSign] = (s.sign(self._num_frames) for s in self._seats if s.launched is not None)
        for rank, loss in group_health.lost_ranks(signs, step if self._is_stepping else None).items():
            self._seats[rank].lose(loss)

    def _lose(self, why: str) -> None:
        """The generation is over: whoever waits for the step is told, survivors leave, `recover` does the rest."""
        logger.warning("all that runs is given back, and the ranks begin again, because %s", why)
        self._tell(f"{why}; it begins again")
        self.is_lost = True
        if self._blaming is not None:
            self._blaming.cancel()
            self._blaming = None
        self._end_generation(why)
        self.on_loss()

    def _end_generation(self, why: str) -> None:
        self._is_stepping, self._why = False, why
        self._unsent.clear()
        if self._writer is not None:
            self._writer.close()
        for seat in self._seats:
            seat.send(Leave(self._generation))
        error = RanksLostError(why)
        waiting = [self._future, *self._grammars.values()]
        self._future = None
        self._grammars.clear()
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(error)

    def _info(self) -> RunnerInfo:
        info = self._seats[0].info
        assert info is not None, "all are ready"
        held = [f"{weights / MIB:.1f}+{kv / MIB:.1f}" for weights, kv in (seat.held_bytes for seat in self._seats)]
        text = f"{self._size} ranks, MiB of weights+KV on each: {' '.join(held)}; {info.description}"
        # ranks of other nodes see another arena, or none
        block_bytes = info.block_bytes if all(seat.is_local for seat in self._seats) else 0
        return msgspec.structs.replace(info, description=text, block_bytes=block_bytes)


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "no rank, all stayed"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
