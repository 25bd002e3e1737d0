"""Permits under a hostile network: messages late, twice, out of order or never; routers and replicas that die.

The production halves (`PermitDesk`, `PermitStock`) with a queue that is only a number, and between them a bag of
messages from which anything may come next.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.messages import Ask, Grant, Permit, RouterId, Wish
from replica.permits import LEASE_S, PermitDesk
from replica.places import Places
from router.permit_stock import ASK_AGAIN_S, PermitStock
from tests.property.lengths import examples

ROUTERS = [RouterId("r0"), RouterId("r1"), RouterId("r2")]
CAP = 4


class PermitMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.desk = PermitDesk()
        self.num_queued = 0
        self.stocks = {router: PermitStock() for router in ROUTERS}
        self.held: dict[RouterId, list[Wish]] = {router: [] for router in ROUTERS}
        #: (to the replica?, router, which incarnation of the pair, message)
        self.bag: list[tuple[bool, RouterId, int, object]] = []
        self.links = dict.fromkeys(ROUTERS, 0)
        self.num_news = 0

    # ---- the shells, as `Dispatcher` and `EngineCore` use the halves ----

    def send(self, down: bool, router: RouterId, message: object) -> None:
        self.bag.append((down, router, self.links[router], message))

    def router_turn(self, router: RouterId) -> None:
        """Spend what there is on who is held, in their order; then say what is left and who waits."""
        stock, held = self.stocks[router], self.held[router]
        while held and (permit := stock.spend(held[0].num_sequences)) is not None:
            self.send(True, router, (permit, held.pop(0).num_sequences))
        if (ask := stock.next_ask(held[:3], self.num_news, self.now)) is not None:
            assert stock.num_available == 0, "nothing is kept"
            self.send(True, router, ask)

    def deal(self) -> None:
        for router, grant in self.desk.deal(CAP - self.num_queued, CAP, Places({}), self.now):
            self.send(False, router, grant)

    def deliver(self, down: bool, router: RouterId, link: int, message: object) -> None:
        if link != self.links[router]:
            return  # of a stream that is gone
        match message:
            case Grant():
                self.stocks[router].hear(message)
                self.router_turn(router)
            case Ask():
                self.desk.ask(router, message)
                self.deal()
            case (permit, int(n)):
                assert permit is None or isinstance(permit, Permit)
                covered = self.desk.redeem(router, "", permit, n)
                assert 0 <= covered <= n
                if covered == n or self.num_queued + self.desk.num_outstanding + n <= CAP:
                    self.num_queued += n
                else:
                    self.num_news += 1
                self.deal()

    # ---- what may happen ----

    @rule(router=st.sampled_from(ROUTERS), n=st.integers(1, CAP), value=st.integers(0, 9))
    def arrive(self, router: RouterId, n: int, value: int) -> None:
        self.held[router] = sorted([*self.held[router], Wish(n, float(value))], key=lambda w: w.value)
        self.router_turn(router)

    @rule(router=st.sampled_from(ROUTERS), n=st.integers(1, CAP))
    def submit_without_permit(self, router: RouterId, n: int) -> None:
        self.send(True, router, (None, n))

    @rule(router=st.sampled_from(ROUTERS))
    def clients_leave(self, router: RouterId) -> None:
        self.held[router].clear()

    @precondition(lambda self: self.bag)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "twice", "lose"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        position = data.draw(st.integers(0, len(self.bag) - 1))
        item = self.bag[position] if fate == "twice" else self.bag.pop(position)
        if fate != "lose":
            self.deliver(*item)

    @rule(n=st.integers(1, CAP))
    def some_are_scheduled(self, n: int) -> None:
        self.num_queued -= min(n, self.num_queued)
        self.num_news += 1
        self.deal()

    @rule(router=st.sampled_from(ROUTERS))
    def router_dies_and_another_comes(self, router: RouterId) -> None:
        self.desk.forget(router)
        self.links[router] += 1
        self.stocks[router] = PermitStock()
        self.held[router].clear()

    @rule()
    def replica_dies_and_another_comes(self) -> None:
        self.desk, self.num_queued = PermitDesk(), 0
        for router in ROUTERS:
            self.links[router] += 1
            self.stocks[router] = PermitStock()

    @rule(seconds=st.sampled_from([0.1, ASK_AGAIN_S, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.num_news += 1
        self.deal()
        for router in ROUTERS:
            self.router_turn(router)

    @invariant()
    def never_more_than_the_cap(self) -> None:
        assert self.num_queued + self.desk.num_outstanding <= CAP
        self.desk.validate()

    def teardown(self) -> None:
        """Whatever was lost comes back with the leases, and whoever still waits is let in."""
        self.bag.clear()
        self.num_queued = 0
        self.time_passes(LEASE_S)
        self.time_passes(LEASE_S)
        for _ in range(1000):
            if not self.bag:
                if not any(self.held.values()):
                    break
                self.num_queued = 0
                self.time_passes(ASK_AGAIN_S)
            while self.bag:
                self.deliver(*self.bag.pop(0))
        assert not any(self.held.values()), "somebody waits for ever beside free places"
        assert self.desk.num_outstanding == 0, "permits did not come back"


TestPermitMachine = PermitMachine.TestCase
TestPermitMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
