"""ASYNC. How a step reaches the ranks of a node: a frame in shared memory and one futex call that wakes them all.

The memory is a `memfd`, handed over a Unix socket: it has no name, so nothing has to be unlinked and a kill leaves
nothing behind. Never `multiprocessing.shared_memory`, whose tracker removes it when anybody who attached exits.

Measured against the same frames over Unix sockets (`make claims ONLY=tp.step`): `docs/tensor_parallel.md`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import time
import zlib

import msgspec

from replica.step import StepPlan, StepResult

#: frames that the slowest rank may be behind; a frame is overwritten only when all have read it
NUM_SLOTS = 4
#: a longer frame goes through the socket: 32,768 tokens of a prompt are 98 to 160 KiB
SLOT_BYTES = 256 << 10
_HEADER_BYTES = 4096
_FRAME_HEADER = struct.Struct("<III")  # number, length, crc32 of what follows
_BY_SOCKET = 0xFFFFFFFF
_NUM_PUBLISHED, _IS_CLOSED, _NUM_READ = 0, 4, 64  # offsets in the header; the last one holds 8 bytes a rank
#: the futex system call by machine; elsewhere frames go through sockets
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

HAS_SHARED_MEMORY = sys.platform == "linux" and _FUTEX is not None and hasattr(os, "memfd_create")

_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)
_encoder = msgspec.msgpack.Encoder()
decode_result = _result_decoder.decode
encode_result = _encoder.encode


class ChannelClosed(Exception):
    """No frame will come any more."""


def encode_step(plan: StepPlan, last: StepResult | None) -> bytes:
    """A step for all ranks: the plan, and what rank 0 chose in the step before, which the others must know first."""
    told = b""
    if last is not None:
        if last.logprobs or last.prompt_logprobs:  # for routers only, and long
            last = msgspec.structs.replace(last, logprobs={}, prompt_logprobs={})
        told = _encoder.encode(last)
    return len(told).to_bytes(4, "little") + told + _encoder.encode(plan)


def decode_step(frame: bytes) -> tuple[StepPlan, StepResult | None]:
    """The reverse of `encode_step`."""
    view = memoryview(frame)
    end = 4 + int.from_bytes(view[:4], "little")
    return _plan_decoder.decode(view[end:]), _result_decoder.decode(view[4:end]) if end > 4 else None


class FrameWriter:
    """One writer, `num_readers` ranks, each of which reads every frame. Knows nothing of what is in it."""

    def __init__(self, num_readers: int) -> None:
        self.descriptor = os.memfd_create("shoal-steps", os.MFD_CLOEXEC)
        size = _HEADER_BYTES + NUM_SLOTS * SLOT_BYTES
        os.ftruncate(self.descriptor, size)  # pages are taken when they are first written
        self._memory = mmap.mmap(self.descriptor, size)
        self._published = ctypes.c_uint32.from_buffer(self._memory, _NUM_PUBLISHED)
        self._is_closed = ctypes.c_uint32.from_buffer(self._memory, _IS_CLOSED)
        self._read = (ctypes.c_uint64 * num_readers).from_buffer(self._memory, _NUM_READ)
        self._count = 0

    @property
    def has_room(self) -> bool:
        """Every rank has read the frame whose slot would be next."""
        return bool(self._count - min(self._read) < NUM_SLOTS)

    def excuse(self, reader: int) -> None:
        """It gets its frames elsewhere: nobody waits for it here."""
        self._read[reader] = 1 << 63

    def publish(self, frame: bytes) -> bool:
        """Wake all ranks with `frame`; there must be room. False: it is too long, and they wait for it elsewhere."""
        assert self.has_room, "a slot that a rank has not read"
        fits = len(frame) <= SLOT_BYTES - _FRAME_HEADER.size
        start = _HEADER_BYTES + self._count % NUM_SLOTS * SLOT_BYTES
        length, check = (len(frame), zlib.crc32(frame)) if fits else (_BY_SOCKET, 0)
        if fits:
            body = start + _FRAME_HEADER.size
            self._memory[body : body + length] = frame
        _FRAME_HEADER.pack_into(self._memory, start, self._count & 0xFFFFFFFF, length, check)
        self._count += 1
        self._wake()
        return fits

    def close(self) -> None:
        """Readers that wait get ChannelClosed; so do those who come later."""
        self._is_closed.value = 1
        self._count += 1
        self._wake()

    def release(self) -> None:
        """Give the memory back; ranks keep theirs."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _wake(self) -> None:
        self._published.value = self._count & 0xFFFFFFFF
        _futex(ctypes.addressof(self._published), _FUTEX_WAKE, 0x7FFFFFFF)


class FrameReader:
    """One rank's end. `descriptor` is the writer's, as it came through a socket; the reader closes it."""

    def __init__(self, descriptor: int, reader: int) -> None:
        self._memory = mmap.mmap(descriptor, _HEADER_BYTES + NUM_SLOTS * SLOT_BYTES)
        os.close(descriptor)
        self._published = ctypes.c_uint32.from_buffer(self._memory, _NUM_PUBLISHED)
        self._is_closed = ctypes.c_uint32.from_buffer(self._memory, _IS_CLOSED)
        self._read = ctypes.c_uint64.from_buffer(self._memory, _NUM_READ + 8 * reader)
        self._address = ctypes.addressof(self._published)
        self._count = 0

    def next(self) -> bytes | None:
        """Sleep until there is a frame; None: it is too long for here and comes through the socket. Raises
        ChannelClosed. The interpreter is free meanwhile: ctypes lets go of it for the system call.
        """
        while self._published.value == self._count & 0xFFFFFFFF:
            _futex(self._address, _FUTEX_WAIT, self._count & 0xFFFFFFFF)
        if self._is_closed.value:
            raise ChannelClosed
        frame = self._take()
        self._count += 1
        self._read.value = self._count
        return frame

    def _take(self) -> bytes | None:
        """Machines that reorder stores may show the count before the frame, for an instant: the check tells."""
        start = _HEADER_BYTES + self._count % NUM_SLOTS * SLOT_BYTES
        for _ in range(1000):
            number, length, check = _FRAME_HEADER.unpack_from(self._memory, start)
            if number == self._count & 0xFFFFFFFF:
                if length == _BY_SOCKET:
                    return None
                body = start + _FRAME_HEADER.size
                frame = self._memory[body : body + length]
                if zlib.crc32(frame) == check:
                    return frame
            os.sched_yield()
        raise ChannelClosed(f"frame {self._count} is damaged")


class Pulse:
    """Signs of life of the ranks of a node, in shared memory: writing one costs no system call, so that a rank can tell
    how far it is in the middle of a step.
    """

    class _Fields(ctypes.Structure):
        _fields_ = [
            ("beat_ns", ctypes.c_uint64),
            ("steps_begun", ctypes.c_uint64),
            ("steps_ended", ctypes.c_uint64),
            ("in_collective", ctypes.c_uint64),
            ("copied", ctypes.c_uint64),
            ("failed_below", ctypes.c_uint64),
        ]

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Of `size` ranks. Without a `descriptor` the memory is made; else the descriptor is closed."""
        length = max(mmap.PAGESIZE, size * ctypes.sizeof(self._Fields))
        self.descriptor = -1
        if descriptor is None:
            descriptor = self.descriptor = os.memfd_create("shoal-pulse", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        if self.descriptor < 0:
            os.close(descriptor)
        self._ranks = (self._Fields * size).from_buffer(memory)

    def beat(self, rank: int) -> None:
        """It lives. The clock is the machine's, equal in all processes."""
        self._ranks[rank].beat_ns = time.monotonic_ns()

    def silent_s(self, rank: int) -> float:
        """Seconds since its last beat."""
        return max(0.0, float(time.monotonic_ns() - self._ranks[rank].beat_ns) / 1e9)

    def reset(self, rank: int) -> None:
        """It begins anew, or another process takes its place."""
        self._ranks[rank] = self._Fields(time.monotonic_ns())

    def begin_step(self, rank: int) -> None:
        self._ranks[rank].steps_begun += 1

    def end_step(self, rank: int) -> None:
        self._ranks[rank].steps_ended += 1

    def set_in_collective(self, rank: int, value: bool) -> None:
        """It waits for its peers, or does not any more."""
        self._ranks[rank].in_collective = value

    def is_waiting_for_peers(self, rank: int) -> bool:
        return bool(self._ranks[rank].in_collective)

    def set_copies(self, rank: int, copied: int, failed_below: int) -> None:
        """How far its copies are; see `replica.step.StepResult`."""
        fields = self._ranks[rank]
        fields.failed_below = failed_below  # first: nobody may take a failed copy for a good one
        fields.copied = copied

    def copies(self) -> tuple[int, int]:
        """Through which copies all ranks are, and below which some failed on any."""
        copied = min(fields.copied for fields in self._ranks)
        return copied, max(fields.failed_below for fields in self._ranks)

    def steps(self, rank: int) -> tuple[int, int]:
        """Begun, ended."""
        fields = self._ranks[rank]
        return fields.steps_begun, fields.steps_ended

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]
_libc.syscall.restype = ctypes.c_long


def _futex(address: int, operation: int, value: int) -> None:
    """Not FUTEX_PRIVATE: the other side is another process. Waiting returns for any reason; callers look again."""
    _libc.syscall(_FUTEX or 0, address, operation, value, None, None, 0)
