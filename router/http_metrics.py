"""ASYNC. Metrics seen from the HTTP edge, in vLLM's names, labelled with `model_name`. What each means:
`docs/metrics.md`; every latency is computed by `router/latency.py`.

The per-token path may not cost: a histogram here is a list of counts and one bisection (0.2 us, against 0.8 us and a
lock for prometheus_client's), which is right because only the event loop writes. A registry of its own, so that
nothing of the process leaks in and tests do not collide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.messages import Stages
from router.latency import SequenceTimes, Timeline, latencies
from router.tenant_desk import TenantDesk
from router.tenant_limits import Visit
from router.tenant_metrics import tenant_families

_TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_N = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival at the HTTP edge to the first token of the request.", _TTFT_S),
    "inter_token_latency_seconds": ("Each gap between consecutive output tokens of a sequence.", _ITL_S),
    "request_time_per_output_token_seconds": ("(Last token - first token) / (output tokens - 1), per request.", _ITL_S),
    "e2e_request_latency_seconds": ("Arrival at the HTTP edge to the last token of the request.", _E2E_S),
    "request_queue_time_seconds": ("Submitted to first scheduled, per sequence, on its last replica.", _E2E_S),
    "request_prefill_time_seconds": ("First scheduled to first token, per sequence, on its last replica.", _E2E_S),
    "request_decode_time_seconds": ("First token to last token, per sequence, on its last replica.", _E2E_S),
    "request_inference_time_seconds": ("First scheduled to last token, per sequence, on its last replica.", _E2E_S),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens not found in the prefix cache, per sequence.", _TOKENS),
    "request_generation_tokens": ("Output tokens per request.", _TOKENS),
    "request_max_num_generation_tokens": ("Output tokens of the longest sequence of a request.", _TOKENS),
    "request_params_max_tokens": ("Output limit per request, after clipping.", _TOKENS),
    "request_params_n": ("Samples asked for per request.", _N),
    "request_num_preemptions": ("Times a sequence was preempted on its last replica.", _PREEMPTIONS),
}
#: fields of `SequenceTimes` by metric
_SEQUENCE_METRICS: tuple[tuple[str, Callable[[SequenceTimes], float | None]], ...] = (
    ("request_queue_time_seconds", lambda times: times.queue_s),
    ("request_prefill_time_seconds", lambda times: times.prefill_s),
    ("request_decode_time_seconds", lambda times: times.decode_s),
    ("request_inference_time_seconds", lambda times: times.inference_s),
    ("request_num_preemptions", lambda times: times.num_preemptions),
)
_TOKEN_COUNTERS = {
    "prompt_tokens": "Prompt tokens of the requests that a replica accepted.",
    "generation_tokens": "Output tokens that reached the HTTP edge.",
}


class Histogram:
    """Counts by bucket; `le` bounds are inclusive, as Prometheus wants them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_zeros(self, times: int) -> None:
        self.counts[bisect_left(self.bounds, 0)] += times

    def cumulated(self) -> list[tuple[str, float]]:
        result, so_far = [], 0
        for bound, count in zip([*map(float, self.bounds), None], self.counts, strict=True):
            so_far += count
            result.append(("+Inf" if bound is None else repr(bound), float(so_far)))
        return result


class LabelledCounter:
    """Counts by the values of some labels."""

    __slots__ = ("_counts", "_labels", "_name", "_text")

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *values: str) -> None:
        self._counts[values] = self._counts.get(values, 0) + 1

    def family(self, router: str) -> Metric:
        """What is exported, with the router's name in front."""
        family = CounterMetricFamily(self._name, self._text, labels=["router", *self._labels])
        for values, count in self._counts.items():
            family.add_metric([router, *values], count)
        return family


class ModelMetrics:
    """Histograms and token counters of one model name."""

    __slots__ = ("generation_tokens", "histograms", "prompt_tokens")

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.prompt_tokens = 0
        self.generation_tokens = 0


class HttpMetrics(Collector):
    """All metrics of one HTTP application. Every series carries the router's name: behind a proxy each scrape may reach
    another router, and without the label its counters would seem to jump back.
    """

    def __init__(self, prefix: str, router: str = "") -> None:
        self._prefix = prefix
        self._router = router
        self._models: dict[str, ModelMetrics] = {}
        self._read_body_bytes: Callable[[], float] = float
        self._tenants: TenantDesk | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # not prometheus_client's Counter, which adds a `_created` series to each of its own
        self._success = LabelledCounter(
            f"{prefix}request_success", "Ended requests by reason.", "model_name", "finished_reason"
        )
        self._rejections = LabelledCounter(f"{prefix}admission_rejections", "Refused requests by reason.", "reason")
        self._http = LabelledCounter("http_requests", "Answered HTTP requests.", "handler", "method", "status")

    def watch_body_bytes(self, read: Callable[[], float]) -> None:
        """Where the gauge of pending body bytes is read at each scrape."""
        self._read_body_bytes = read

    def watch_tenants(self, tenants: TenantDesk) -> None:
        """Whose figures are read at each scrape."""
        self._tenants = tenants

    def start(self, model: str, arrival_s: float, visit: Visit | None = None) -> RequestRecord:
        """Begin the record of one request. `visit`: its tenant's account, which is told what it used."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics()
        return RequestRecord(self, metrics, model, arrival_s, visit)

    def ended(self, model: str, reason: str) -> None:
        self._success.add(model, reason)

    def refused(self, reason: str) -> None:
        self._rejections.add(reason)

    def answered(self, handler: str, method: str, status: int) -> None:
        self._http.add(handler, method, str(status))

    def collect(self) -> Iterator[Metric]:
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(self._prefix + name, text, labels=["router", "model_name"])
            for model, metrics in self._models.items():
                histogram.add_metric(
                    [self._router, model], metrics.histograms[name].cumulated(), metrics.histograms[name].total
                )
            yield histogram
        for name, text in _TOKEN_COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=["router", "model_name"])
            for model, metrics in self._models.items():
                counter.add_metric([self._router, model], getattr(metrics, name))
            yield counter
        for labelled in (self._success, self._rejections, self._http):
            yield labelled.family(self._router)
        gauge = GaugeMetricFamily(
            "shoal_pending_body_bytes",
            "Long request bodies that are being read, wait for a thread or are in one.",
            labels=["router"],
        )
        gauge.add_metric([self._router], self._read_body_bytes())
        yield gauge
        if self._tenants is not None:
            yield from tenant_families(self._tenants, self._router)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class RequestRecord:
    """Counts of one request, and its instants on their way into the histograms. `end` takes effect once: a request ends
    exactly once.
    """

    __slots__ = ("_ended", "_histograms", "_itl", "_metrics", "_model", "_model_metrics", "_note", "_visit", "timeline")

    def __init__(
        self,
        metrics: HttpMetrics,
        model_metrics: ModelMetrics,
        model: str,
        arrival_s: float,
        visit: Visit | None = None,
    ) -> None:
        self._metrics = metrics
        self._model_metrics = model_metrics
        self._histograms = model_metrics.histograms
        self._itl = model_metrics.histograms["inter_token_latency_seconds"]
        self._model = model
        self._visit = visit
        self.timeline = Timeline(arrival_s)
        self._note = self.timeline.note
        self._ended = False

    def accepted(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """A replica took the request."""
        self._model_metrics.prompt_tokens += num_prompt_tokens
        if self._visit is not None:
            self._visit.accepted(num_prompt_tokens)
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self._histograms["request_params_max_tokens"].observe(max_tokens)
        self._histograms["request_params_n"].observe(n)

    def tokens(self, index: int, num_tokens: int, now_s: float) -> None:
        """`num_tokens` output tokens of one sequence arrived together."""
        if num_tokens == 0:
            return
        gap_s = self._note(index, num_tokens, now_s)
        self._model_metrics.generation_tokens += num_tokens
        if self._visit is not None:
            self._visit.generated(num_tokens, now_s)
        if gap_s is not None:
            self._itl.observe(gap_s)
        elif (timeline := self.timeline).num_tokens == num_tokens:
            self._histograms["time_to_first_token_seconds"].observe(latencies(timeline).ttft_s or 0.0)
        if num_tokens > 1:
            self._itl.observe_zeros(num_tokens - 1)

    def stages(self, index: int, stages: Stages) -> None:
        """What the replica told of where the time of one sequence went."""
        self.timeline.note_stages(index, stages)

    def complete(self, num_output_tokens: Sequence[int], num_computed_tokens: Sequence[int]) -> None:
        """The answer is whole: by sequence, its output tokens, and the prompt tokens that were not in the prefix cache.
        Call before `end`.
        """
        self._histograms["request_max_num_generation_tokens"].observe(max(num_output_tokens))
        for num_tokens in num_computed_tokens:
            self._histograms["request_prefill_kv_computed_tokens"].observe(num_tokens)

    def end(self, reason: str) -> None:
        """`reason`: stop, length, abort (the client left) or error. Latencies are recorded of complete ones only."""
        if self._ended:
            return
        self._ended = True
        self._metrics.ended(self._model, reason)
        self._histograms["request_generation_tokens"].observe(self.timeline.num_tokens)
        if reason not in ("stop", "length"):
            return
        figures = latencies(self.timeline)
        self._observe("e2e_request_latency_seconds", figures.e2e_s)
        self._observe("request_time_per_output_token_seconds", figures.tpot_s)
        for times in figures.sequences:
            for name, read in _SEQUENCE_METRICS:
                self._observe(name, read(times))

    def refuse(self, reason: str) -> None:
        """Refused before its first byte: counted as a rejection, not as an ended request."""
        if not self._ended:
            self._ended = True
            self._metrics.refused(reason)
            if self._visit is not None:
                self._visit.refused(reason)

    def _observe(self, name: str, value: float | None) -> None:
        """An undefined figure is not observed."""
        if value is not None:
            self._histograms[name].observe(value)
