"""PURE. How many replicas there should be, from what the replicas tell of themselves (`replica/scaling_figures.py`).

The work that is asked for is counted in replicas. A step of R streams takes base + R x a seconds and b for each prompt
token in it, as each replica measures (`replica/step_pace.py`). If p prompt tokens a second have to be computed beside
them, steps become as long as the target per output token T when R x a + T x b x p = T - base: the left side over the
right one is how much of a replica is in use. R is what runs, or what would run at T for the tokens that are said now:
a quiet cluster has fewer streams at a time because its steps are short, and fewer replicas make them longer. So the sum
over all replicas hardly depends on how many they are, which is what keeps a steady load from oscillating.

What waits is work for which there was no room. It is added as the seconds that the queue needs to drain, by the
replica's own forecast, over the seconds in which it should be gone. KV is counted as blocks in use, which add up too.

More come at once where more is asked for than there is; a load that is only above `target_load` has to last, or each
burst of a steady load would start a replica. Fewer only if the most that was needed in
`cool_down_s` leaves room for one less, with the margin of `hysteresis`. A replica that goes drains first: that is
Serve's part and `replica/engine.py`'s, and no stream is cut for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from replica.config import FrozenModel

#: where the base of a step alone exceeds the target, no number of replicas meets it; this much of it is divided then
_LEAST_SPAN = 0.25
#: of all KV blocks: then there is no time for a confirmation
_FULL = 0.95


class AutoscalingConfig(FrozenModel):
    """Section `autoscaling`: between `replicas.both` and `max_replicas` replicas."""

    max_replicas: int | None = Field(
        None, ge=1, le=1024, description="Most replicas; replicas.both is the fewest. auto: their number is fixed."
    )
    tpot_target_ms: float = Field(100, gt=0, le=60_000, description="Time per output token that streams should have.")
    queue_target_s: float = Field(
        5, gt=0, le=3600, description="What waits should be gone within so long; down: more replicas for a queue."
    )
    target_load: float = Field(0.8, gt=0, le=1, description="Share of what replicas can do within the target.")
    target_kv_use: float = Field(0.85, gt=0, le=1, description="Share of their KV blocks.")
    up_delay_s: float = Field(
        10, ge=0, le=3600, description="How long a load above target_load has to last; above 1 it counts at once."
    )
    hysteresis: float = Field(0.25, ge=0, lt=1, description="One less only if that leaves so much of the load free.")
    cool_down_s: float = Field(120, ge=0, le=86_400, description="How long fewer must have been enough.")


def demand(figures: Mapping[str, float], config: AutoscalingConfig) -> float:
    """What one replica is asked for, in replicas that are as busy as the target allows; above 1 where work waits."""
    target_s = config.tpot_target_ms / 1000
    base_s, decode_s = figures["step_base_s"], figures["step_decode_s"]
    span_s = max(target_s - base_s, _LEAST_SPAN * target_s)
    streams = max(figures["running"], figures["decode_tokens_per_s"] * target_s)
    prompts_s = target_s * figures["step_prompt_token_s"] * figures["prompt_tokens_per_s"]
    # a forecast is made for those in the queue; those put back, and what is left of prompts, count by their tokens
    unstarted_s = figures["step_prompt_token_s"] * max(figures["uncomputed_tokens"], figures["queued_prompt_tokens"])
    backlog_s = max(figures["drain_s"], unstarted_s) if figures["waiting"] else 0.0
    return (decode_s * streams + prompts_s) / span_s + backlog_s / config.queue_target_s


class ScalingPolicy:
    """Asked about once a second. What it has to remember is since when more were wanted, and how many were enough."""

    def __init__(self, config: AutoscalingConfig, fewest: int) -> None:
        self._config = config
        self.fewest = fewest
        self.most = max(fewest, config.max_replicas or fewest)
        self._more_since: float | None = None
        #: (when, how many were enough with the margin), falling: the first one is the most of the last `cool_down_s`
        self._enough: list[tuple[float, int]] = []
        self._fewer_since: float | None = None

    def decide(self, replicas: Iterable[Mapping[str, float]], target: int, now: float) -> int:
        """The number that is wanted. `replicas`: figures of those that are up and told any; `target`: what was wanted
        last, those that start included.
        """
        config, told = self._config, list(replicas)
        if not told:
            return self._bounded(target)
        load = sum(demand(figures, config) for figures in told)
        blocks = sum(figures["kv_use"] for figures in told)
        level = max(load / config.target_load, blocks / config.target_kv_use)
        wanted = self._bounded(_whole(level))
        if wanted > target:
            self._enough.clear()
            self._fewer_since = None
            return self._more(wanted, target, load > target or blocks > _FULL * target, now)
        self._more_since = None
        return self._fewer(self._bounded(_whole(level / (1 - config.hysteresis))), target, now)

    def _more(self, wanted: int, target: int, is_urgent: bool, now: float) -> int:
        self._more_since = now if self._more_since is None else self._more_since
        if not is_urgent and now - self._more_since < self._config.up_delay_s:
            return self._bounded(target)
        self._more_since = None
        return wanted

    def _fewer(self, enough: int, target: int, now: float) -> int:
        """`target`, or the most that was needed in all of the last `cool_down_s`."""
        self._fewer_since = now if self._fewer_since is None else self._fewer_since
        while self._enough and self._enough[-1][1] <= enough:
            self._enough.pop()
        self._enough.append((now, enough))
        while self._enough[0][0] < now - self._config.cool_down_s:
            self._enough.pop(0)
        most = self._enough[0][1]
        if most >= target or now - self._fewer_since < self._config.cool_down_s:
            return self._bounded(target)
        return most

    def _bounded(self, count: int) -> int:
        return min(self.most, max(self.fewest, count))


def _whole(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)
