"""PURE. The scaling policy as Ray Serve calls it (2.60, `AutoscalingConfig.policy`): in its controller, ten times a
second, with the figures that replicas returned from `record_autoscaling_stats`.

Ray's hook is sound for us: Serve sees none of our requests, but its own figures are not used at all. Of each figure the
last value counts, not Serve's mean over `look_back_period_s`, which would show a step late; and Serve's own delays are
0, since the policy has its own. Serve makes a new object after each deploy and when its controller is replaced: only
the cool-down begins anew then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.autoscaling import AutoscalingConfig, ScalingPolicy
from cluster.config import ClusterConfig
from replica.messages import Role
from replica.scaling_figures import NAMES

#: replicas are asked for their figures, and send them, so often
REPORT_S = 1.0
#: of Serve's own means, which nobody reads; it wants more than `REPORT_S`
_LOOK_BACK_S = 2.0


class ServePolicy:
    """Serve makes one of `policy_kwargs` and calls it with its `AutoscalingContext`."""

    def __init__(self, fewest: int, settings: Mapping[str, Any]) -> None:
        self._policy = ScalingPolicy(AutoscalingConfig.model_validate(settings), fewest)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        told = figures_of(context.raw_metrics or {})
        return self._policy.decide(told, context.target_num_replicas, context.current_time), {}


def figures_of(series: Mapping[str, Mapping[Any, Any]]) -> list[dict[str, float]]:
    """The last figures of each replica that is up. `series`: name -> replica -> points with a `value`. A replica that
    sent only some of them has told nothing yet.
    """
    last = {name: {key: points[-1].value for key, points in series.get(name, {}).items() if points} for name in NAMES}
    complete = set.intersection(*(set(values) for values in last.values()))
    return [{name: last[name][key] for name in NAMES} for key in complete]


def serve_options(config: ClusterConfig, role: Role = Role.BOTH) -> dict[str, Any]:
    """How many replicas of a role there are, as Serve's deployment takes it: a fixed number, or a mapping for its
    `AutoscalingConfig`.
    """
    if config.autoscaling.max_replicas is None or role is not Role.BOTH:
        return {"num_replicas": config.replicas.counts[role]}
    return {
        "autoscaling_config": {
            # no `initial_replicas`: Serve would go back to them whenever a live knob changes
            "min_replicas": config.replicas.both,
            "max_replicas": config.most_of(role),
            "metrics_interval_s": REPORT_S,
            "look_back_period_s": _LOOK_BACK_S,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "policy": {
                "policy_function": "cluster.serve_policy:ServePolicy",
                "policy_kwargs": {
                    "fewest": config.replicas.both,
                    "settings": config.autoscaling.model_dump(mode="json"),
                },
            },
        }
    }
