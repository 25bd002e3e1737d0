"""The data plane behind real HTTP, without Ray: engines, their gRPC services, a router and uvicorn on one event loop,
on a thread of its own. Tests are clients like any other; what they look at inside they read on that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from replica.config import AdmissionConfig, CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from replica.engine import Engine
from replica.fake_runner import CostModel, FakeModelRunner
from replica.messages import Role, RouterId
from replica.runner_thread import PacedRunner, RunnerThread
from router.app import create_app
from router.app_settings import AppSettings
from router.disaggregation import HandOverConfig
from router.dispatcher import DispatcherConfig
from router.live_backend import LiveBackend
from router.pairing import PairingDispatcher
from router.placement import least_tokens
from router.prepare import TextCodec
from router.tenant_desk import TenantDesk
from router.tokenizer import Tokenizer
from tests.api.fake_text import EOS, fake_tokenizer, fake_vocab_size
from tests.cluster.harness import ClusterUnderTest, GatedRunner, ReplicaUnderTest, num_up, until

T = TypeVar("T")
FAKE_MODEL = "fake"
REAL_MODEL = "smollm2-135m-instruct"
#: what `shoal serve` sets at Serve's proxy; test_a33 holds both to it
KEEP_ALIVE_S = 90
CONTEXT = 8192


class ApiUnderTest:
    """One running server. `replicas` and `backend` belong to its loop: look at them with `peek` or `until`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cluster: ClusterUnderTest, server: uvicorn.Server) -> None:
        self._loop = loop
        self.cluster = cluster
        self.server = server
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        #: one client for ordinary calls; making one costs 20 ms
        self.http = self.client()
        #: what the loop's exception handler heard: exceptions nobody retrieved, callbacks that raised
        self.complaints: list[str] = []
        loop.set_exception_handler(lambda _, context: self.complaints.append(str(context)))

    @property
    def replicas(self) -> list[ReplicaUnderTest]:
        return self.cluster.replicas

    @property
    def backend(self) -> LiveBackend:
        return self.cluster.routers[0]

    @property
    def tenants(self) -> TenantDesk:
        desk: TenantDesk = self.server.config.app.state.edge.tenants  # type: ignore[union-attr]
        return desk

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **kwargs)

    def async_client(self, **kwargs: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, **kwargs)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """Run a coroutine on the server's loop and wait for it."""
        return self.start(work).result(timeout_s)

    def peek(self, look: Callable[[], T]) -> T:
        """Call `look` on the server's loop: between two events, so that what it sees is consistent."""

        async def call() -> T:
            return look()

        return self.run(call())

    def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Wait until `condition` holds on the server's loop."""
        self.run(until(condition, timeout_s), timeout_s + 5)

    # ---- states that many tests wait for ----

    def is_idle(self) -> bool:
        """Nothing of any request is left, in the router or in a replica."""
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        """What keeps the server from being idle, in words."""
        found = []
        if self.backend.load() or self.backend.dispatcher.num_held or self.backend._streams:
            found.append(f"router: load {self.backend.load()}, {len(self.backend._streams)} streams")
        if running := {name: f.num_running for name, f in self.tenants.figures().items() if f.num_running}:
            found.append(f"router: requests of tenants that never ended: {running}")
        if self.backend.journal.num_living:
            found.append(f"router: {self.backend.journal.num_living} requests that never ended, for `shoal why`")
        for replica in self.replicas:
            core = replica.engine.core
            if core.num_unfinished or core._requests:
                found.append(f"{replica.name}: {core.num_unfinished} sequences, {len(core._requests)} requests")
            if core.blocks.num_free != core.blocks.num_blocks:
                found.append(f"{replica.name}: {core.blocks.num_blocks - core.blocks.num_free} blocks in use")
            known = num_known(replica)
            if known and replica.engine._failure is None:  # a runner that is given up is not told any more
                found.append(f"{replica.name}: its runner holds {known} sequences")
        if self.server.server_state.tasks:
            found.append(f"{len(self.server.server_state.tasks)} HTTP requests")
        return found

    def check_idle(self) -> None:
        """Everything is back where it was before the first request, and nothing complained."""
        with contextlib.suppress(TimeoutError):
            self.until(self.is_idle)
        assert self.peek(self.leftovers) == []
        for replica in self.replicas:
            self.peek(replica.engine.core.validate)
        self.peek(self.cluster.check_books)
        assert self.peek(lambda: self.complaints) == []

    def counter(self, name: str) -> float:
        """The sum of one of the replicas' counters (`ReplicaLoad.counters`)."""
        return self.peek(lambda: sum(r.engine.core.load(0.0).counters.get(name, 0) for r in self.replicas))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of /metrics with this name and these labels."""
        lines = self.http.get("/metrics").text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        samples = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in wanted))


def num_known(replica: ReplicaUnderTest) -> int:
    """Sequences that a fake runner holds; 0 for the real one."""
    runner: Any = getattr(replica, "runner", None)
    while runner is not None and not hasattr(runner, "num_known"):
        runner = getattr(runner, "_runner", None)  # gated, paced
    return runner.num_known if runner is not None else 0


@contextmanager
def running(plane: Callable[[], Any]) -> Iterator[ApiUnderTest]:
    """Start what `plane` makes on a thread with a fresh loop; stop it, and check that nothing of it is left."""
    ready: list[ApiUnderTest] = []
    failure: list[BaseException] = []
    started = threading.Event()
    stop: list[Callable[[], object]] = []

    async def life() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with plane() as (cluster, server):
            ready.append(ApiUnderTest(loop, cluster, server))
            started.set()
            await ended.wait()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == [], f"tasks that outlive the server: {left}"

    def work() -> None:
        try:
            asyncio.run(life())
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="api-under-test")
    thread.start()
    try:
        assert started.wait(120), "the server did not start"
        if ready:
            yield ready[0]
            gc.collect()  # exceptions that nobody retrieved are told when their task is collected
            ready[0].check_idle()
            assert ready[0].metric("shoal_pending_body_bytes") == 0
    finally:
        if ready:
            ready[0].http.close()
        stop[0]()
        thread.join(30)
    assert not thread.is_alive(), "the server did not stop"
    if failure:
        raise failure[0]


@asynccontextmanager
async def plane(
    replicas: list[ReplicaUnderTest],
    settings: AppSettings,
    codec: TextCodec,
    dispatcher: DispatcherConfig,
    http: str,
    tenants: TenantDesk | None = None,
    hand_over: HandOverConfig = HandOverConfig(),
) -> AsyncIterator[tuple[ClusterUnderTest, uvicorn.Server]]:
    """Replicas, router and HTTP server, connected; taken down in the order of a real stop."""
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            stack.push_async_callback(replica.close)
            await replica.start()
        router_id = RouterId("router-0")
        backend = LiveBackend(
            PairingDispatcher(dispatcher, least_tokens, hand_over), router_id, settings.served_model_names[0]
        )
        stack.push_async_callback(backend.close)
        cluster = ClusterUnderTest(replicas, [backend])
        cluster.publish_view()
        await until(lambda: num_up(backend) == len(replicas))
        server = await stack.enter_async_context(
            _http_server(create_app(settings, codec, backend, tenants=tenants), http)
        )
        yield cluster, server


@asynccontextmanager
async def _http_server(app: Any, http: str) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        app,
        http=http,  # type: ignore[arg-type]
        ws="none",
        loop="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    # asyncio turns Nagle's algorithm off only where the protocol is named: without it an answer waits 40 ms for an ACK
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done())
        yield server
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextmanager
def fake_api(
    *,
    num_replicas: int = 1,
    is_open: bool = True,
    step_s: float = 0.0,
    cap: int = 64,
    max_num_seqs: int = 64,
    num_blocks: int = 2048,
    max_model_len: int = CONTEXT,
    dispatcher: DispatcherConfig = DispatcherConfig(),
    http: str = "auto",
    scheduler: dict[str, Any] | None = None,
    tenants: TenantDesk | None = None,
    roles: Sequence[Role] = (),
    hand_over: HandOverConfig = HandOverConfig(),
    **settings: Any,
) -> Iterator[ApiUnderTest]:
    """A server over fake runners. `step_s` is what a step takes; `is_open` False: steps wait for the runner's gate.
    `roles`: of each replica, instead of `num_replicas`.
    """
    engine_config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len, runner="fake"),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=max_num_seqs, **(scheduler or {})),
        admission=AdmissionConfig(max_queued_requests=cap),
    )

    def make(name: str, role: Role) -> ReplicaUnderTest:
        replica = ReplicaUnderTest(name, engine_config, 2, is_open, role)
        fake = FakeModelRunner(
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=max_model_len,
            vocab_size=fake_vocab_size(),
            eos_token_ids=EOS,
            cost=CostModel(step_s, 0, 0, 0),
        )
        # the engine asks for its runner only when it starts
        replica.runner = GatedRunner(PacedRunner(fake) if step_s else fake)  # type: ignore[arg-type]
        if is_open:
            replica.runner.open()
        return replica

    app_settings = AppSettings(
        served_model_names=(FAKE_MODEL, "alias"), max_model_len=max_model_len, vocab_size=fake_vocab_size(), **settings
    )
    replicas = [make(f"replica-{i}", role) for i, role in enumerate(roles or [Role.BOTH] * num_replicas)]
    with running(lambda: plane(replicas, app_settings, fake_tokenizer(), dispatcher, http, tenants, hand_over)) as api:
        yield api


class RealReplica(ReplicaUnderTest):
    """One engine with the real model and its service."""

    def __init__(self, name: str, config: EngineConfig, folder: Path) -> None:
        from replica.model_runner import TorchModelRunner

        self.name = name
        self.engine = Engine(
            config, RunnerThread(lambda: TorchModelRunner(config, folder, self_test=False)), incarnation=name
        )

    async def close(self) -> None:
        await self.service.stop(0)
        await self.engine.close()


@contextmanager
def real_api(
    folder: Path, *, num_replicas: int = 1, budget: int = 256, num_blocks: int = 1024, **settings: Any
) -> Iterator[ApiUnderTest]:
    """A server over the default model in float32, blocks of 16, prefix caching on. `budget`: tokens of a step."""
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget),
        parallel=ParallelConfig(num_threads=2),
    )
    tokenizer = Tokenizer.from_folder(folder)
    facts = tokenizer.facts
    app_settings = AppSettings(
        served_model_names=(REAL_MODEL,),
        max_model_len=facts.max_model_len or CONTEXT,
        vocab_size=facts.vocab_size or tokenizer.num_tokens,
        **settings,
    )
    replicas: list[ReplicaUnderTest] = [RealReplica(f"replica-{i}", config, folder) for i in range(num_replicas)]
    with running(lambda: plane(replicas, app_settings, tokenizer, DispatcherConfig(), "auto")) as api:
        yield api
