"""TORCH. How torch ranks meet (a process group a generation), and a rank's runner of the real model.

Every generation has a store of its own on rank 0: what a dead one left in an old store confuses nobody.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from replica.collective import Collective, GroupCollective

#: to find the peers; and the longest wait inside a step, beyond what the replica calls a hung step
JOIN_S = 60.0
COLLECTIVE_S = 600.0


class WatchedCollective:
    """Says when it waits for peers, so that one who hangs can be told from those who wait for it."""

    def __init__(self, inner: Collective, note_wait: Callable[[bool], None]) -> None:
        self.inner = inner
        self._note_wait = note_wait

    def sum_(self, x: torch.Tensor) -> None:
        """See `Collective.sum_`."""
        self._note_wait(True)
        self.inner.sum_(x)
        self._note_wait(False)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collective.gather_columns`."""
        self._note_wait(True)
        gathered = self.inner.gather_columns(x)
        self._note_wait(False)
        return gathered


class TorchMeeting:
    """A `replica.rank_loop.Meeting` over torch.distributed. `host`: this rank's address for its peers."""

    def __init__(self, rank: int, size: int, host: str, backend: str, note_wait: Callable[[bool], None]) -> None:
        self._rank, self._size, self._host, self._backend = rank, size, host, backend
        self._note_wait = note_wait
        self._store: Any = None
        #: of the present generation; the runner keeps this object, so that it speaks to the peers of the day
        self.collective: WatchedCollective | None = None
        if host.startswith("127."):  # gloo looks up the machine's name, which need not lead back here
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def lead(self) -> tuple[str, int]:
        """See `Meeting.lead`."""
        self._store = self._make_store(self._host, 0)
        return self._host, self._store.port

    def join(self, host: str, port: int) -> None:
        """See `Meeting.join`."""
        if self._rank:
            self._store = self._make_store(host, port)
        distributed.init_process_group(
            self._backend,
            store=self._store,
            rank=self._rank,
            world_size=self._size,
            timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        )
        group = distributed.group.WORLD
        assert group is not None
        inner = GroupCollective(group)
        if self.collective is None:
            self.collective = WatchedCollective(inner, self._note_wait)
        else:
            self.collective.inner = inner

    def leave(self) -> None:
        """See `Meeting.leave`. With its sockets closed, peers that wait for this rank fail, and leave in their turn."""
        if self.collective is not None:
            self.collective.inner = _Nobody()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self._store = None
        gc.collect()

    def _make_store(self, host: str, port: int) -> Any:
        timeout = datetime.timedelta(seconds=JOIN_S)
        make: Any = distributed.TCPStore  # type: ignore[attr-defined]
        return make(host, port, self._size, is_master=not self._rank, timeout=timeout, wait_for_workers=False)


class _Nobody:
    """Between two generations."""

    def sum_(self, x: torch.Tensor) -> None:
        raise RuntimeError("no peers: the generation is over")

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        raise RuntimeError("no peers: the generation is over")
