"""ASYNC. How whoever carries out copies gets the arena of its node: a blocking visit to the connector's door, on the
thread of the copies. `OpenArena` of the runner thread, of a runner process and of each rank.

The open socket is the word that this process may touch the arena; it ends with `close`, or with the process.
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec
import numpy as np
import numpy.typing as npt

from replica.arena_map import ArenaError, ArenaMap
from replica.errors import EngineError
from replica.kv_messages import (
    MAX_KV_MESSAGE_BYTES,
    ArenaPlace,
    Hello,
    Unwelcome,
    Welcome,
    decode_from_connector,
    encode_kv,
)

#: for the whole visit; the copies that wait for it fail then, and what was to be loaded is computed
VISIT_S = 5.0
_LENGTH = struct.Struct("<I")


class NodeArena:
    """`replica.step.Arena`: the arena of a connector, mapped by this process."""

    def __init__(self, arena: ArenaMap, link: socket.socket) -> None:
        self._map, self._link = arena, link
        self.array: npt.NDArray[np.uint8] = arena.array

    def close(self) -> None:
        """Idempotent. Nothing of this process touches the arena after it: only then the connector hears of the end."""
        self.array = np.empty((0, 1), np.uint8)
        self._map.close()
        self._link.close()


def open_arena(place: ArenaPlace, member: str) -> NodeArena:
    """Blocking. Raises OSError or EngineError if the connector is not there, is another one, or does not want us."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(VISIT_S)
        link.connect(place.socket_path)
        hello = encode_kv(Hello(place.holder, f"{member}, process {os.getpid()}", place.space, False))
        link.sendall(_LENGTH.pack(len(hello)) + hello)
        frame, descriptors = _read_frame(link)
        try:
            return NodeArena(_map(place, frame, descriptors), link)
        finally:
            for one in descriptors:
                os.close(one)
    except BaseException:
        link.close()
        raise


def _map(place: ArenaPlace, frame: bytes, descriptors: list[int]) -> ArenaMap:
    try:
        answer = decode_from_connector(frame)
    except msgspec.DecodeError as error:
        raise EngineError(f"the KV connector does not speak our protocol: {error}") from None
    if isinstance(answer, Unwelcome):
        raise EngineError(f"the KV connector refuses: {answer.message}")
    if not isinstance(answer, Welcome) or not descriptors:
        raise EngineError(f"the KV connector answered {type(answer).__name__} and {len(descriptors)} descriptors")
    if answer.connector.incarnation != place.incarnation:
        raise EngineError("another KV connector has taken the place of the one that was meant")
    try:
        return ArenaMap(descriptors[0], answer.num_slots, answer.slot_bytes)
    except ArenaError as error:
        raise EngineError(str(error)) from None


def _read_frame(link: socket.socket) -> tuple[bytes, list[int]]:
    """The first one, and what came along."""
    data, descriptors = bytearray(), list[int]()
    try:
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            wanted = _LENGTH.size
            if len(data) >= wanted:
                wanted += _LENGTH.unpack_from(data)[0]
            if wanted > MAX_KV_MESSAGE_BYTES:
                raise EngineError(f"the KV connector sent {wanted} bytes to begin with")
            more, came, _, _ = socket.recv_fds(link, wanted - len(data), 4)
            descriptors += came
            if not more:
                raise ConnectionError("the KV connector closed the connection")
            data += more
    except BaseException:
        for one in descriptors:
            os.close(one)
        raise
    return bytes(data[_LENGTH.size :]), descriptors
