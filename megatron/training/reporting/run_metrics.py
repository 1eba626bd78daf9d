"""Metrics of a training run for Prometheus, served over HTTP (``--metrics-port``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from megatron.errors import ConfigError
from megatron.training.reporting.events import Event, Observer
from megatron.training.reporting.goodput import Goodput

if TYPE_CHECKING:
    from prometheus_client import Gauge

_GAUGES = {
    "iteration": "Last iteration that a log line reported",
    "train_iterations": "Iterations of the whole run",
    "consumed_samples": "Samples that were trained on",
    "learning_rate": "Learning rate of the next step",
    "grad_norm": "Norm of the gradients of the last step, before clipping",
    "loss_scale": "Factor of the loss in fp16",
    "seconds_per_iteration": "Mean time of a step since the log line before, in seconds",
    "tokens_per_second": "Tokens a second on all ranks",
    "tflops_per_device": "Model TFLOP/s of each device",
    "mfu": "Model FLOPs utilization, from 0 to 1; 0 where the device's peak isn't known",
    "world_size": "Ranks of the run",
    "goodput": "Share of the time since the first launch that went into steps whose result is kept, from 0 to 1",
}
_COUNTS = {
    "skipped_iterations": "Iterations whose update an overflow left out, in this launch",
    "nan_iterations": "Iterations whose loss was not finite, in this launch",
    "checkpoints": "Checkpoints that this launch has saved",
    "failed_saves": "Attempts to save a checkpoint that failed and are tried again, in this launch",
    "warnings": "Warnings of this launch",
}


class RunMetrics(Observer):
    """Keeps the newest numbers of a run, and serves them on ``host`` and ``port`` for Prometheus to read.

    ``before``: the account of earlier launches. Raises ConfigError without the prometheus_client package, or for an
    address that can't be listened on.
    """

    def __init__(self, host: str, port: int, *, before: Goodput, clock: Callable[[], float] = time.time) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server
        except ModuleNotFoundError:
            raise ConfigError(
                f"--metrics-port {port} needs the prometheus_client package, which is not installed; "
                "pip install prometheus_client, or leave the flag out"
            ) from None
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        self._goodput, self._clock = before, clock
        self._saved_at = clock()

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"megatron_{name}", about, labels, registry=registry)

        self._gauges = {name: gauge(name, about) for name, about in _GAUGES.items()}
        self._counts = {name: Counter(f"megatron_{name}", text, registry=registry) for name, text in _COUNTS.items()}
        self._loss = gauge("loss", "Mean of each loss since the log line before", "name")
        self._validation = gauge("validation_loss", "Each loss of the last evaluation", "name", "data_set")
        self._number = gauge("number", "Other numbers of the run, by name, such as scores of tasks", "name")
        self._memory = gauge("memory_bytes", "Memory of each rank", "rank", "kind")
        self._lost = gauge("lost_seconds", "Time since the first launch that kept no step, by what it went into", "why")
        age = gauge("checkpoint_age_seconds", "Time since the last checkpoint was saved; since the start before one")
        age.set_function(lambda: clock() - self._saved_at)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "that is no name of a machine"
            raise ConfigError(
                f"--metrics-host {host} --metrics-port {port} can't be listened on: {reason}; "
                "name an address of this node and a free port"
            ) from None

    @override
    def see(self, event: Event) -> None:
        fields = event.fields
        self._goodput.see(event)
        self._gauges["goodput"].set(self._goodput.share)
        for why, seconds in self._goodput.lost().items():
            self._lost.labels(why).set(seconds)
        for name in self._gauges.keys() & fields.keys():
            if fields[name] is not None:
                self._gauges[name].set(float(fields[name]))
        if event.name == "steps":
            self._steps(fields)
        elif event.name == "validation":
            for name, loss in fields["losses"].items():
                self._validation.labels(name, fields["data_set"]).set(float(loss))
        elif event.name == "numbers":
            for name, value in fields["values"].items():
                self._number.labels(name).set(float(value))
        elif event.name == "saved":
            self._counts["checkpoints"].inc()
            self._saved_at = self._clock()
        elif event.name == "save-failed":
            self._counts["failed_saves"].inc()
        elif event.name == "warning":
            self._counts["warnings"].inc()

    def _steps(self, fields: Mapping[str, Any]) -> None:
        for name in ("skipped_iterations", "nan_iterations"):
            self._counts[name].inc(int(fields[name]))
        for name, loss in fields["losses"].items():
            self._loss.labels(name).set(float(loss))
        for rank, uses in enumerate(fields["memory"]):
            for kind, size in uses.items():
                self._memory.labels(str(rank), kind).set(size)

    @override
    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
