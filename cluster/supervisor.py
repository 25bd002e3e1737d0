"""ASYNC. A process that does nothing but watch over the one that starts Ray, and sees that nothing is left of it.

Why two: a signal to the whole group (a terminal's Ctrl-C, `timeout`, a shell under `docker stop`) would reach Ray's GCS
as well, and a driver without GCS waits for a minute; Ray may end its driver from C++ without a word; and of what it
starts, some processes outlive it by seconds. So the driver has a session of its own, hears of signals from here, and
whatever it leaves is given to us by the kernel (PR_SET_CHILD_SUBREAPER) and ended. If we are killed, it ends the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cluster.process_sweep import descendants, kill_all
from cluster.ray_words import why_no_start
from cluster.terminal import divert, say
from replica.errors import ConfigError, ShoalError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: what the driver tells us: it serves; it ended in order, and has said why
_READY, _ENDED = b"r", b"e"
#: a second signal wants the end, not order
_SECOND_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


class Driver:
    """What the work knows of its supervisor."""

    def __init__(self, report: int, log: Path) -> None:
        self._report = report
        self.log = log
        #: A signal reached the driver itself, so not only the supervisor: a service manager tells every process of the
        #: service, Ray's as well, and then there is nothing left to be orderly with.
        self.was_told_itself = threading.Event()

    def hear_others(self) -> None:
        """Call again after Ray has set handlers of its own. (What is ignored would stay ignored in Ray's processes.)"""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.was_told_itself.set())

    def is_ready(self) -> None:
        """From now on a stop may take its time: there are streams."""
        self._tell(_READY)

    def end(self, code: int) -> None:
        """At once, from any thread, without whatever Python and Ray do at their exit."""
        self._tell(_ENDED)
        os._exit(code)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: our end is near too
            os.write(self._report, word)


class Supervisor:
    """Runs work in a process of its own until it ends or a signal comes.

    `before_ready_s`, `stop_s`: how long the work may take to end after the first signal.
    """

    def __init__(self, log: Path, address: tuple[str, int], before_ready_s: float, stop_s: float) -> None:
        self._log = log
        self._address = address
        self._before_ready_s = before_ready_s
        self._stop_s = stop_s
        self._signals: list[int] = []
        self._reports = b""
        self._was_cut = False
        self._pid = 0
        self._reader = 0

    def run(self, work: Callable[[Driver], int]) -> int:
        """The exit code: that of the work; after a signal 0, or 128 + signal if streams were cut."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # none may come between the fork and its handler
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        until_we_end, held = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            os.close(held)
            _drive(work, Driver(writer, self._log), until_we_end, self._address)
        os.close(writer)
        os.close(until_we_end)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status = self._wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _end_family()
        with contextlib.suppress(OSError):
            if status == 0 and not self._log.stat().st_size:  # else a line of ours may point there
                self._log.unlink()
        return self._exit_code(status)

    def _wait(self) -> int:
        while True:
            pid, status = os.waitpid(-1, 0)  # what the driver's dead children left is ours to bury
            if pid == self._pid:
                return os.waitstatus_to_exitcode(status)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        first = len(self._signals) == 1
        if not first:
            self._was_cut = self._has_said(_READY)
        wait_s = (self._stop_s if self._has_said(_READY) else self._before_ready_s) if first else _SECOND_S
        signal.setitimer(signal.ITIMER_REAL, wait_s)
        self._send(signal.SIGINT)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._was_cut = self._has_said(_READY)
        if self._was_cut and len(self._signals) == 1:
            say(f"not everything ended within {self._stop_s:g} s; it is ended now")
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _has_said(self, word: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._reports += os.read(self._reader, 16)
        return word in self._reports

    def _exit_code(self, status: int) -> int:
        if self._signals:
            if not self._has_said(_READY):
                say("stopped before it was ready")
            was_cut = self._was_cut or (status != 0 and self._has_said(_READY))
            return 128 + self._signals[0] if was_cut else 0
        if not self._has_said(_ENDED):
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            say(f"Ray, or the system, ended the process that started everything ({how}); the whole text: {self._log}")
            return 1
        return status


def _drive(work: Callable[[Driver], int], driver: Driver, until_it_ends: int, address: tuple[str, int]) -> None:
    """The life of the child. Never returns."""
    code = 1
    try:
        os.setsid()
        threading.Thread(target=_outlive_nobody, args=(until_it_ends,), daemon=True).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
        driver.hear_others()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        divert(driver.log)
        code = work(driver)
    except KeyboardInterrupt:
        code = 0
    except ConfigError as error:
        say(str(error))
        code = 2
    except ShoalError as error:
        traceback.print_exc()
        say(str(error))
    except BaseException as error:
        traceback.print_exc()
        say(f"did not start: {why_no_start(type(error).__name__, str(error), *address)}; the whole text: {driver.log}")
    finally:
        driver.end(code)


def _outlive_nobody(until_it_ends: int) -> None:
    """In the driver: if the supervisor is killed, its end of this pipe closes."""
    os.read(until_it_ends, 1)
    kill_all([*descendants(os.getpid()), os.getpid()])


def _end_family() -> None:
    """Everything below this process, whoever was its parent."""
    pause = threading.Event()
    for _ in range(250):
        living = descendants(os.getpid())
        if not living:
            return
        kill_all(living)
        for _ in _buried():
            pass
        pause.wait(0.02)


def _buried() -> Iterator[int]:
    """Pids of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            yield pid


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere what is left is found by the next start (`process_sweep.py`)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
