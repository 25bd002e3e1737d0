"""ASYNC. What a replica knows of one of its ranks: the process in that place, its socket, how far it is."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from replica.errors import ConfigError, EngineError, ModelLoadError, RanksLostError, ShoalError
from replica.group_health import ASK_AFTER_S, Loss, LossCause, RankSign
from replica.rank_link import (
    Beat,
    DownMessage,
    GrammarDone,
    Join,
    Led,
    Left,
    Note,
    NotReady,
    RankLink,
    Ready,
    StepFailed,
    Stop,
    UpMessage,
    Welcome,
)
from replica.step import RunnerInfo
from replica.step_channel import Pulse

logger = logging.getLogger(__name__)

_CLASSES: dict[str, type[ShoalError]] = {c.__name__: c for c in (ConfigError, EngineError, ModelLoadError)}


class Launched(Protocol):
    """A process that was started for a rank."""

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called on the event loop when it ended, with a sentence part that says how."""
        ...

    def kill(self) -> None:
        """SIGKILL or its like. Idempotent, does not wait."""
        ...


class RankSeat:
    """The place of rank `rank` of `size`; processes in it come and go."""

    def __init__(
        self,
        rank: int,
        size: int,
        pulse: Pulse,
        on_change: Callable[[RankSeat], None],
        on_lost: Callable[[LossCause], None],
    ) -> None:
        self.rank = rank
        self._size = size
        self._pulse = pulse
        self._on_change, self._on_lost = on_change, on_lost
        self.launched: Launched | None = None
        self._reset()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self._size}"

    def _reset(self) -> None:
        self._began = time.monotonic()
        self._is_stopping = False
        self.link: RankLink | None = None
        #: how it ended, as in "rank 1 of 3 was ...": empty while it lives
        self.ended = ""
        #: it raised in a step
        self.failed = ""
        #: it raised before it was ready
        self.error: ShoalError | None = None
        self.info: RunnerInfo | None = None
        self.held_bytes = (0, 0)
        #: the last generation that it was told of, led, was asked to join, was ready in, left
        self._told = self.led = self._joined = self.ready = self._left = 0
        self.place = ("", 0)
        self._beat: tuple[float, Beat] | None = None
        self._grammars: list[GrammarDone] = []

    @property
    def is_local(self) -> bool:
        """It shares this node's memory."""
        return self.link is not None and self.link.is_local

    @property
    def has_left(self) -> bool:
        """It waits for the next generation."""
        return self.link is not None and self._left >= self._joined

    def start(self, launched: Launched) -> None:
        """A new process has been started for it."""
        self._reset()
        self.launched = launched
        self._pulse.reset(self.rank)
        launched.on_end(lambda how: self._on_end(launched, how))

    def welcome(self, link: RankLink) -> None:
        """It came in."""
        self.link = link
        link.on_message = self._hear
        link.on_closed = lambda: self._on_closed(link)
        has_pulse = link.is_local and self._pulse.descriptor >= 0
        link.send(Welcome(has_pulse), [self._pulse.descriptor] if has_pulse else [])
        pid = f", pid {link.pid}" if link.pid else ", on another node"
        logger.info("%s: started after %.1f s%s", self, time.monotonic() - self._began, pid)

    def expect(self, generation: int) -> None:
        """A generation begins: what it said about earlier ones does not count any more."""
        self._told, self.error, self.failed = generation, None, ""

    def join(self, message: Join, descriptors: Sequence[int]) -> None:
        """Have it meet its peers; it answers with Ready or NotReady, and with Left when it is over."""
        self._joined = message.generation
        self.send(message, descriptors)

    def send(self, message: DownMessage, descriptors: Sequence[int] = ()) -> None:
        """Lost if it is not there."""
        if self.link is not None:
            self.link.send(message, descriptors)

    def stop(self) -> None:
        """Have it end in good order."""
        self._is_stopping = True
        self.send(Stop())

    def send_frame(self, frame: bytes) -> None:
        """A step, through its socket."""
        if self.link is not None:
            self.link.send_frame(frame)

    @property
    def is_alive(self) -> bool:
        """Its process is there and has come in."""
        return self.link is not None and not self.ended

    def lose(self, loss: Loss) -> None:
        """It does not count any more: it is killed, and whoever watches the group is told."""
        if not self.ended:
            self.ended = loss.why
            if not self._is_stopping:
                logger.warning("%s %s", self, loss.why)
                self._on_lost(loss.cause)
            self.kill()
            self._on_change(self)

    def kill(self) -> None:
        """Also one that is stopped, or asks nobody any more. Idempotent."""
        self.ended = self.ended or "was killed"
        if self.link is not None:
            is_process = self.link.pid not in (0, os.getpid())  # ranks may be threads here, in tests
            if is_process and self.link.is_open:  # while the socket stands, the number means that process
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.link.pid, signal.SIGKILL)
            self.link.close()
        if self.launched is not None:
            self.launched.kill()

    def sign(self, num_frames: int) -> RankSign:
        """What is known of it now; `num_frames` steps were sent in this generation."""
        if self._beat is not None:
            at, beat = self._beat
            silent_s, ended, waits = time.monotonic() - at, beat.ended, beat.in_collective
        else:
            silent_s, ended = self._pulse.silent_s(self.rank), self._pulse.steps(self.rank)[1]
            waits = self._pulse.is_waiting_for_peers(self.rank)
        is_starting = self.ready < self._joined or not self._joined
        return RankSign(
            self.rank,
            self.ended,
            0.0 if self.link is None else silent_s,  # before its first word only its process is watched
            is_stopped=silent_s > ASK_AFTER_S and self._is_stopped(),
            is_starting=is_starting,
            owes_step=ended < num_frames,
            waits_for_peers=waits,
        )

    def take_grammars(self) -> list[GrammarDone]:
        """Answers that came in."""
        done, self._grammars = self._grammars, []
        return done

    def _is_stopped(self) -> bool:
        if self.link is None or not self.link.pid:
            return False
        try:
            text = Path(f"/proc/{self.link.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def _hear(self, link: RankLink, message: UpMessage) -> None:
        if link is not self.link:
            return
        match message:
            case Beat():
                self._beat = (time.monotonic(), message)
                return
            case Note(text=text):
                logger.info("%s: %s", self, text)
            case Led():
                self.led, self.place = message.generation, (message.host, message.port)
            case Ready():
                if self.info is None:
                    logger.info("%s: loaded after %.1f s", self, time.monotonic() - self._began)
                self.ready, self.info, self.failed = message.generation, message.info, ""
                self.held_bytes = message.held_bytes
            case NotReady(generation=generation) if generation == self._told:
                self.error = _CLASSES.get(message.error, EngineError)(f"{self}: {message.text}")
            case StepFailed():
                self.failed = f"failed in step {message.step}: {message.text}"
            case Left():
                self._left = message.generation
            case GrammarDone():
                self._grammars.append(message)
        self._on_change(self)

    def _on_closed(self, link: RankLink) -> None:
        if link is self.link:
            self.lose(Loss(LossCause.GONE, "is gone: its socket closed"))

    def _on_end(self, launched: Launched, how: str) -> None:
        if launched is self.launched:
            self.lose(Loss(LossCause.GONE, how))


def error_of(seats: Iterable[RankSeat]) -> ShoalError | None:
    """Of ranks that did not get ready: what a rank itself said comes before how it or another one ended."""
    seats = list(seats)
    for seat in seats:
        if seat.error is not None:
            return seat.error
    for seat in seats:
        if seat.ended:
            return RanksLostError(f"{seat} {seat.ended}")
    return None
