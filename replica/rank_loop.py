"""ASYNC. The life of one rank: come in, join the peers, load a part of the model, carry out steps, begin again when a
peer was replaced. Knows neither Ray nor torch; both are handed in.

Three threads: the steps (the model runner is built and called there only), what the replica says, and the heart.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from replica.errors import InvalidRequestError
from replica.group_health import BEAT_S
from replica.rank_link import (
    Beat,
    DownMessage,
    Endpoint,
    Grammar,
    GrammarDone,
    Join,
    Lead,
    Leave,
    Led,
    Left,
    Note,
    NotReady,
    Ready,
    ReplicaSocket,
    StepFailed,
    Stop,
    UpMessage,
    Welcome,
)
from replica.runner_thread import name_thread
from replica.step import ModelRunner, StepPlan, StepResult
from replica.step_channel import ChannelClosed, FrameReader, Pulse, decode_step, encode_result

logger = logging.getLogger(__name__)


class RankRunner(ModelRunner, Protocol):
    """A model runner that holds one rank's part."""

    #: of weights and of KV
    held_bytes: tuple[int, int]

    def adopt(self, result: StepResult) -> None:
        """Told to all ranks but 0, before the next plan: the tokens that rank 0 chose in the last step."""
        ...

    def begin_anew(self) -> None:
        """Keep the weights, forget every sequence and every copy. The peers are others now."""
        ...

    def tell_copies(self, tell: Callable[[int, int], None]) -> None:
        """From now on `tell` hears how far its copies are, and below which number some failed; from any thread."""
        ...


class Meeting(Protocol):
    """How the ranks of a generation find each other."""

    def lead(self) -> tuple[str, int]:
        """On rank 0: host and port where the others come."""
        ...

    def join(self, host: str, port: int) -> None:
        """Returns when all are there. Raises RuntimeError if they are not in time."""
        ...

    def leave(self) -> None:
        """End what is between the peers, so that one that still waits for this one fails as well. Idempotent."""
        ...


class NoMeeting:
    """For runners that have nothing to say to each other (the fake one)."""

    def __init__(self, note_wait: Callable[[bool], None]) -> None:
        """Never waits."""

    def lead(self) -> tuple[str, int]:
        return "", 0

    def join(self, host: str, port: int) -> None:
        """Nobody to wait for."""

    def leave(self) -> None:
        """Nothing to end."""


class Rank:
    """One rank of `size`. `run` returns when the replica says so."""

    def __init__(
        self,
        rank: int,
        size: int,
        endpoint: Endpoint,
        node: str,
        make_meeting: Callable[[Callable[[bool], None]], Meeting],
        make_runner: Callable[[Meeting, bool], RankRunner],
        on_orphaned: Callable[[], None],
    ) -> None:
        """`make_meeting` gets what to call before and after a wait for peers; `make_runner` the meeting, joined, and
        whether all ranks build theirs now. `on_orphaned` is called on another thread when the replica is gone.
        """
        self._rank, self._size, self._node, self._endpoint = rank, size, node, endpoint
        self._make_meeting, self._make_runner, self._on_orphaned = make_meeting, make_runner, on_orphaned
        self._orders: queue.SimpleQueue[DownMessage | None] = queue.SimpleQueue()
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._readers: queue.SimpleQueue[FrameReader | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._pulse: Pulse | None = None
        self._own = Pulse(size)  # where no memory is shared
        self._runner: RankRunner | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="shoal-grammar")

    def run(self) -> None:
        """Blocks. Raises OSError if the replica is not there to begin with."""
        self._socket = ReplicaSocket(self._endpoint, self._rank, self._node)
        threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._work, "shoal-runner"), (self._listen, "shoal-orders"), (self._beat, "beat"))
        ]
        for thread in threads:
            thread.start()
        threads[0].join()
        self._ended.set()
        self._socket.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    # ---- what the replica says ----

    def _listen(self) -> None:
        try:
            while not self._ended.is_set():
                message = self._socket.receive()
                if isinstance(message, bytes):
                    self._frames.put(message)
                else:
                    self._obey(message)
        except EOFError:
            if not self._ended.is_set():
                self._on_orphaned()

    def _obey(self, message: DownMessage) -> None:
        match message:
            case Welcome(has_pulse=True):
                descriptor = self._socket.take_descriptor()
                assert descriptor is not None, "it came along"
                self._pulse = Pulse(self._size, descriptor)
            case Join():
                descriptor = self._socket.take_descriptor() if message.has_frames else None
                self._readers.put(None if descriptor is None else FrameReader(descriptor, self._rank))
                self._orders.put(message)
            case Leave():
                self._frames.put(None)
            case Grammar():
                self._compiler.submit(self._compile, message)
            case Stop():
                self._frames.put(None)
                self._orders.put(None)
            case _:
                self._orders.put(message)

    def _compile(self, order: Grammar) -> None:
        assert self._runner is not None, "grammars come to those who are ready"
        done = GrammarDone(order.grammar_id)
        try:
            self._runner.prepare_grammar(order.text)
        except InvalidRequestError as error:
            done = GrammarDone(order.grammar_id, str(error), is_invalid=True)
        except BaseException as error:  # a panic of the library is no Exception; somebody waits
            done = GrammarDone(order.grammar_id, repr(error))
        self._tell(done)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            if self._pulse is not None:
                self._pulse.beat(self._rank)
            else:
                begun, ended = self._own.steps(self._rank)
                self._tell(Beat(begun, ended, self._own.is_waiting_for_peers(self._rank)))

    def _tell(self, message: UpMessage) -> None:
        try:
            self._socket.send(message)
        except OSError:
            logger.info("rank %d: nobody listens any more", self._rank)  # the listener finds out and acts

    # ---- steps ----

    def _note_wait(self, is_waiting: bool) -> None:
        (self._pulse or self._own).set_in_collective(self._rank, is_waiting)

    def _work(self) -> None:
        name_thread(b"shoal-runner")
        meeting = self._make_meeting(self._note_wait)
        while (order := self._orders.get()) is not None:
            if isinstance(order, Lead):
                self._lead(order, meeting)
            elif isinstance(order, Join):
                reader = self._readers.get()
                if self._enter(order, meeting):
                    self._step_until_over(reader)
                    self._note_wait(False)
                meeting.leave()
                self._tell(Left(order.generation))
        meeting.leave()
        if self._runner is not None:
            self._runner.close()

    def _lead(self, order: Lead, meeting: Meeting) -> None:
        try:
            host, port = meeting.lead()
        except Exception as error:
            logger.exception("rank %d: no place for its peers to meet", self._rank)
            self._tell(NotReady(order.generation, type(error).__name__, str(error) or repr(error)))
        else:
            self._tell(Led(order.generation, host, port))

    def _enter(self, order: Join, meeting: Meeting) -> bool:
        """Join and load. False if that failed, which was told."""
        try:
            while not self._frames.empty():
                self._frames.get()  # of the generation before
            meeting.join(order.host, order.port)
            if self._runner is None:
                self._tell(Note("loading"))
                self._runner = self._make_runner(meeting, order.is_first)
                self._runner.tell_copies(partial((self._pulse or self._own).set_copies, self._rank))
            else:
                self._runner.begin_anew()
            (self._pulse or self._own).reset(self._rank)
        except BaseException as error:
            logger.exception("rank %d did not get ready", self._rank)
            self._tell(NotReady(order.generation, type(error).__name__, str(error) or repr(error)))
            return False
        self._tell(Ready(order.generation, self._runner.info, self._runner.held_bytes))
        return True

    def _step_until_over(self, reader: FrameReader | None) -> None:
        runner, pulse = self._runner, self._pulse or self._own
        assert runner is not None
        step = -1
        try:
            while True:
                plan, last = decode_step(self._next_frame(reader))
                step = plan.step
                pulse.begin_step(self._rank)
                self._carry_out(runner, plan, last)
                pulse.end_step(self._rank)
        except ChannelClosed:
            return
        except BaseException as error:
            logger.exception("rank %d failed in step %d", self._rank, step)
            self._tell(StepFailed(step, repr(error)))

    def _carry_out(self, runner: RankRunner, plan: StepPlan, last: StepResult | None) -> None:
        if self._rank:
            if last is not None:
                runner.adopt(last)
            runner.execute(plan)
        else:
            self._socket.send_result(encode_result(runner.execute(plan)))

    def _next_frame(self, reader: FrameReader | None) -> bytes:
        """Raises ChannelClosed."""
        frame = None if reader is None else reader.next()
        if frame is None and (frame := self._frames.get()) is None:
            raise ChannelClosed
        return frame
