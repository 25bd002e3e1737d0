"""Where requests' time went, in virtual time: the named parts add up to what each client waited, without a rest."""

from __future__ import annotations

import pytest

from cluster.simulation.workloads import burst
from replica.messages import FinishReason, ReplicaId, RequestId
from router.breakdown import PARTS, breakdown
from router.disaggregation import Decision
from tests.simulation.test_hand_over import _cluster


@pytest.mark.parametrize(("decision", "kills"), [("always", False), ("never", False), ("auto", True)])
def test_the_parts_are_the_whole(decision: Decision, kills: bool) -> None:
    cluster = _cluster(decision)
    if kills:
        cluster.kill_at(0.5, ReplicaId("decode-0"), replace_after_s=0.5)
        cluster.kill_at(1.5, ReplicaId("prefill-0"), replace_after_s=0.5)
    records = cluster.run(burst(60, 4.0, seed=1, prompt=(50, 500), output=(2, 30), num_routers=1))
    spent = dict.fromkeys((*PARTS, "transfer_hidden", "total"), 0.0)
    for record in records:
        assert record.finish_reason is FinishReason.LENGTH
        journal = next(iter(cluster.routers.values())).dispatcher.journal
        entry = journal.of(RequestId(record.request.request_id))
        assert entry is not None
        parts = breakdown(entry, record.ended_s)
        assert parts["total"] == pytest.approx(record.ended_s - record.request.arrival_s)
        assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"])
        assert min(parts.values()) >= -1e-9, parts
        # here a message takes half a millisecond, of which a remote request needs six: nothing else is without a name
        assert parts["messages"] <= 6 * 0.0005 + 1e-9, parts
        for name, seconds in parts.items():
            spent[name] += seconds
    if not kills:
        assert (spent["transfer_hidden"] > 0) == (decision == "always")
        assert spent["stalls"] == 0
    else:
        assert spent["stalls"] > 0
