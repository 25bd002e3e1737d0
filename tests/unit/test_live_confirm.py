"""What `shoal set` tells: a change that came everywhere, that lost, that is refused, that nobody could confirm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cluster.config import ClusterConfig, load
from cluster.live_confirm import CONFIRM_S, SETTLE_S, Confirmation, Confirmed, Held, Seen
from cluster.live_knobs import changed, number_of, overlay_of, told_changes, warnings
from replica.errors import ShoalError

START = load({"scheduler": {"watermark": 0.05}})
MINE = {"scheduler.watermark": 0.1}


def config(**values: Any) -> ClusterConfig:
    return changed(START, {key.replace("__", "."): value for key, value in values.items()})


def confirmation(values: Mapping[str, Any] = MINE) -> Confirmation:
    return Confirmation(START.model_dump(), START, changed(START, values), values, 0.0)


def answer(by: ClusterConfig, refused: str = "", told: ClusterConfig | None = None) -> dict[str, Any]:
    return {"number": number_of(by), "refused": refused, "told": overlay_of(START, told or by)}


def held(*by: ClusterConfig, is_settled: bool = True) -> Held:
    """`by`: for the replicas and for the routers."""
    overlays = {name: overlay_of(START, one) for name, one in zip(("Replica", "Router"), by * 2, strict=False)}
    return Held(overlays, is_settled)


def seen(router: list[Any], replica: list[Any], **others: int) -> list[Seen]:
    """`others`: of the replicas."""
    counts = {"num_wanted": len(replica), "num_starting": 0, **others}
    return [Seen("Replica", answers=replica, **counts), Seen("Router", len(router), 0, router)]


NEW = changed(START, MINE)


def test_it_is_in_force_when_all_say_so_and_not_before() -> None:
    waits, new, old = confirmation(), answer(NEW), answer(START)
    assert waits.judge(held(NEW), seen([old], [new] * 2), 0.1) is None
    assert waits.judge(held(NEW), seen([new], [new, old]), 0.1) is None
    assert waits.judge(held(NEW), seen([new], [new], num_wanted=2), 0.1) is None, "one does not answer"
    assert waits.judge(held(NEW), seen([], [new]), 0.1) is None, "no router is there"
    done = waits.judge(held(NEW), seen([new], [new] * 2), 0.2)
    assert done == Confirmed(number_of(NEW), 2, 1, 0)
    assert done.sentence(0.24).endswith("in force at 2 replica(s) and 1 router(s) after 0.2 s")


def test_a_later_change_with_another_value_is_told_at_once_with_what_is_in_force() -> None:
    other = config(scheduler__watermark=0.2, router__policy="round-robin")
    said = r"superseded by another change; in force: scheduler.watermark=0.2, router.policy=round-robin \("
    with pytest.raises(ShoalError, match=said):
        confirmation().judge(held(other), seen([answer(NEW)], [answer(NEW)]), 0.1)
    with pytest.raises(ShoalError, match=said):  # before anybody is asked, who may take long to answer
        confirmation().follow(held(other), 0.1)
    with pytest.raises(ShoalError, match=r"superseded by another change; in force: scheduler.watermark=0.05 \("):
        confirmation().follow(held(NEW, START), 0.1)


def test_a_change_made_from_what_is_not_there_any_more_would_undo_another_one() -> None:
    other = config(router__policy="round-robin")
    confirmation().check_base(held(START), held(START, is_settled=False))
    with pytest.raises(ShoalError, match=r"in force: scheduler.watermark=0.05, router.policy=round-robin \("):
        confirmation().check_base(held(START), held(START, other))


def test_what_is_on_its_way_inside_the_controller_is_not_superseded_until_it_should_be_there() -> None:
    """`get_deployment_info` tells a change only when the controller's loop has turned."""
    waits = confirmation()
    assert not waits.follow(held(START, is_settled=False), 0.0)
    assert not waits.follow(held(START, is_settled=False), SETTLE_S - 0.1)
    assert waits.follow(held(NEW), SETTLE_S)
    assert not waits.follow(held(START, is_settled=False), 20.0)
    with pytest.raises(ShoalError, match="superseded"):
        waits.follow(held(START, is_settled=False), 20.0 + SETTLE_S)


def test_a_later_change_that_keeps_ours_is_waited_for() -> None:
    both = config(scheduler__watermark=0.1, router__policy="round-robin")
    waits = confirmation()
    assert waits.judge(held(both), seen([answer(NEW)], [answer(NEW)]), 0.1) is None
    assert waits.judge(held(both), seen([answer(NEW)], [answer(both)]), 0.1) is None
    assert waits.judge(held(both), seen([answer(both)], [answer(both)]), 0.2) == Confirmed(number_of(both), 1, 1, 0)


def test_a_value_that_was_there_already_can_be_superseded_as_well() -> None:
    with pytest.raises(ShoalError, match=r"superseded.*scheduler.watermark=0.2"):
        confirmation({"scheduler.watermark": 0.05}).follow(held(config(scheduler__watermark=0.2)), 0.1)


def test_a_later_change_that_cannot_work_is_told_as_one() -> None:
    with pytest.raises(ShoalError, match=r"superseded by another change, which cannot work: scheduler.watermrk"):
        confirmation().follow(Held({"Router": {"scheduler": {"watermrk": 1}}}, True), 0.1)


def test_who_is_starting_is_not_waited_for() -> None:
    new = answer(NEW)
    done = confirmation().judge(held(NEW), seen([new], [new], num_wanted=3, num_starting=2), 0.1)
    assert done == Confirmed(number_of(NEW), 1, 1, 2)
    assert "; 2 more start(s) and will have it" in done.sentence(0.1)
    assert confirmation().judge(held(NEW), seen([new], [], num_wanted=1, num_starting=1), 0.1) is None, "nobody is up"


def test_a_refusal_of_this_change_is_told_and_an_older_one_is_not() -> None:
    old = config(scheduler__watermark=0.5)
    everybody = seen([answer(NEW)], [answer(NEW), answer(START, "no room", told=old)])
    assert confirmation().judge(held(NEW), everybody, 0.1) is None
    everybody = seen([answer(NEW)], [answer(NEW), answer(START, "no room", told=NEW)])
    with pytest.raises(
        ShoalError, match=r"Replica: 1 of 2 refuse it .*: no room\..* to go back: shoal set scheduler.watermark=0.05"
    ):
        confirmation().judge(held(NEW), everybody, 0.1)


def test_after_a_minute_it_says_who_is_missing_and_promises_what_the_controller_holds() -> None:
    everybody = seen([], [answer(NEW)])
    waits = confirmation()
    assert waits.judge(held(NEW), everybody, CONFIRM_S) is None
    with pytest.raises(ShoalError, match=r"after 60 s .*\(Router: 0 of 1\).* will have them"):
        waits.judge(held(NEW), everybody, CONFIRM_S + 0.1)
    with pytest.raises(ShoalError, match="superseded"):  # and does not promise what is not true any more
        waits.judge(held(config(scheduler__watermark=0.2)), everybody, CONFIRM_S + 0.1)


def test_an_equal_value_is_no_change() -> None:
    after = config(scheduler__max_num_seqs=4, scheduler__enable_chunked_prefill=False)
    assert told_changes(
        after,
        config(scheduler__max_num_seqs=4, scheduler__max_num_batched_tokens=64),
        ["scheduler.max_num_seqs", "scheduler.enable_chunked_prefill", "scheduler.max_num_batched_tokens"],
    ) == [
        "scheduler.max_num_seqs: already 4",
        "scheduler.enable_chunked_prefill: false -> true",
        "scheduler.max_num_batched_tokens: auto -> 64",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"scheduler__policy": "priority"}, {"scheduler__policy": "fcfs"}, ["fcfs looks at no priority.*400"]),
        ({"scheduler__policy": "priority"}, {"scheduler__policy": "sjf"}, ["sjf looks at no priority.*400"]),
        ({"scheduler__policy": "fcfs"}, {"scheduler__policy": "sjf"}, []),
        ({"scheduler__policy": "fcfs"}, {"scheduler__policy": "priority"}, []),
        ({"scheduler__policy": "priority"}, {"scheduler__policy": "priority"}, []),
        ({}, {"router__max_queued_requests_per_replica": 5}, ["more than 5 sequences.*400"]),
        ({}, {"router__max_queued_requests_per_replica": 500}, []),
        ({}, {"router__max_num_queued_reqs": 3}, ["more than 3 sequences.*router.max_num_queued_reqs"]),
        ({}, {"router__max_num_queued_reqs": 500}, []),
        ({"router__max_num_queued_reqs": 3}, {"router__max_num_queued_reqs": 4}, []),
    ],
)
def test_a_change_that_makes_requests_400_is_made_with_a_warning(
    before: dict[str, Any], after: dict[str, Any], said: list[str]
) -> None:
    found = warnings(config(**before), config(**after))
    assert len(found) == len(said)
    for sentence, pattern in zip(found, said, strict=True):
        assert pattern.split(".*")[0] in sentence
        assert pattern.split(".*")[1] in sentence
