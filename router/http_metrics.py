"""ASYNC. Metrics seen from the HTTP edge, in vLLM's names, labelled with `model_name`.

The per-token path may not cost: a histogram here is a list of counts and one bisection (0.2 us, against 0.8 us and a
lock for prometheus_client's), which is right because only the event loop writes. A registry of its own, so that
nothing of the process leaks in and tests do not collide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

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

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival at the HTTP edge to the first token of the request.", _TTFT_S),
    "inter_token_latency_seconds": ("Each gap between consecutive output tokens of a sequence.", _ITL_S),
    "request_time_per_output_token_seconds": ("(end to end - TTFT) / (output tokens - 1), per request.", _ITL_S),
    "e2e_request_latency_seconds": ("Arrival at the HTTP edge to the last token of the request.", _E2E_S),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Output tokens per request.", _TOKENS),
    "request_params_max_tokens": ("Output limit per request, after clipping.", _TOKENS),
    "request_params_n": ("Samples asked for per request.", _N),
}
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

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulated(self) -> list[tuple[str, float]]:
        result, so_far = [], 0
        for bound, count in zip([*map(float, self.bounds), None], self.counts, strict=True):
            so_far += count
            result.append(("+Inf" if bound is None else repr(bound), float(so_far)))
        return result


class ModelMetrics:
    """Histograms and token counters of one model name."""

    __slots__ = ("counters", "histograms")

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.counters = dict.fromkeys(_TOKEN_COUNTERS, 0)


class HttpMetrics(Collector):
    """All metrics of one HTTP application. Every series carries the router's name: behind a proxy each scrape may reach
    another router, and without the label its counters would seem to jump back.
    """

    def __init__(self, prefix: str, router: str = "") -> None:
        self._prefix = prefix
        self._router = router
        self._models: dict[str, ModelMetrics] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        labels = ["router", "model_name"]
        # `_created` series are twice the output for nothing anybody reads here: they come only with OpenMetrics.
        self._success = Counter(
            f"{prefix}request_success",
            "Ended requests by reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._rejections = Counter(
            f"{prefix}admission_rejections",
            "Refused requests by reason.",
            ["router", "reason"],
            registry=self._registry,
        )
        self._http = Counter(
            "http_requests",
            "Answered HTTP requests.",
            ["router", "handler", "method", "status"],
            registry=self._registry,
        )

    def start(self, model: str, arrival_s: float) -> RequestRecord:
        """Begin the record of one request."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics()
        return RequestRecord(self, metrics, model, arrival_s)

    def ended(self, model: str, reason: str) -> None:
        self._success.labels(self._router, model, reason).inc()

    def refused(self, reason: str) -> None:
        self._rejections.labels(self._router, reason).inc()

    def answered(self, handler: str, method: str, status: int) -> None:
        self._http.labels(self._router, handler, method, str(status)).inc()

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
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
                counter.add_metric([self._router, model], metrics.counters[name])
            yield counter

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class RequestRecord:
    """Instants and counts of one request. `end` takes effect once: a request ends exactly once."""

    __slots__ = (
        "_arrival_s",
        "_counters",
        "_ended",
        "_first_s",
        "_histograms",
        "_itl",
        "_last_s",
        "_metrics",
        "_model",
        "_num_tokens",
        "_token_s",
    )

    def __init__(self, metrics: HttpMetrics, model_metrics: ModelMetrics, model: str, arrival_s: float) -> None:
        self._metrics = metrics
        self._histograms = model_metrics.histograms
        self._itl = model_metrics.histograms["inter_token_latency_seconds"]
        self._counters = model_metrics.counters
        self._model = model
        self._arrival_s = arrival_s
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._token_s: dict[int, float] = {}
        self._num_tokens = 0
        self._ended = False

    def accepted(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """A replica took the request."""
        self._counters["prompt_tokens"] += num_prompt_tokens
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self._histograms["request_params_max_tokens"].observe(max_tokens)
        self._histograms["request_params_n"].observe(n)

    def tokens(self, index: int, num_tokens: int, now_s: float) -> None:
        """`num_tokens` output tokens of one sequence arrived together."""
        if num_tokens == 0:
            return
        last_s = self._token_s.get(index)
        if last_s is not None:
            self._itl.observe(now_s - last_s)
        elif self._first_s is None:
            self._first_s = now_s
            self._histograms["time_to_first_token_seconds"].observe(now_s - self._arrival_s)
        if num_tokens > 1:
            self._itl.observe(0.0, num_tokens - 1)
        self._token_s[index] = self._last_s = now_s
        self._num_tokens += num_tokens
        self._counters["generation_tokens"] += num_tokens

    def end(self, reason: str) -> None:
        """`reason`: stop, length, abort (the client left) or error. Latencies are recorded of complete ones only."""
        if self._ended:
            return
        self._ended = True
        self._metrics.ended(self._model, reason)
        self._histograms["request_generation_tokens"].observe(self._num_tokens)
        if reason in ("stop", "length"):
            self._histograms["e2e_request_latency_seconds"].observe(self._last_s - self._arrival_s)
            # with several sequences the tokens of one are not those of the request: undefined, so not observed
            if self._first_s is not None and self._num_tokens > 1 and len(self._token_s) == 1:
                per_token_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
                self._histograms["request_time_per_output_token_seconds"].observe(per_token_s)

    def refuse(self, reason: str) -> None:
        """Refused before a replica took it: counted as a rejection, not as an ended request."""
        if not self._ended:
            self._ended = True
            self._metrics.refused(reason)
