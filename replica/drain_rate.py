"""PURE. How fast a queue drains, as routers are told: as foreseen, or all at once where there is room for all."""

from __future__ import annotations

from itertools import chain

from replica.block_manager import BlockManager
from replica.drain_forecast import DrainForecast, Room, rate_at_once
from replica.scheduler import Scheduler


class DrainRate:
    """Of one replica."""

    def __init__(self, forecast: DrainForecast, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._forecast = forecast
        self._scheduler = scheduler
        self._blocks = blocks

    def at(self, now: float) -> float:
        """Sequences a second; 0: nobody is queued."""
        scheduler, forecast = self._scheduler, self._forecast
        if forecast.is_fresh(scheduler.num_queued, now):
            return forecast.rate
        if not scheduler.num_queued:
            return 0.0
        queues, room = (scheduler.returning, scheduler.queued, scheduler.blocked), self._room()
        num_running, num_tokens = len(scheduler.running), sum(queue.num_tokens for queue in queues)
        if num_running + scheduler.num_waiting <= room.num_places and num_tokens <= room.num_free_tokens:
            return rate_at_once(scheduler.num_queued, num_running, num_tokens, scheduler.pace)
        forecast.make(scheduler.running, chain(*queues), scheduler.num_queued, room, scheduler.pace, now)
        return forecast.rate

    def _room(self) -> Room:
        scheduler = self._scheduler
        num_free = self._blocks.stats().num_free * self._blocks.block_size
        num_prompt_tokens = scheduler.prompt_token_limit - len(scheduler.running)
        return Room(scheduler.max_num_seqs, num_free, num_prompt_tokens, self._blocks.max_held_tokens)
