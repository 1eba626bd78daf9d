"""What is seen of a run from outside: its file of events, the account of its time, metrics, traces and ranks' logs."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from megatron.core.files.locks import lock
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.events import Event, EventLog, Observers, read_events
from megatron.training.reporting.goodput import Goodput
from megatron.training.reporting.history import History
from megatron.training.reporting.observing import observed, rank_log
from megatron.training.reporting.report_page import report_page
from megatron.training.reporting.run_metrics import RunMetrics
from megatron.training.reporting.tracing import Tracer
from tests.harness import run_ranks
from tests.harness.ports import free_ports
from tests.harness.runs import GPT, tiny_config, tiny_run
from tests.harness.sentences import expect_error

FLAGS = "--mock-data --log-interval 1"


def train(flags: str) -> None:
    """Train a tiny model on this rank, from start to end."""
    config = tiny_config(f"{FLAGS} {flags}")
    train_from_start_to_end(config, GPT.train_spec, ParallelContext.single(), started=0.0)


def names(path: Path) -> list[str]:
    return [event.name for event in read_events(path)]


def test_events_of_a_run_and_of_its_next_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports and the account of time are made of this file: a launch that goes on appends, and says what was lost.

    Steps after the last log line were on no account, and an evaluation of an earlier checkpoint took later steps for
    lost, and left --eval-tasks out.
    """
    saving = f"--save {tmp_path} --load {tmp_path} --eval-iters 0"
    train(f"{saving} --exit-interval 2 --log-interval 5")
    path = tmp_path / "events.jsonl"
    assert names(path) == ["start", "steps", "saved", "aside", "end"]
    first, steps, *_, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert (steps["iteration"], steps["iterations"]) == (2, 2)
    assert (first["iteration"], first["world_size"], first["train_iterations"]) == (0, 1, 3)
    assert any("--num-layers" in line for line in first["settings"])
    assert last["state"] == "stopped"
    capsys.readouterr()
    train(saving)
    assert names(path)[5:] == ["start", "steps", "saved", "aside", "end"]
    assert "since the first of 2 launches: goodput" in capsys.readouterr().out
    (tmp_path / "text").write_text("3 1 4 1 5 9 2 6 5 3 5 8 9 7 9")
    tasks = f"--eval-tasks LM={tmp_path}/text"
    train(f"--load {tmp_path} --ckpt-step 2 --skip-train --eval-iters 1 --log-json {path} {tasks}")
    history = History.of("run", read_events(path))
    assert (history.state, history.iteration, sorted(history.curves["lm loss"])) == ("finished", 3, [2, 3])
    assert history.goodput.redone == 0
    assert [*history.numbers["LM loss"]] == [2]


def test_a_launch_that_never_trains_leaves_no_file(tmp_path: Path) -> None:
    """A refused start would leave a file, and keep the empty --save folder from being deleted."""
    log = EventLog(tmp_path / "events.jsonl")
    for event in (Event("start", 1.0), Event("warning", 2.0), Event("end", 3.0, {"state": "failed"})):
        log.see(event)
    assert list(tmp_path.iterdir()) == []
    log.see(Event("saved", 4.0, {"iteration": 1}))
    assert names(tmp_path / "events.jsonl") == ["start", "warning", "end", "saved"]


def test_lines_cut_short_are_passed_over_and_another_file_is_refused(tmp_path: Path) -> None:
    """A kill in the middle of a line must cost that line alone, also for the launch that appends the next one."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "event": "saved", "iteration": 1}\n{"time": 2.0, "event": "steps", "iterati')
    EventLog(path).see(Event("saved", 3.0, {"iteration": 2, "loss": float("nan")}))
    assert [event.fields["iteration"] for event in read_events(path)] == [1, 2]
    assert [*read_events(path)][1].fields["loss"] == "nan"
    path.write_text('{"event": "steps", "time": 1}\n[]\n7\n')
    with expect_error(DataError, path):
        list(read_events(path))


WHOLE: dict[str, dict[str, Any]] = {
    "start": {
        "iteration": 0,
        "setup_seconds": 1.0,
        "layout": {"tp": 1},
        "settings": ["--x"],
        "data": [],
        "parameters": 3,
    },
    "steps": {"iteration": 1, "iterations": 1, "seconds": 1.0, "losses": {"lm loss": "nan"}, "mfu": 0.5},
    "aside": {"what": "save-hf", "seconds": 1.0},
    "validation": {"where": "on validation set", "losses": {"lm loss": 1}, "iteration": 1, "data_set": ""},
    "numbers": {"values": {"score": 1.0}, "iteration": 1},
    "rollback": {"iteration": 1},
    "end": {"state": "finished", "iteration": 1},
}


@pytest.mark.parametrize("name", WHOLE)
def test_fields_of_other_types_are_passed_over(name: str, tmp_path: Path) -> None:
    """A line of another program in the file ended the next launch of the run, and its report, with a traceback."""
    path, known = tmp_path / "events.jsonl", {"event": name, **WHOLE[name]}
    for field in WHOLE[name]:
        for wrong in (None, 3, -1, "x", True, [1], {"a": "b"}, {"a": None}, 10**400, float("inf")):
            lines = [{"time": 1.0, **known}, {"time": 2.0, **known, field: wrong}, {"time": 1e300, **known}]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            read = [*read_events(path)]
            assert read[0].fields == WHOLE[name]
            history = History.of("run", read)
            str(history.goodput)
            if name == "start":
                report_page([history])
            assert len(read) == 1 or (field, wrong) in ALSO_RIGHT, (field, wrong)


ALSO_RIGHT = [
    *((field, 3) for field in ("iteration", "iterations", "seconds", "setup_seconds", "parameters", "mfu")),
    *((field, "x") for field in ("what", "where", "data_set", "state")),
    *(("mfu", number) for number in (None, -1, float("inf"))),
]


def test_lines_without_an_end_cost_no_memory(tmp_path: Path) -> None:
    """A file of one huge line would be read whole."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1,"event":"warning","text":"' + b"x" * (1 << 24) + b'"}\n{"time":1,"event":"saved"}\n')
    assert names(path) == ["saved"]


def test_places_that_hold_no_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe held the run up for good; another file ended one rank alone, after hours of loading; two runs mixed
    their events in one file.
    """
    pipe, folder, other = tmp_path / "pipe", tmp_path / "folder", tmp_path / "other"
    os.mkfifo(pipe)
    (folder / "events.jsonl").mkdir(parents=True)
    other.write_text('{"a": 1}\n')
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(logs / "rank00000.log")
    for flags in (f"--log-json {pipe}", f"--save {folder}", f"--log-json {other}", f"--log-dir {logs}"):
        with expect_error(DataError, tmp_path):
            train(flags)
    monkeypatch.setattr("megatron.training.reporting.observing._SECONDS_OF_CHILDREN", 0)
    shared = tmp_path / "shared"
    with shared.open("ab") as file:
        assert lock(file) == "locked"
        with expect_error(DataError, shared, "--log-json"):
            train(f"--log-json {shared}")
    for flags in ("--log-json s3://bucket/events.jsonl", "--log-dir s3://bucket/logs"):
        with expect_error(ConfigError):
            tiny_config(f"{FLAGS} {flags}")


def test_a_full_disk_under_a_rank_s_log_is_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line that could not be written was a traceback, and the last one ended a run that had finished."""
    monkeypatch.setattr("megatron.training.reporting.observing.check_regular", lambda *_, **__: None)
    (tmp_path / "rank00000.log").symlink_to("/dev/full")
    train(f"--log-dir {tmp_path}")
    assert caplog.text.count("training continues") == 1
    assert "Logging error" not in capsys.readouterr().err


def test_addresses_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own errors of them are no OSError."""
    with expect_error(ConfigError):
        RunMetrics("a" * 70, 19109, before=Goodput())
    for endpoint in ("http://[::1", "http://host:99999"):
        with expect_error(ConfigError):
            Tracer(endpoint, rank=0, world_size=1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-5")
    with expect_error(ConfigError):
        Tracer("http://127.0.0.1:9", rank=0, world_size=1)


def test_a_disk_that_fails_and_an_observer_that_fails_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No report is worth a run."""
    log = EventLog(Path("/dev/full"))
    for iteration in (1, 2):
        log.see(Event("saved", 1.0, {"iteration": iteration}))
    assert caplog.text.count("training continues") == 1

    class Failing(EventLog):
        @override
        def see(self, event: Event) -> None:
            raise ZeroDivisionError("lost")

    observers = Observers(Failing(tmp_path / "a"), EventLog(tmp_path / "b"))
    observers.tell("saved", iteration=1)
    observers.tell("saved", iteration=2)
    assert caplog.text.count("Failing failed (lost)") == 1
    assert names(tmp_path / "b") == ["saved", "saved"]


def steps(time: float, last: int, *, count: int = 10, seconds: float = 10.0) -> Event:
    numbers = {"iteration": last, "iterations": count, "seconds": seconds}
    return Event("steps", time, {**numbers, "losses": {"lm loss": 1.0}})


def test_account_of_time() -> None:
    """Steps after the checkpoint from which a launch goes on were in vain; a kill's last seconds are away."""
    goodput = Goodput.of(
        [
            Event("start", 105.0, {"setup_seconds": 5.0, "iteration": 0}),
            steps(115.0, 10),
            Event("aside", 117.0, {"what": "save-checkpoint", "seconds": 2.0}),
            steps(127.0, 20),
            steps(137.0, 30),
            Event("start", 150.0, {"setup_seconds": 5.0, "iteration": 15}),
            Event("aside", 153.0, {"what": "evaluate-time", "seconds": 3.0}),
            steps(163.0, 25),
        ]
    )
    assert goodput.lost() == {
        "steps done again": 15.0,
        "starting": 10.0,
        "saving": 2.0,
        "evaluating": 3.0,
        "away": 8.0,
    }
    assert (goodput.training, goodput.total, goodput.launches) == (25.0, 63.0, 2)
    assert goodput.share == pytest.approx(25 / 63)
    assert sum(goodput.lost().values()) + goodput.training == goodput.total


def test_history_forgets_what_is_done_again() -> None:
    """A curve that goes back and forth, or a best loss of steps that no checkpoint holds, is of no run."""
    history = History.of(
        "run",
        [
            Event("start", 0.0, {"iteration": 0}),
            steps(1.0, 10),
            Event("validation", 1.0, {"where": "iteration 20", "iteration": 20, "losses": {"lm loss": 0.5}}),
            steps(2.0, 20),
            Event("start", 3.0, {"iteration": 10}),
        ],
    )
    assert history.curves["lm loss"] == {10: 1.0}
    assert history.validation["lm loss"] == {}
    assert (history.iteration, history.state) == (10, "still running, or killed")


def page(port: int) -> str:
    return str(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode())


def test_metrics_of_a_run() -> None:
    """A dashboard reads these names: iteration, losses, speed, checkpoints, memory of each rank, lost time."""
    pytest.importorskip("prometheus_client", reason="the prometheus_client package is optional")
    port = free_ports(1)[0]
    metrics, now = RunMetrics("127.0.0.1", port, before=Goodput(), clock=lambda: 100.0), 100.0
    try:
        fields = {"iterations": 1, "seconds": 2.0, "losses": {"lm loss": 2.5}, "tokens_per_second": 512.0, "mfu": None}
        counts = {"skipped_iterations": 1, "nan_iterations": 0, "memory": [{"resident": 5.0}, {"resident": 7.0}]}
        metrics.see(Event("start", now, {"iteration": 3, "world_size": 2, "setup_seconds": 1.0}))
        metrics.see(Event("steps", now + 2, {"iteration": 4, **fields, **counts}))
        metrics.see(Event("validation", now, {"losses": {"lm loss": 3.5}, "data_set": "web", "where": "iteration 4"}))
        metrics.see(Event("saved", now, {"iteration": 4}))
        text = page(port)
    finally:
        metrics.close()
    for line in (
        "megatron_iteration 4.0",
        "megatron_world_size 2.0",
        'megatron_loss{name="lm loss"} 2.5',
        'megatron_validation_loss{data_set="web",name="lm loss"} 3.5',
        "megatron_tokens_per_second 512.0",
        "megatron_skipped_iterations_total 1.0",
        "megatron_checkpoints_total 1.0",
        "megatron_checkpoint_age_seconds 0.0",
        'megatron_memory_bytes{kind="resident",rank="1"} 7.0',
        'megatron_lost_seconds{why="starting"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert float(re.findall(r"^megatron_goodput (\S+)", text, re.MULTILINE)[0]) == pytest.approx(2 / 3)
    dashboard = json.loads(Path("examples/grafana/training.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for target in targets for name in _METRIC.findall(target["expr"])}
    served = set(_METRIC.findall(text))
    assert len(asked) > 10
    assert asked <= served, "the dashboard would show nothing"


_METRIC = re.compile(r"\bmegatron_\w+")


def test_a_port_in_use_is_named() -> None:
    """Two runs on one node, or a server: the second says so before it trains."""
    pytest.importorskip("prometheus_client", reason="the prometheus_client package is optional")
    port = free_ports(1)[0]
    first = RunMetrics("127.0.0.1", port, before=Goodput())
    try:
        with expect_error(ConfigError, "--metrics-port", exit_code=2, hide=[r"(?<=--metrics-port )\d+"]):
            RunMetrics("127.0.0.1", port, before=Goodput())
    finally:
        first.close()


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector that speaks OTLP over HTTP: its address, and the spans that it gets."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        @override
        def log_message(self, *told: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_traces_of_a_run(tmp_path: Path) -> None:
    """A collector gets a span for each iteration with its parts in it, and for what is no part of one."""
    pytest.importorskip("opentelemetry.sdk", reason="the opentelemetry packages are optional")
    with collector() as (address, spans):
        train(f"--otlp-endpoint {address} --save {tmp_path} --eval-interval 3 --eval-iters 1")
    by_number = {span.span_id: span for span in spans}

    def place(span: Any) -> tuple[str, ...]:
        inside = place(by_number[span.parent_span_id]) if span.parent_span_id else ()
        return (*inside, span.name)

    places = [place(span) for span in spans]
    assert places.count(("launch", "iteration")) == 3
    assert places.count(("launch", "iteration", "forward-backward", "forward-compute")) == 3 * 4
    assert places.count(("launch", "save-checkpoint")) == 1
    assert ("launch", "evaluate-time") in places


def test_a_collector_that_is_away_and_one_that_is_no_url(caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry shows a traceback for each batch; a run goes on, and says it once."""
    pytest.importorskip("opentelemetry.sdk", reason="the opentelemetry packages are optional")
    train(f"--otlp-endpoint http://127.0.0.1:{free_ports(1)[0]} --eval-iters 0")
    assert caplog.text.count("training continues without them") == 1
    with expect_error(ConfigError, "--otlp-endpoint", exit_code=2):
        train("--otlp-endpoint localhost:4318")


def test_log_of_each_rank(tmp_path: Path) -> None:
    """Warnings and the traceback of one rank of many were in a common log, or nowhere."""
    run = tiny_run(ParallelContext.single(), f"{FLAGS} --log-dir {tmp_path}")

    def fail() -> None:
        with rank_log(run, tmp_path):
            logging.getLogger("megatron.core").warning("a slow disk")
            raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError):
        fail()
    text = (tmp_path / "rank00000.log").read_text()
    assert "WARNING megatron.core: a slow disk" in text
    assert "ZeroDivisionError: broken" in text
    (tmp_path / "file").touch()
    with expect_error(DataError, "--log-dir", exit_code=2), rank_log(run, tmp_path / "file"):
        pass


def logged_on_a_rank(context: ParallelContext, folder: str) -> str:
    run = tiny_run(context, f"{FLAGS} --log-dir {folder}")
    try:
        with observed(run):
            return ""
    except MegatronError as error:
        return str(error)


def test_log_of_one_rank_that_cannot_be_written_ends_all(tmp_path: Path) -> None:
    """The rank ended alone, and the others waited for it."""
    (tmp_path / "rank00001.log").mkdir()
    assert all("rank00001.log" in each for each in run_ranks(logged_on_a_rank, str(tmp_path), dp=2))
