"""PURE. Places, blocks and memory of sequences that nobody will ever give back, by what is lost.

Each has one owner who takes it back when a sequence ends, so there is nothing to reap: this only adds up, and finds
nothing unless there is a mistake of ours. It looks between two events, when all books must agree. Cheap: one walk over
the sequences, none over blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from replica.engine_core import EngineCore
from replica.messages import RouterId

#: what may be lost
WHAT = ("blocks", "requests", "routers", "permits", "grammars", "queue")


def audit(core: EngineCore, connected: Collection[RouterId]) -> Counter[str]:
    """Counts of what is lost, none of them 0. `connected`: the routers that have a stream."""
    living = {sequence.seq_id for sequence in core.scheduler.living()}
    book, blocks, gate = core._requests, core.blocks.stats(), core._gate
    waiting = [sequence for sequences in core._grammars._waiting_for.values() for sequence in sequences]
    found = Counter(
        {
            # held by nobody who lives
            "blocks": 0 if living else blocks.num_blocks - blocks.num_free,
            # in the book of those who wait for an answer, and not there any more
            "requests": sum(s.seq_id not in living for key in book for s in book.of(key)),
            # of routers that are gone
            "routers": sum(key[0] not in connected for key in book),
            "permits": sum(
                holder.outstanding for key, holder in gate._permits._holders.items() if key[0] not in connected
            ),
            # waiting for a grammar, and not there any more
            "grammars": sum(sequence.seq_id not in living for sequence in waiting),
            # more places taken than there are
            "queue": max(0, gate.num_taken - gate._most_taken),
        }
    )
    return +found
