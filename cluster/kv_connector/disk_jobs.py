"""ASYNC. The core's disk jobs, as few calls of the disk tier as they can be: neighbouring slots go together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from cluster.kv_connector.disk_tier import DiskItem, DiskTier
from cluster.kv_connector.instructions import JobId, ReadDisk, WriteDisk

#: jobs that are answered together: whoever waits for the first waits for all
MOST_TOGETHER = 16
_Job = TypeVar("_Job", ReadDisk, WriteDisk)
#: jobs, and what gives the checksum of each
Run = tuple[list[JobId], Coroutine[Any, Any, list[int | None]]]


class DiskJobs:
    """`slab`: of a slot of the arena."""

    def __init__(self, disk: DiskTier, slab: Callable[[int], memoryview]) -> None:
        self._disk, self._slab = disk, slab

    def reads(self, jobs: list[ReadDisk]) -> Iterator[Run]:
        for some in _runs(jobs):
            items = [DiskItem(job.disk_slot, job.block_hash, self._slab(job.slot)) for job in some]
            yield [job.job for job in some], self._disk.read(items)

    def writes(self, jobs: list[WriteDisk]) -> Iterator[Run]:
        """What the index says of their slots is void when this returns."""
        for some in _runs(jobs):
            items = [
                DiskItem(job.disk_slot, job.block_hash, self._slab(job.slot), job.position, job.parent) for job in some
            ]
            yield [job.job for job in some], self._disk.write(items)


def _runs(jobs: list[_Job]) -> Iterator[list[_Job]]:
    run: list[_Job] = []
    for job in jobs:
        if run and (job.disk_slot != run[-1].disk_slot + 1 or len(run) == MOST_TOGETHER):
            yield run
            run = []
        run.append(job)
    if run:
        yield run
