"""/metrics for Prometheus, under our names or those of vLLM that dashboards know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from megatron.core.inference.request import Update
from megatron.core.inference.statistics import Statistics
from megatron.serving.progress import Progress

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP = (1, *(8 << power for power in range(11)))
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ObservedEngine(Protocol):
    """The engine's own numbers: its latest ``statistics``, and how many requests have not ended."""

    statistics: Statistics

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""


@dataclass(eq=False)
class Metrics:
    """Counts and times of requests, in a registry of its own. ``model_name``: the label of every series."""

    model_name: str
    prefix: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        # Without the times at which counters were made, a series for each that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that were read.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        labels = ("model_name", "finished_reason")
        about = "Requests that have ended."
        self._ended = Counter(self.prefix + "request_success", about, labels, registry=self.registry)
        self._refused = self._counter("requests_refused", "Requests refused as the queue was full.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "From one token to the next.", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _WHOLE)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _WHOLE
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _WHOLE)
        self._inference = self._histogram("request_inference_time_seconds", "From the first step to the end.", _WHOLE)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._texts = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._steps = self._histogram("iteration_tokens_total", "Tokens that a step of the engine computes.", _STEP)

    def watch(self, engine: ObservedEngine) -> None:
        """Add the engine's own numbers, which are read at each scrape."""
        self.registry.register(_EngineNumbers(engine, self.model_name, self.prefix))

    def stepped(self, step_tokens: Sequence[int]) -> None:
        """Count steps of the engine by their tokens."""
        for number in step_tokens:
            self._steps.observe(number)

    def updated(self, progress: Progress, update: Update, now: float) -> None:
        """Count an update of a request."""
        if progress.first_token is None and (update.tokens or update.finish is not None):
            self._prompt.inc(progress.prompt_tokens)
        if update.tokens:
            self._generated.inc(update.num_generated)
            if progress.first_token is None:
                self._first.observe(now - progress.arrived)
            else:
                for _ in update.tokens:  # tokens of one step share its time
                    self._between.observe((now - progress.last_token) / len(update.tokens))
        if update.finish is not None:
            self._ended.labels(self.model_name, update.finish.reason).inc()
            started, first = update.started or now, progress.first_token or now
            self._whole.observe(now - progress.arrived)
            self._queue.observe(started - progress.arrived)
            self._inference.observe(now - started)
            if not update.beams:  # all tokens of a search come at its end
                self._prefill.observe(first - started)
                self._decode.observe(now - first)
            self._prompts.observe(progress.prompt_tokens)
            self._texts.observe(progress.generated + update.num_generated)

    def aborted(self, count: int) -> None:
        """Count requests that ended early: the client has left, or their time was over."""
        self._ended.labels(self.model_name, "abort").inc(count)

    def refused(self) -> None:
        """Count a request that was refused because the queue was full."""
        self._refused.inc()

    def page(self) -> bytes:
        """The body of /metrics, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(self.prefix + name, about, ("model_name",), registry=self.registry).labels(self.model_name)

    def _histogram(self, name: str, about: str, edges: tuple[float, ...]) -> Histogram:
        whole = Histogram(self.prefix + name, about, ("model_name",), buckets=edges, registry=self.registry)
        return whole.labels(self.model_name)


@dataclass(frozen=True)
class _EngineNumbers(Collector):
    """Gauges and counters of the engine, read at each scrape."""

    engine: ObservedEngine
    model_name: str
    prefix: str

    @override
    def collect(self) -> Iterator[Metric]:
        """Collect the current numbers."""
        numbers = self.engine.statistics
        waiting = self.engine.unfinished - numbers.running  # also those that the engine hasn't got yet
        for name, about, value in (
            ("num_requests_running", "Requests that run.", numbers.running),
            ("num_requests_waiting", "Requests that wait.", max(0, waiting)),
            ("kv_cache_usage_perc", "Share of the cache that texts hold, from 0 to 1.", numbers.cache_usage),
        ):
            yield self._with_value(GaugeMetricFamily(self.prefix + name, about, labels=["model_name"]), value)
        for name, about, value in (
            ("prefix_cache_queries", "Tokens of prompts looked up in the cache.", numbers.prefix_queries),
            ("prefix_cache_hits", "Tokens of prompts found in the cache.", numbers.prefix_hits),
            ("num_preemptions", "Requests that lost their blocks for a while.", numbers.preemptions),
            ("spec_decode_num_draft_tokens", "Tokens that were guessed.", numbers.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", numbers.accepted_tokens),
        ):
            yield self._with_value(CounterMetricFamily(self.prefix + name, about, labels=["model_name"]), value)

    def _with_value(self, metric: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        metric.add_metric([self.model_name], value)
        return metric
