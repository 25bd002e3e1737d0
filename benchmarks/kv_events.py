"""What happens in the world around a KVConnector (`kv_world.py`): one event a step."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.kv_world import CHAINS, HASHES, PEERS, TORN, Group, World
from cluster.kv_connector.instructions import WriteDisk
from cluster.kv_connector.tier_news import EVERY_S
from replica.kv_messages import KV_LEASE_S, Acquire, Clear, KVPeer, KVTier, Release, Reserve, Seal, TierEvent


class WildWorld(World):
    """`step` does one thing; `rng` says how."""

    def step(self, action: int, rng: random.Random) -> None:
        """One thing happens, then everything is looked at."""
        ACTIONS[action % len(ACTIONS)](self, rng)
        self.look()

    def advance(self, rng: random.Random) -> None:
        self.pass_time(rng.choice([0.001, 0.02, EVERY_S, 0.2, 1.0, 1.0, 3.0]))

    def long_silence(self, rng: random.Random) -> None:
        """Long enough for who is stopped to lose what it has."""
        for _ in range(4 if rng.random() < 0.3 else 0):
            self.pass_time(KV_LEASE_S / 3)

    def _pick(self, rng: random.Random, *, can_ask: bool = True) -> Group | None:
        groups = [g for g in self.groups if not can_ask or not (g.is_stopped or g.is_closing)]
        return rng.choice(groups) if groups else None

    def come(self, rng: random.Random) -> None:
        """A replica, or a new incarnation of one; at times another node."""
        if len(self.groups) >= 5:
            return
        self.next_incarnation += 1
        is_peer = rng.random() < 0.2
        name = rng.choice(PEERS) if is_peer else f"replica-{rng.randrange(3)}"
        group = Group(KVPeer(name, str(self.next_incarnation)), is_peer, self.now)
        self.groups.append(group)
        for number in range(rng.randint(1, 3)):
            self._connect(group, f"member-{number}")

    def acquire(self, rng: random.Random) -> None:
        group = self._pick(rng)
        if group is None:
            return
        chain = rng.choice(CHAINS)
        start = rng.choice([0, 0, 0, rng.randrange(len(chain))])
        hashes = chain[start : start + rng.randint(1, len(chain))]
        waits = rng.random() < 0.3
        within_s = rng.choice([0.0, 0.05, 0.5, 2.0, 30.0 if waits else 2.0])
        lease_id, group.next_id = group.next_id, group.next_id + 1
        group.asked[lease_id] = (hashes, self.generation, self.now + within_s)
        sources = [p for p in PEERS if rng.random() < 0.2]
        before = chain[start - 1] if start else b""
        self.say(group, Acquire(lease_id, hashes, within_s, sources, start, before, waits))

    def release(self, rng: random.Random) -> None:
        group = self._pick(rng)
        if group is None:
            return
        known = [*group.leases, *group.asked]
        for lease_id in rng.sample(known, k=min(len(known), rng.randint(1, 3))):
            group.leases.pop(lease_id, None)
            group.asked.pop(lease_id, None)
            self.say(group, Release([lease_id, 10_000]))

    def reserve(self, rng: random.Random) -> None:
        group = self._pick(rng)
        if group is None or group.is_peer:
            return
        chain = rng.choice(CHAINS)
        start = rng.randrange(len(chain))
        hashes = chain[start : start + rng.randint(1, 6)]
        number, group.next_id = group.next_id, group.next_id + 1
        group.reserving[number] = (hashes, self.generation)
        positions = list(range(start, start + len(hashes))) if rng.random() < 0.7 else []
        parents = [chain[p - 1] if p else b"" for p in positions]
        self.say(group, Reserve(number, hashes, rng.random() < 0.3, parents, positions))

    def write(self, rng: random.Random) -> None:
        """Whoever may write does, a given up one too as long as it has not closed: slabs are torn until the end."""
        group = self._pick(rng, can_ask=False)
        if group is None or not group.writes or group.is_stopped:
            return
        number = rng.choice(list(group.writes))
        writes = group.writes[number]
        for slot, _ in writes.values():
            self.memory[slot] = TORN
        if rng.random() < 0.2:
            return
        for slot, content in writes.values():
            self.memory[slot] = content
        if group.is_closing:
            return
        done = [i for i in writes if rng.random() < 0.9]
        del group.writes[number]
        self.say(group, Seal(number, [*done, 999]))
        self.count("blocks stored", len(done))

    def listen(self, rng: random.Random) -> None:
        """A group hears what was sent to it."""
        group = self._pick(rng, can_ask=False)
        if group is not None and not group.is_stopped:
            self.hear(group)
            if group.is_closing and rng.random() < 0.3:
                self.leave(group, group.members[-1])

    def stop(self, rng: random.Random) -> None:
        group = self._pick(rng)
        if group is not None and rng.random() < 0.3:
            group.is_stopped = True

    def go_on(self, rng: random.Random) -> None:
        """It looks at the clock first."""
        for group in self.groups:
            if group.is_stopped and rng.random() < 0.5:
                group.is_stopped = False
                self.look_at_the_clock(group)

    def kill(self, rng: random.Random) -> None:
        """One process; or one that was told to closes."""
        group = self._pick(rng, can_ask=False)
        if group is not None and rng.random() < 0.3:
            self.leave(group, rng.choice(group.members))

    def rank_comes(self, rng: random.Random) -> None:
        """In the place of one that died."""
        group = self._pick(rng)
        if group is not None and len(group.members) < 3:
            self._connect(group, "again")

    def clear(self, rng: random.Random) -> None:
        group = self._pick(rng)
        if group is None or rng.random() < 0.7:
            return
        self.generation += 1
        self.oldest = self.generation
        self.seen_generation += 1
        self.say(group, Clear(self.generation))
        assert self.core.generation == self.seen_generation, "peers will not hear of it"
        self.count("clears")

    def job_ends(self, rng: random.Random) -> None:
        if self.jobs:
            self.end_job(rng.choice(list(self.jobs)), rng)

    def answer_twice(self, rng: random.Random) -> None:
        if self.answered:
            self.carry_out(rng.choice(self.answered)())

    def flip(self, rng: random.Random) -> None:
        """A slab on disk is not what was written."""
        being_written = {job[0].disk_slot for job in self.jobs.values() if isinstance(job[0], WriteDisk)}
        slot = rng.randrange(max(1, self.num_disk_slots))
        if slot in self.index and slot not in being_written and rng.random() < 0.5:
            self.disk[slot] = (b"flipped", rng.randrange(1 << 30))

    def peer(self, rng: random.Random) -> None:
        peer_id = rng.choice(PEERS)
        if peer_id not in self.peers:
            self.peers[peer_id] = 0
            self.carry_out(self.core.on_peer(peer_id))
        elif rng.random() < 0.05:
            del self.peers[peer_id]
            self.carry_out(self.core.on_peer_gone(peer_id))
        else:
            number = self.peers[peer_id] + (rng.random() < 0.05)
            self.peers[peer_id] = number + 1
            start, chain = rng.randrange(12), rng.choice(CHAINS)
            stored = {KVTier.HOST: chain[start : start + 4]} if rng.random() < 0.7 else {}
            if is_cleared := rng.random() < 0.05:
                self.peer_generations[peer_id] += rng.randrange(2)
            elif rng.random() < 0.3 and self.peer_generations[peer_id] < self.core.generation:  # it has heard of us
                self.peer_generations[peer_id], is_cleared = self.core.generation, True
            generation = self.peer_generations[peer_id]
            event = TierEvent(number, stored, rng.sample(HASHES, k=3), is_cleared, generation)
            self.carry_out(self.core.on_peer_event(peer_id, event, self.now))
            self.follow()
            if generation < self.core.generation and list(self.peers) == [peer_id]:
                self.count("not believed")
                assert all(self.core.tier_of(h) is not KVTier.REMOTE for h in HASHES), "it may be of before a Clear"

    def restart(self, rng: random.Random) -> None:
        """kill -9 of the connector: a new arena, the same disk. What was being written is torn."""
        if rng.random() < 0.05:
            self.oldest = self.oldest_on_disk
            self.seen_generation = self.generation_on_disk
            self.note()
            self.start()
            self.count("restarts")


#: what happens, the more often the more often it stands here
ACTIONS: list[Callable[[WildWorld, random.Random], None]] = [
    *[WildWorld.acquire] * 6,
    *[WildWorld.reserve] * 8,
    *[WildWorld.write] * 12,
    *[WildWorld.listen] * 16,
    *[WildWorld.release] * 4,
    *[WildWorld.job_ends] * 8,
    *[WildWorld.advance] * 4,
    *[WildWorld.come] * 4,
    *[WildWorld.peer] * 3,
    WildWorld.all_jobs_end,
    WildWorld.kill,
    WildWorld.kill,
    WildWorld.rank_comes,
    WildWorld.stop,
    *[WildWorld.go_on] * 3,
    WildWorld.long_silence,
    WildWorld.clear,
    WildWorld.answer_twice,
    WildWorld.flip,
    WildWorld.restart,
]
