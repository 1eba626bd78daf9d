"""Traces of a run for OpenTelemetry: a span for each iteration with its parts, each evaluation and each save."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from typing_extensions import override

from megatron.errors import ConfigError
from megatron.training.reporting.timers import During
from megatron.version import __version__

if TYPE_CHECKING:
    from megatron.training.reporting.metrics import StepRecord

logger = logging.getLogger(__name__)

FIRST_PART = "batch-generator"
"""The part with which an iteration begins."""
_SECONDS = 3  # in which the collector has to answer


class Tracer:
    """Sends spans to the collector at ``endpoint`` from a thread of its own; what it can't send is dropped.

    The whole launch is one trace. Raises ConfigError without the packages, or for an address that is no URL.
    """

    def __init__(self, endpoint: str, *, rank: int, world_size: int) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise ConfigError(
                f"--otlp-endpoint {endpoint} needs OpenTelemetry, which is not installed; "
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or leave the flag out"
            ) from None
        if not _is_url(endpoint):
            raise ConfigError(
                f"--otlp-endpoint {endpoint} is no URL of a collector: one looks like http://127.0.0.1:4318"
            )
        target = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "megatron"),
                "service.version": __version__,
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
                "megatron.rank": rank,
                "megatron.world_size": world_size,
            }
        )
        try:
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target, timeout=_SECONDS)))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"--otlp-endpoint {endpoint}: OpenTelemetry refuses the environment ({error}): correct its OTEL_ "
                "variables, or unset them"
            ) from None
        self._tracer = self._provider.get_tracer("megatron", __version__)
        theirs = logging.getLogger("opentelemetry")
        theirs.propagate, theirs.handlers = False, [_ToldOnce(endpoint)]
        self._open = [self._tracer.start_span("launch")]
        self._in_iteration = False

    def around(self, during: During) -> During:
        """``during`` whose blocks are spans too: parts of an iteration within it, others within the launch."""

        @contextmanager
        def with_spans(name: str) -> Iterator[None]:
            if name == FIRST_PART and not self._in_iteration:
                self._begin("iteration")
                self._in_iteration = True
            depth = len(self._open)
            self._begin(name)
            with during(name):
                yield
            self._end(depth)  # after an error close() ends it, and those around it

        return with_spans

    def stepped(self, record: StepRecord) -> None:
        """End the span of an iteration, with its losses."""
        if not self._in_iteration:
            return
        span = self._open[-1]
        span.set_attribute("megatron.iteration", record.iteration)
        for name, loss in record.losses.items():
            span.set_attribute(f"megatron.{name.replace(' ', '_')}", float(loss))
        self._end(len(self._open) - 1)
        self._in_iteration = False

    def close(self, error: BaseException | None = None) -> None:
        """End the spans that are open, with the error that ended the run, and send what waits, for some seconds."""
        if error is not None:
            self._open[-1].record_exception(error)
        self._end(0)
        self._provider.force_flush(_SECONDS * 1000)
        self._provider.shutdown()

    def _begin(self, name: str) -> None:
        from opentelemetry.trace import set_span_in_context

        self._open.append(self._tracer.start_span(name, context=set_span_in_context(self._open[-1])))

    def _end(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop().end()


def _is_url(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:  # a port that is none, half of an IPv6 address
        return False


class _ToldOnce(logging.Handler):
    """Says once what OpenTelemetry says of each failure to send."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint, self._told = endpoint, False

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            logger.warning("--otlp-endpoint %s takes no traces: training continues without them", self._endpoint)
