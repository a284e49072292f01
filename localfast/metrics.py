"""What Prometheus sees. Labels come from our own tables and installed models, never from a client's string; no prompt, no answer.

Server process only; numbers of an engine process are read from its latest stats when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from localfast import __version__
from localfast.core import Event, Failed, Finished, TextDelta
from localfast.engine.messages import EngineStats

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
DURATION_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per metric that nobody reads

EngineStatsSource = Callable[[], Iterable[tuple[str, EngineStats]]]


class Metrics:
    """One registry per server, so that tests and several servers in one process do not share counts."""

    def __init__(self, engines: EngineStatsSource) -> None:
        self.registry = CollectorRegistry()
        self._engines = engines
        registry = self.registry
        self.requests = Counter("localfast_requests", "Requests that ended", ("route", "model", "status"), registry=registry)
        self.failures = Counter("localfast_failures", "Requests that failed", ("route", "model", "code"), registry=registry)
        self.prompt_tokens = Counter("localfast_prompt_tokens", "Prompt tokens", ("model",), registry=registry)
        self.cached_tokens = Counter(
            "localfast_prompt_tokens_cached", "Prompt tokens not computed again", ("model",), registry=registry
        )
        self.completion_tokens = Counter("localfast_completion_tokens", "Generated tokens", ("model",), registry=registry)
        self.ttft = Histogram(
            "localfast_time_to_first_token_seconds",
            "From request to first text",
            ("model",),
            registry=registry,
            buckets=TTFT_BUCKETS_S,
        )
        self.per_token = Histogram(
            "localfast_time_per_output_token_seconds", "Mean per request", ("model",), registry=registry, buckets=TOKEN_BUCKETS_S
        )
        self.duration = Histogram(
            "localfast_request_duration_seconds",
            "Whole request",
            ("route", "model"),
            registry=registry,
            buckets=DURATION_BUCKETS_S,
        )
        self.queue_wait = Histogram(
            "localfast_queue_wait_seconds", "Waiting for a slot", ("model",), registry=registry, buckets=TTFT_BUCKETS_S
        )
        registry.register(_EngineCollector(engines))

    def observe(self, route: str) -> RequestObserver:
        return RequestObserver(self, route)

    def page(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class RequestObserver:
    """Follows one request from arrival to its last word."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._metrics = metrics
        self._route = route
        self._started_s = time.monotonic()
        self._first_text_s: float | None = None
        self._closed = False
        self.model = "unknown"

    def feed(self, event: Event) -> None:
        match event:
            case TextDelta():
                if self._first_text_s is None:
                    self._first_text_s = time.monotonic()
                    self._metrics.ttft.labels(self.model).observe(self._first_text_s - self._started_s)
            case Finished(usage, timings):
                self._metrics.prompt_tokens.labels(self.model).inc(usage.prompt_tokens)
                self._metrics.cached_tokens.labels(self.model).inc(usage.cached_tokens)
                self._metrics.completion_tokens.labels(self.model).inc(usage.completion_tokens)
                self._metrics.queue_wait.labels(self.model).observe(timings.queue_s)
                if usage.completion_tokens > 1:
                    self._metrics.per_token.labels(self.model).observe(timings.decode_s / (usage.completion_tokens - 1))
                self.close("ok")
            case Failed(error):
                self.close(error.code)

    def close(self, code: str) -> None:
        """The request is over: "ok", or the code of what ended it. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        status = code if code in ("ok", "cancelled") else "failed"
        self._metrics.requests.labels(self._route, self.model, status).inc()
        self._metrics.duration.labels(self._route, self.model).observe(time.monotonic() - self._started_s)
        if status == "failed":
            self._metrics.failures.labels(self._route, self.model, code).inc()


class _EngineCollector:
    """Present state and totals of the loaded engines."""

    _GAUGES = (
        ("running_sequences", "Sequences in a slot", "running"),
        ("waiting_sequences", "Sequences waiting for a slot", "waiting"),
        ("kv_cache_used_cells", "KV cache cells in use", "used_cells"),
    )
    _COUNTERS = (
        ("decode_calls", "Batches computed", "decode_calls"),
        ("batched_tokens", "Tokens computed in batches", "batched_tokens"),
        ("generated_tokens", "Tokens sampled", "generated_tokens"),
        ("drafted_tokens", "Tokens guessed ahead by speculation", "drafted_tokens"),
        ("accepted_tokens", "Guessed tokens that the model chose itself", "accepted_tokens"),
        ("parked", "Sequences that gave their cells to others and went on later", "parked"),
        ("restored", "States brought back from RAM or disk instead of being computed again", "restored"),
        ("decode_seconds", "Time inside llama_decode", "decode_s"),
        ("step_seconds", "Time of all steps that computed something", "step_s"),
    )

    def __init__(self, engines: EngineStatsSource) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        engines = list(self._engines())
        build = GaugeMetricFamily("localfast_build_info", "Version of this server", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        for name, help_text, field in self._GAUGES:
            gauge = GaugeMetricFamily(f"localfast_{name}", help_text, labels=("model",))
            for model, stats in engines:
                gauge.add_metric((model,), getattr(stats, field))
            yield gauge
        for name, help_text, field in self._COUNTERS:
            counter = CounterMetricFamily(f"localfast_{name}", help_text, labels=("model",))
            for model, stats in engines:
                counter.add_metric((model,), getattr(stats, field))
            yield counter
