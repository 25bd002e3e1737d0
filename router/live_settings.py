"""PURE. What a router decides by, and what of it may change while it runs."""

from __future__ import annotations

import msgspec

from router.disaggregation import HandOverConfig


class DispatcherConfig(msgspec.Struct, frozen=True):
    """Limits of holding and retrying."""

    admission_wait_s: float = 0.1
    max_held_requests: int = 1024
    #: this router's part of the bound on what waits in the whole application, in sequences; None: no bound
    max_waiting: int | None = None
    #: how long streams may end at a replica that drains before they are moved to one that does not
    move_after_s: float = 2.0
    #: how long a request that lost its replica waits for another since the last sign that one is being mended. Of a
    #: replacement there is no sign before it is up: 2 to 12 s with the fake runner (the latter on busy cores), and
    #: loading
    resume_wait_s: float = 30.0
    #: and from its loss to its next token at most: three attempts to start ranks again and a replacement, of a minute
    #: each, and `resume_wait_s`, rounded up
    resume_limit_s: float = 300.0
    #: replicas in a row that may die or fail under one request, without a token in between, before it fails
    max_losses: int = 3
    #: a replica that has said nothing for so long is given up, though its stream still stands (SIGSTOP, cut network)
    give_up_silent_s: float = 10.0
    #: under the policy `priority`: its `priority_ageing_s`; None: priorities are not looked at
    priority_ageing_s: float | None = None


class LiveSettings(msgspec.Struct, frozen=True):
    """Applied as a whole."""

    dispatcher: DispatcherConfig
    #: a name of `router.placement.POLICIES`
    placement: str
    #: the replicas' `scheduler.policy`: whether a request may have a priority
    order_policy: str
    #: names the configuration: equal numbers, equal live values
    number: int
    hand_over: HandOverConfig = HandOverConfig()
