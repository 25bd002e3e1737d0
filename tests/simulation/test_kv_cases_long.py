"""Case F-04, at length: what is read from a tier stays there, and stays what it was, whatever is stored meanwhile."""

from __future__ import annotations

import zlib

from cluster.kv_connector.instructions import Instruction
from tests.unit.kv_node import Node, hashes, only


class QuickNode(Node):
    """Looks at its books when it is asked to."""

    def kept(self, told: list[Instruction]) -> list[Instruction]:
        return told


def test_f_04_ten_thousand_rounds_of_a_load_among_evictions() -> None:
    """A tier of 4 blocks; each round X is leased, ten stores force others out, and what was leased is looked at."""
    node = QuickNode(num_slots=4)
    memory: dict[int, bytes] = {}

    def store(name: bytes) -> int:
        number, slots = node.reserve([name])
        if slots[0] >= 0:
            memory[slots[0]] = name
            node.seal(number, 1)
        return slots[0]

    x = hashes(1, "x")
    slot = store(x[0])
    checksum = zlib.crc32(memory[slot])
    for number in range(10_000):
        lease = node.acquire(x)
        assert lease.slots == [slot]
        for other in range(10):
            assert store(b"%06d.%08d" % (number, other)) not in (slot, -1)
        assert zlib.crc32(memory[only(lease.slots)]) == checksum
        node.release(lease)
        if number % 500 == 0:
            node.core.validate()
    stats = node.core.stats(node.now)
    assert stats.num_evictions >= 99_997
    assert (stats.num_leased, stats.num_stranded) == (0, 0)
