"""What `shoal serve` starts ends with it, whoever dies first; the exit code of a stop says how it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.process_sweep import command_line, descendants, start_time

PROGRAM = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from cluster.supervisor import Supervisor
from cluster.terminal import say
from replica.errors import ConfigError

def child():  # as Ray's: it would live for ever
    return subprocess.Popen([sys.executable, "-c", "import signal, threading; signal.signal(signal.SIGINT, "
        "signal.SIG_IGN); print('up', flush=True); threading.Event().wait()"], stdout=subprocess.PIPE)

def started():
    process = child()
    process.stdout.readline()
    say(f"started {{process.pid}}")
    return process

def work(driver):
    print("chatter", flush=True)
    os.write(2, b"more of it, past Python\\n")
{body}

raise SystemExit(Supervisor(Path(sys.argv[1]), ("127.0.0.1", 8000), 0.1, 30.0).run(work))
"""


@contextmanager
def running(tmp_path: Path, body: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """The program, from when it says that a child of it is up; at the end nobody may be left."""
    code = PROGRAM.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    command = [*before, sys.executable, "-c", code, str(tmp_path / "log")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("shoal: started "), line + process.stderr.read()
    family = {pid: start_time(pid) for pid in [int(line.split()[-1]), *descendants(process.pid)]}
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        left = alive(family)
        if process.returncode == -signal.SIGKILL:  # then the driver sends the same, and nobody waits for what it does
            pause = threading.Event()
            while left := alive(family):
                pause.wait(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == []


def alive(family: dict[int, int | None]) -> list[int]:
    """A zombie has no command line."""
    return [pid for pid, began in family.items() if began and start_time(pid) == began and command_line(pid)]


def told(process: subprocess.Popen[str]) -> tuple[int, str]:
    assert process.stderr is not None
    text = process.stderr.read()
    return process.wait(20), text


WAIT = """
driver.is_ready()
process = child()
process.stdout.readline()
try:
    say(f"started {process.pid}")
    threading.Event().wait()
except KeyboardInterrupt:
    say("stopping" if process.poll() is None else "too late")
"""


def test_what_is_left_is_ended_and_only_our_own_words_are_read(tmp_path: Path) -> None:
    with running(tmp_path, "started()\nreturn 3") as process:
        assert told(process) == (3, "")
    assert (tmp_path / "log").read_text() == "chatter\nmore of it, past Python\n"


def test_a_signal_to_the_whole_group_reaches_only_the_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, f"{WAIT}\nreturn 0") as process:
        os.killpg(process.pid, signal.SIGTERM)
        assert told(process) == (0, "shoal: stopping\n")


def test_nohup_is_respected(tmp_path: Path) -> None:
    with running(tmp_path, f"{WAIT}\nreturn 0", "nohup") as process:
        process.send_signal(signal.SIGHUP)  # would be the first, and the next one cut
        process.send_signal(signal.SIGTERM)
        assert told(process) == (0, "shoal: stopping\n")


def test_a_stop_that_hangs_before_there_are_streams_is_cut_and_still_fine(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGINT, lambda *_: None)\nstarted()\nthreading.Event().wait()"
    with running(tmp_path, body) as process:
        process.send_signal(signal.SIGHUP)
        assert told(process) == (0, "shoal: stopped before it was ready\n")


def test_the_second_signal_cuts_streams_and_the_exit_code_says_so(tmp_path: Path) -> None:
    with running(tmp_path, f"{WAIT}\nthreading.Event().wait()") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.readline() == "shoal: stopping\n"
        process.send_signal(signal.SIGTERM)
        assert told(process) == (128 + signal.SIGTERM, "")


def test_a_driver_that_is_ended_from_outside_is_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path, "started()\nos.kill(os.getpid(), signal.SIGKILL)") as process:
        code, text = told(process)
        assert code == 1
        assert "ended the process that started everything (SIGKILL)" in text
        assert str(tmp_path / "log") in text


def test_any_error_is_a_sentence_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    with running(tmp_path, "started()\nraise RuntimeError('some\\nlines')") as process:
        log = tmp_path / "log"
        assert told(process) == (1, f"shoal: did not start: RuntimeError: lines; the whole text: {log}\n")
        assert "Traceback (most recent call last)" in log.read_text()


def test_a_wrong_configuration_is_exit_code_2(tmp_path: Path) -> None:
    with running(tmp_path, "started()\nraise ConfigError('port: no')") as process:
        assert told(process) == (2, "shoal: port: no\n")


def test_a_killed_supervisor_takes_everybody_along(tmp_path: Path) -> None:
    with running(tmp_path, WAIT) as process:
        process.kill()
        assert told(process) == (-signal.SIGKILL, "")  # read until the last holder of the stream has gone
