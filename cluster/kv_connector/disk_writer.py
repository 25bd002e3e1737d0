"""PURE. Writes behind: sealed blocks on their way to disk, and how the disk is emptied.

A disk that fails is left alone for a while, each time for twice as long: a full one would otherwise be asked for every
block.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.kv_connector.disk_index import DiskBlock, DiskTier, WriteBacklog
from cluster.kv_connector.host_tier import Block, HostTier
from cluster.kv_connector.instructions import ClearDisk, DropDisk, Instruction, JobId, WriteDisk

#: hashes that wait for being written
MOST_WAITING = 4096
#: a second after the first failure, then twice as long each time
LONGEST_PAUSE_S = 60.0


class DiskWriter:
    """Owns the jobs that write, and the wait for an empty disk."""

    def __init__(self, host: HostTier, disk: DiskTier, jobs: Iterator[JobId], most_writes: int, min_uses: int) -> None:
        """`min_uses`: a block used less often is not written."""
        self._host = host
        self._disk = disk
        self._jobs = jobs
        self._most_writes = most_writes
        self._min_uses = min_uses
        self._backlog = WriteBacklog(MOST_WAITING)
        self._writes: dict[JobId, tuple[Block, DiskBlock, float]] = {}
        #: hashes being written, but not of void blocks
        self._hashes: set[bytes] = set()
        self._pause_s = 0.0
        self._paused_until = float("-inf")
        #: somebody waits for an empty disk
        self._is_clear_wanted = False
        self._clear_job: JobId | None = None
        self.num_written = 0
        self.num_failed = 0

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    @property
    def num_waiting(self) -> int:
        return len(self._backlog)

    @property
    def num_dropped(self) -> int:
        """Blocks that found the backlog full."""
        return self._backlog.num_dropped

    @property
    def is_clearing(self) -> bool:
        return self._is_clear_wanted or self._clear_job is not None

    def offer(self, block: Block) -> None:
        """It was sealed, or used again."""
        if (
            self._disk.num_slots
            and block.uses >= self._min_uses
            and block.block_hash not in self._disk
            and block.block_hash not in self._hashes
        ):
            self._backlog.offer(block)

    def plan(self, now: float) -> list[Instruction]:
        """What may begin now."""
        if now < self._paused_until or self._clear_job is not None:
            return []
        if self._is_clear_wanted:
            if self._writes:
                return []
            self._is_clear_wanted, self._clear_job = False, next(self._jobs)
            return [ClearDisk(self._clear_job)]
        told: list[Instruction] = []
        while len(self._writes) < self._most_writes and (block := self._backlog.pop()) is not None:
            if block.block_hash in self._disk or block.block_hash in self._hashes:
                continue
            written = self._disk.begin(block)
            if written is None:
                break
            self._host.pin(block)
            job = next(self._jobs)
            self._writes[job] = (block, written, now)
            self._hashes.add(block.block_hash)
            told.append(WriteDisk(job, block.slot, written.disk_slot, block.block_hash, block.position, block.parent))
        return told

    def written(self, job: JobId, checksum: int | None, now: float) -> None:
        """`checksum`: None if it failed. An unknown job is ignored."""
        found = self._writes.pop(job, None)
        if found is None:
            return
        block, written, _ = found
        if not written.is_void:
            self._hashes.discard(block.block_hash)
        self._host.unpin(block)
        if checksum is None:
            self._disk.not_written(written)
            self._pause(now)
        else:
            self.num_written += not written.is_void
            self._pause_s = 0.0
            self._disk.written(written, checksum)

    def forget_all(self) -> None:
        """Nothing of before gets to be found on disk, also after a restart: `is_clearing` until that is sure."""
        self._backlog.clear()
        for _, written, _ in self._writes.values():
            written.is_void = True
        self._hashes.clear()
        self._disk.forget_all()
        # one that is on its way does for this as well: nothing was written since it was told
        self._is_clear_wanted = self._disk.num_slots > 0 and self._clear_job is None

    def cleared(self, job: JobId, ok: bool, now: float) -> None:
        """The disk says that it is empty. If it could not be emptied it is told again, after a pause."""
        if job != self._clear_job:
            return
        self._clear_job = None
        if not ok:
            self._is_clear_wanted = True
            self._pause(now)

    def drop(self, block: DiskBlock) -> list[Instruction]:
        """It was found to be no good."""
        return [DropDisk(block.disk_slot, block.block_hash)] if self._disk.drop(block) else []

    def num_stuck(self, before: float) -> int:
        """Writes that began until then."""
        return sum(begun <= before for _, _, begun in self._writes.values())

    def _pause(self, now: float) -> None:
        self.num_failed += 1
        if now < self._paused_until:
            return  # it failed together with another one
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or 1.0)
        self._paused_until = now + self._pause_s

    def validate(self) -> None:
        """Raises AssertionError."""
        self._disk.validate()
        assert len(self._writes) <= self._most_writes, "too much is on its way"
        living = {block.block_hash for block, written, _ in self._writes.values() if not written.is_void}
        assert living == self._hashes, "what is being written is not known"
        for block, _, _ in self._writes.values():
            assert block.pins, f"{block} is being written and may be given up"
