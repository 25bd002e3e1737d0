"""Streams that lose their replica at exactly one output position, and what their clients read.

Two replicas, a router and the HTTP application on one event loop. Replicas step when the test says so, and only after
every client has read what the step before gave: so the bytes of an undisturbed run and of one with a loss can be
compared as they are. One run takes many positions: its requests are equal, each began a step after the one before, so
when the link is cut they stand at 0, 1, 2, ... tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from replica.config import AdmissionConfig, CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner, mix, prefix_state
from replica.messages import RouterId, StepOutput, SubmitReply, UpMessage
from replica.router_link import RouterLink
from replica.runner_thread import RunnerThread
from replica.service import ReplicaService
from replica.step import ModelRunner
from router.app import create_app
from router.app_settings import AppSettings
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from router.prepare import TextCodec
from tests.cluster import harness
from tests.cluster.harness import ClusterUnderTest, GatedRunner, ReplicaUnderTest

#: on busy cores a step of a real model may keep this loop waiting; only what the test cuts may move a request
PATIENT = DispatcherConfig(admission_wait_s=600.0, resume_wait_s=600.0, give_up_silent_s=600.0)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def until(condition: object) -> None:
    """A step of a real model may take a while on busy cores."""
    await harness.until(condition, timeout_s=120.0)


class Case(msgspec.Struct, frozen=True):
    """One kind of request. `num_tokens` at least are expected of its undisturbed run."""

    name: str
    path: str
    body: dict[str, Any]
    num_tokens: int = 64

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def streamed(self) -> Case:
        """The same with `stream` and usage."""
        more = {"stream": True, "stream_options": {"include_usage": True}}
        return Case(f"{self.name}, streamed", self.path, {**self.body, **more}, self.num_tokens)


class ScriptedRunner(FakeModelRunner):
    """Says `script` and then end tokens, as long as prefix and KV are what they have to be; else it goes astray."""

    def __init__(self, script: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._script = list(script)
        self._prompt_states: dict[tuple[int, ...], int] = {}

    def _choose(self, known: Any, state: int) -> int:
        start = known.num_prompt_tokens
        position = len(known.token_ids) - start
        prompt = tuple(known.token_ids[:start])
        expected = self._prompt_states.get(prompt) or self._prompt_states.setdefault(prompt, prefix_state([*prompt]))
        for token_id in self._script[:position]:
            expected = mix(expected, token_id)
        if state != expected:
            return super()._choose(known, state)
        return self._script[position] if position < len(self._script) else self._info.eos_token_ids[0]


class CuttableLink:
    """Counts what a replica sends over a link, and can let it get lost."""

    def __init__(self, link: RouterLink) -> None:
        self.link = link
        #: messages that carry a load; one was sent when the link was made
        self.num_sent = 1
        self.is_losing = False
        self._send = link.send
        link.send = self.send  # type: ignore[method-assign]

    def send(self, message: UpMessage) -> None:
        if self.is_losing:
            return
        self.num_sent += isinstance(message, StepOutput | SubmitReply)
        self._send(message)

    def cut(self) -> None:
        """As a killed process cuts it: the call ends in the middle, with nothing more to come."""
        self.link.cut()


class SteppedReplica(ReplicaUnderTest):
    """A replica that takes a step only in `RecoveryPlane.step`."""

    def __init__(self, name: str, config: EngineConfig, make: Callable[[], ModelRunner]) -> None:
        self.name = name
        self.num_taken = 0
        self.links: list[CuttableLink] = []

        def build() -> GatedRunner:
            self.runner = GatedRunner(make())  # type: ignore[arg-type]
            return self.runner

        self.engine = Engine(config, RunnerThread(build), incarnation=name)

    async def start(self) -> None:
        await self.engine.start()
        connect = self.engine.connect

        def counted(router_id: RouterId, on_cut: Callable[[], object] = lambda: None) -> RouterLink:
            link = connect(router_id, on_cut)
            self.links.append(CuttableLink(link))
            return link

        self.engine.connect = counted  # type: ignore[method-assign]
        self.service = ReplicaService(self.engine)
        self.address = await self.service.start("127.0.0.1")

    @property
    def has_plan(self) -> bool:
        """A step waits at the gate."""
        return len(self.runner.plans) > self.num_taken

    @property
    def is_between_steps(self) -> bool:
        """Nothing is under way but what waits at the gate."""
        return self.has_plan or self.engine._step_started_at is None


class Reader:
    """A client: everything it was sent."""

    def __init__(self, app: Any, case: Case, name: str) -> None:
        self.case = case
        self.status = 0
        self.data = b""
        self.is_closed = False
        body = {**case.body, "cache_salt": name} if "cache_salt" not in case.body else case.body
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": case.path, "headers": [], "query_string": b""}
        self.task = asyncio.ensure_future(app({**scope, "root_path": ""}, self._receive, self._send))

    async def _receive(self) -> Any:
        if not self._incoming:
            await asyncio.Event().wait()
        return self._incoming.pop(0)

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.data += message.get("body", b"")
            self.is_closed = not message.get("more_body", False)

    def told(self) -> list[Any]:
        """What it read, without ids and times: the events of a stream in order, or one JSON body."""
        if not self.case.is_streamed:
            return [_without_ids(json.loads(self.data))]
        events = [event.removeprefix("data: ") for event in self.data.decode().split("\n\n")]
        assert events.pop() == "", "a stream ends with a whole event"
        return [event if event == "[DONE]" else _without_ids(json.loads(event)) for event in events]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key not in ("id", "created")}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def by_choice(told: list[Any]) -> list[Any]:
    """Events of a stream sorted by choice: which copy comes first within a step is nobody's business."""
    return sorted(
        told, key=lambda event: event["choices"][0]["index"] if event != "[DONE]" and event["choices"] else 99
    )


def uncached(told: Any) -> Any:
    """Without `cached_tokens`."""
    return json.loads(re.sub(r'"cached_tokens": \d+', '"cached_tokens": null', json.dumps(told)))


class RecoveryPlane:
    """The application over two replicas. `first` gets all requests until its link is cut."""

    def __init__(self, replicas: list[SteppedReplica], backend: LiveBackend, app: Any) -> None:
        self.replicas = replicas
        self.backend = backend
        self.app = app
        self.cluster = ClusterUnderTest(list(replicas), [backend])
        self._num_readers = 0

    def post(self, case: Case) -> Reader:
        """Send one request. Each has a salt of its own: no prefix is found in the cache."""
        self._num_readers += 1
        return Reader(self.app, case, f"reader {self._num_readers}")

    async def add(self, case: Case) -> Reader:
        """Send one request and wait until its replica has it."""
        before = self.num_unfinished
        reader = self.post(case)
        await until(lambda: self.num_unfinished > before or reader.task.done())
        assert not reader.task.done(), reader.data
        await until(self._is_read)
        return reader

    @property
    def num_unfinished(self) -> int:
        return sum(len(r.engine.core._requests) for r in self.replicas)

    async def place_on(self, *replicas: SteppedReplica) -> None:
        """From now on new requests go nowhere else."""
        others = [r.name for r in self.replicas if r not in replicas]
        self.cluster.publish_view(*others)
        self.cluster.publish_view()  # nobody is gone: a link that was cut is opened again
        await until(lambda: self.backend.health().detail["replicas_up"] == len(self.replicas))
        self.cluster.publish_view(*others)

    def _is_read(self) -> bool:
        """All that replicas sent is at the router, and its clients have read it."""
        views = self.backend.dispatcher.views
        return not any(stream._events for stream in self.backend._streams.values()) and all(
            replica.links[-1].num_sent == views[replica.name].num_news  # type: ignore[index]
            for replica in self.replicas
            if replica.name in views and replica.links and not replica.links[-1].is_losing
        )

    async def step(self, replica: SteppedReplica) -> None:
        """One step, until everybody has read what it gave."""
        await until(lambda: replica.has_plan)
        replica.num_taken += 1
        replica.runner.gate.release()
        await until(lambda: replica.is_between_steps)
        await until(self._is_read)

    async def cut(self, replica: SteppedReplica, num_lost_steps: int = 0) -> None:
        """End the link for good; what the last `num_lost_steps` gave never arrives."""
        self.cluster.publish_view()
        link = replica.links[-1]
        for _ in range(num_lost_steps):
            link.is_losing = True
            await self.step(replica)
        link.cut()
        await until(lambda: replica.name not in self.backend.dispatcher.views or len(replica.links) > 1)
        await until(lambda: link.link not in replica.engine._links.values())

    async def finish(self, readers: Sequence[Reader]) -> None:
        """Step whoever has something to do until all answers are there and nothing is left anywhere."""
        while not all(reader.task.done() for reader in readers):
            replicas = [replica for replica in self.replicas if replica.has_plan]
            if replicas:
                await self.step(replicas[0])
            else:
                await until(lambda: any(r.has_plan for r in self.replicas) or all(r.task.done() for r in readers))
        for reader in readers:
            reader.task.result()
        for replica in self.replicas:
            while replica.has_plan or replica.engine.core.num_unfinished:
                await self.step(replica)
            await until(lambda replica=replica: replica.engine._step_started_at is None or replica.has_plan)
            replica.engine.core.validate()
        assert self.backend.load() == self.backend.dispatcher.num_held == len(self.backend._streams) == 0
        assert not len(self.backend._names)

    async def undisturbed(self, case: Case) -> tuple[list[Any], int]:
        """What a client reads when nothing happens, and how many tokens that is."""
        await self.place_on(self.replicas[0])
        reader = await self.add(case)
        (stream,) = self.backend._streams.values()
        await self.finish([reader])
        assert reader.status == 200, reader.data
        return reader.told(), len(stream._emitted[0])

    async def staggered(
        self, case: Case, num_positions: int, *, num_lost_steps: int = 0, again_after: int | None = None
    ) -> tuple[list[Reader], list[list[int]]]:
        """Equal requests, one more a step; cut when the first has `num_positions` - 1 tokens, and the
        other replica's link too, `again_after` steps later. Also the positions at the first cut, by request and choice.
        """
        first, second = self.replicas
        await self.place_on(first)
        readers = [await self.add(case), await self.add(case)]
        streams = list(self.backend._streams.values())
        while len(streams[0]._emitted[0]) < num_positions - 1:
            await self.step(first)
            readers.append(await self.add(case))
            streams.append(list(self.backend._streams.values())[-1])
        positions = [[len(tokens) for tokens in stream._emitted.values()] for stream in streams]
        await self.cut(first, num_lost_steps)
        if again_after is not None:
            await until(lambda: first.name in self.backend.dispatcher.views)
            for _ in range(again_after):
                await self.step(second)
            await self.cut(second)
        await self.finish(readers)
        return readers, positions


@asynccontextmanager
async def recovery_plane(
    make: Callable[[], ModelRunner],
    codec: TextCodec,
    *,
    vocab_size: int,
    max_model_len: int = 2048,
    num_batched_tokens: int = 4096,
    max_num_seqs: int = 512,
    dispatcher: DispatcherConfig = PATIENT,
    num_threads: int = 1,
    num_speculative_tokens: int = 0,
) -> AsyncIterator[RecoveryPlane]:
    """`make` builds the runner of a replica, on its thread."""
    config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=num_batched_tokens,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        ),
        admission=AdmissionConfig(max_queued_requests=512),
        parallel=ParallelConfig(num_threads=num_threads),
    )
    replicas = [SteppedReplica(f"replica-{i}", config, make) for i in range(2)]
    for replica in replicas:
        await replica.start()
    backend = LiveBackend(PairingDispatcher(dispatcher, least_tokens), RouterId("router-0"), "fake")
    settings = AppSettings(served_model_names=("fake",), max_model_len=max_model_len, vocab_size=vocab_size)
    plane = RecoveryPlane(replicas, backend, create_app(settings, codec, backend))
    try:
        plane.cluster.publish_view()
        await until(lambda: backend.health().detail["replicas_up"] == 2)
        yield plane
    finally:
        await backend.close()
        for replica in replicas:
            await replica.close()


def fake_runner(vocab_size: int, eos: tuple[int, ...], script: Sequence[int] = ()) -> Callable[[], ModelRunner]:
    """A maker of runners that hash, or that say `script`."""
    fields: dict[str, Any] = {
        "num_blocks": 16384,
        "max_model_len": 2048,
        "vocab_size": vocab_size,
        "eos_token_ids": eos,
        "cost": CostModel(0, 0, 0, 0),
    }
    return lambda: ScriptedRunner(script, **fields) if script else FakeModelRunner(**fields)
