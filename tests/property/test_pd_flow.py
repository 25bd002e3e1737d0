"""Blocks on their way from P to D, and anything may happen next: messages late or twice, P, D, a connector or the ranks
die, the router never says `Continue`, clients leave, copies stand still, slabs are not brought.

Every sequence ends once and says what an undisturbed run says; afterwards nothing is pinned, leased or reserved.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from replica.fake_runner import FakeModelRunner, expected_output
from replica.kv_messages import KVSpace
from replica.kv_transfer import TransferLimits
from replica.messages import FinishReason, SamplingParams
from replica.step import OpenArena
from tests.property.lengths import examples
from tests.unit.pd_world import PDPair, PDReplica

BLOCK, VOCAB = 4, 1000
SPACE = KVSpace("fake", BLOCK, 8 * BLOCK, 1, "")


FAULTS = (
    "replica_dies",
    "connector_dies",
    "connection_breaks",
    "ranks_are_lost",
    "step_fails_unread",
    "cache_is_emptied",
    "everything_stands_still",
)


class PDMachine(RuleBasedStateMachine):
    pair: PDPair

    @initialize(
        num_nodes=st.sampled_from([1, 2]),
        num_slots=st.sampled_from([4, 12, 60]),
        num_blocks=st.sampled_from([16, 24, 60]),
        chunk=st.sampled_from([4, 9, 32]),
    )
    def begin(self, num_nodes: int, num_slots: int, num_blocks: int, chunk: int) -> None:
        def runner(open_arena: OpenArena) -> FakeModelRunner:
            return FakeModelRunner(
                num_blocks=num_blocks,
                block_size=BLOCK,
                max_model_len=60,
                vocab_size=VOCAB,
                eos_token_ids=(),
                open_arena=open_arena,
            )

        self.make_runner = runner
        limits = TransferLimits(1, 0.15, 0.25)
        self.pair = PDPair(runner, SPACE, num_nodes=num_nodes, num_slots=num_slots, chunk=chunk, limits=limits)
        self.count = 0
        #: (name, prompt, number of tokens) of those whose client waits
        self.alive: dict[str, tuple[list[int], int]] = {}

    def look(self) -> None:
        pair = self.pair
        for one in (pair.p, pair.d):
            one.core.validate()
        for node in pair.nodes:
            node.core.validate()
            assert node.core.stats(pair.now).num_stranded == 0
        for name in list(self.alive):
            prompt, num_tokens = self.alive[name]
            expected = expected_output(prompt, num_tokens, vocab_size=VOCAB, eos=frozenset())
            tokens = pair.tokens[name]
            assert tokens == expected[: len(tokens)], f"{name} says {tokens} and not {expected}"
            if name in pair.ends:
                assert pair.ends[name] in (FinishReason.LENGTH, FinishReason.MOVED, FinishReason.ERROR)
                assert pair.ends[name] is not FinishReason.LENGTH or tokens == expected
                del self.alive[name]

    def one(self, is_d: bool) -> PDReplica:
        return self.pair.d if is_d else self.pair.p

    @rule(what=st.sampled_from(FAULTS), is_d=st.booleans(), count=st.integers(0, 6))
    def goes_wrong(self, what: str, is_d: bool, count: int) -> None:
        getattr(self, what)(is_d)
        self.all_goes_well(count, None)

    @rule(
        start=st.integers(0, 2), length=st.integers(12, 40), count=st.integers(0, 14), most=st.sampled_from([None, 1])
    )
    def flows(self, start: int, length: int, count: int, most: int | None) -> None:
        """One more, and then all goes well for a while: whatever follows happens in the middle of it."""
        self.submit(start, length, 5)
        self.all_goes_well(count, most)

    @rule(start=st.integers(0, 2), length=st.integers(5, 40), max_tokens=st.integers(2, 8))
    def submit(self, start: int, length: int, max_tokens: int) -> None:
        name, self.count = f"q{self.count}", self.count + 1
        prompt = [start * 100 + i for i in range(length)]
        self.alive[name] = (prompt, max_tokens)
        self.pair.submit(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), 1.0)

    @rule(is_d=st.booleans(), count=st.integers(1, 4))
    def steps(self, is_d: bool, count: int) -> None:
        for _ in range(count):
            self.pair.now += 0.01
            self.pair.step(self.one(is_d))
        self.look()

    @rule(is_d=st.booleans(), count=st.integers(1, 9))
    def messages(self, is_d: bool, count: int) -> None:
        self.one(is_d).exchange(count)
        self.look()

    @rule(is_d=st.booleans())
    def a_message_twice(self, is_d: bool) -> None:
        one = self.one(is_d)
        if one.up:
            one.kv.receive(one.up[0], self.pair.now)

    @rule(ok=st.booleans(), count=st.integers(1, 3))
    def other_nodes(self, ok: bool, count: int) -> None:
        for node in self.pair.nodes:
            node.hear_news(count)
            if node.fetches:
                node.fetch(ok)
        self.look()

    @rule(count=st.integers(3, 25), most=st.sampled_from([None, 1]))
    def all_goes_well(self, count: int, most: int | None) -> None:
        """Without it hardly anything comes as far as the end."""
        pair = self.pair
        for is_d in (False, True):
            self.copies_go(is_d, most)
            self.reconnect(is_d)
        for _ in range(count):
            pair.carry()
            self.prefills()
            self.continues()
            pair.now += 0.01
            for one in (pair.p, pair.d):
                pair.step(one)
        self.look()

    @rule()
    def prefills(self) -> None:
        for name, seated in list(self.pair.seats.items()):
            if seated.is_waiting and name in self.alive and name not in self.pair.begun | self.pair.alone:
                self.pair.prefill(name)

    def continues(self) -> None:
        for name in list(self.pair.firsts):
            self.pair.go_on(name, self.pair.firsts.pop(name))

    @precondition(lambda self: self.pair.firsts)
    @rule()
    def continue_never_comes(self) -> None:
        self.pair.firsts.popitem()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def computes_alone(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        if not self.pair.tokens[name] and name in self.pair.seats:
            self.pair.go_on(name, [])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[name]
        self.pair.firsts.pop(name, None)
        self.pair.abort(name)

    def replica_dies(self, is_d: bool) -> None:
        pair, old = self.pair, self.one(is_d)
        old.die()
        new = pair.replica(old.name, old.node, self.make_runner)
        if is_d:
            pair.d = new
            for name in self.alive:
                pair.firsts.pop(name, None)
            self.alive.clear()
        else:
            pair.p = new

    def connector_dies(self, is_d: bool) -> None:
        node = self.one(is_d).node
        node.die()
        for one in (self.pair.p, self.pair.d):
            if one.node is node:
                one.ranks = []
                one.disconnect()
        for other in self.pair.nodes:
            if other is not node:
                node.hears(other)
                other.hears(node)
        self.look()

    def connection_breaks(self, is_d: bool) -> None:
        self.one(is_d).disconnect()
        self.look()

    def reconnect(self, is_d: bool) -> None:
        if self.one(is_d).member is None:
            self.one(is_d).connect()

    @rule(is_d=st.booleans(), most=st.sampled_from([0, 1]))
    def copies_are_slow(self, is_d: bool, most: int) -> None:
        self.copies_go(is_d, most)

    def copies_go(self, is_d: bool, most: int | None) -> None:
        self.one(is_d).runner.copies.most = most  # type: ignore[attr-defined]

    def ranks_are_lost(self, is_d: bool) -> None:
        one = self.one(is_d)
        names = {s.seq_id: str(s.request_id) for s in one.core.scheduler.living()}
        one.core.pause()
        self.pair.take(one.core.lose_runner(self.pair.now), one, names)
        assert one.core.blocks.num_free == one.core.blocks.num_blocks
        one.runner.begin_anew()  # type: ignore[attr-defined]
        one.core.resume()
        self.look()

    def step_fails_unread(self, is_d: bool) -> None:
        one, pair = self.one(is_d), self.pair
        names = {s.seq_id: str(s.request_id) for s in one.core.scheduler.living()}
        plan = one.core.schedule(pair.now)
        for _, seated in one.core.take_seated():
            pair.seats[seated.request_id] = seated
        pair.take(one.core.take_ended(), one, names)
        if plan is not None:
            pair.take(one.core.fail_step(pair.now), one, names)
        self.look()

    def cache_is_emptied(self, is_d: bool) -> None:
        self.one(is_d).core.reset_prefix_cache()

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.pass_time(seconds)
        self.look()

    def everything_stands_still(self, is_d: bool) -> None:
        """For longer than a lease: what was leased must not be believed."""
        for _ in range(3):
            self.pair.pass_time(4.0, beats=False)
        self.look()

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        for is_d in (False, True):
            self.copies_go(is_d, None)
            self.reconnect(is_d)
        for _ in range(400):
            self.all_goes_well(5, None)
            for name in list(self.alive):
                if name in pair.seats and not pair.tokens[name] and name not in pair.alone:
                    pair.go_on(name, [])
            pair.pass_time(0.5)
            if not self.alive and not pair.p.core.num_unfinished and not pair.d.core.num_unfinished:
                break
        assert not self.alive, f"{self.alive.keys()} do not end"
        self.all_goes_well(5, None)
        pair.check_baseline()


TestPDMachine = PDMachine.TestCase
TestPDMachine.settings = settings(max_examples=examples(12), stateful_step_count=40, deadline=None)
