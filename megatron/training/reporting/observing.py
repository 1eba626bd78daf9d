"""Who sees the events of a run on a rank: the file of events, metrics, traces, and each rank's own log."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from megatron.config.report import settings_report
from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.files.durable import write_errors
from megatron.core.files.locks import lock
from megatron.core.files.remote_path import is_url
from megatron.errors import DataError, MegatronError
from megatron.small_files import check_regular
from megatron.training.reporting.events import EVENTS_FILE, Event, EventLog, Observer, Observers, read_events
from megatron.training.reporting.goodput import Goodput
from megatron.training.reporting.run_metrics import RunMetrics
from megatron.training.reporting.tracing import Tracer
from megatron.version import __version__

if TYPE_CHECKING:
    from megatron.config.run import RunConfig
    from megatron.training.reporting.metrics import StepRecord
    from megatron.training.reporting.startup import StartupFacts
    from megatron.training.run.run import Run

logger = logging.getLogger(__name__)
_SECONDS_OF_CHILDREN = 10.0  # in which data workers of a process that was killed end, which hold its locks till then


def events_file(config: RunConfig) -> Path | None:
    """Where the run's events are appended: ``--log-json``, or a file in a ``--save`` that is no URL; None without."""
    named, save = config.reporting.log_json, config.checkpoint.save
    if named is not None:
        return Path(named)
    return None if save is None or is_url(save) or config.training.skip_train else Path(save, EVENTS_FILE)


@contextmanager
def observed(run: Run) -> Iterator[None]:
    """Let the run's observers see what happens during the block, and how it ends. A collective.

    Raises ConfigError for a port that is in use, a package that is missing, or an address that is none; DataError for a
    file that is no file of events, or can't be written.
    """
    reporting, mesh = run.config.reporting, run.context.mesh
    with ExitStack() as stack:
        if reporting.log_dir is not None:
            folder = Path(reporting.log_dir)
            run_on_all(lambda: stack.enter_context(rank_log(run, folder)), mesh)
        tracer = run_on_all(lambda: _tracer(run), mesh)
        observers = run_on_all(lambda: _open(run, stack), mesh)
        if tracer is not None:
            run.reporter.timers.surround(tracer.around)
            run.after_step.append(tracer.stepped)
        run.reporter.observers = Observers(*observers)
        stack.enter_context(_seeing_warnings(run.reporter.observers))
        try:
            yield
        except BaseException as error:
            said = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
            run.reporter.tell("end", state="failed", iteration=run.progress.iteration, error=said)
            run.reporter.observers.close()
            if tracer is not None:
                tracer.close(error)
            raise
        run.reporter.tell("end", state=_end_state(run), iteration=run.progress.iteration)
        run.reporter.observers.close()
        if tracer is not None:
            tracer.close()


def _end_state(run: Run) -> str:
    is_done = run.config.training.skip_train or run.progress.iteration >= run.config.train_iters
    return "finished" if is_done else "stopped"


def _tracer(run: Run) -> Tracer | None:
    endpoint, mesh = run.config.reporting.otlp_endpoint, run.context.mesh
    return (
        Tracer(endpoint, rank=0, world_size=mesh.world_size) if endpoint is not None and mesh.world_rank == 0 else None
    )


def _open(run: Run, stack: ExitStack) -> list[Observer]:
    """The observers of this rank: the last one writes the events, as it prints the log; the first serves metrics.
    ``stack``: closes what they hold.
    """
    reporting, mesh, path, observers = run.config.reporting, run.context.mesh, events_file(run.config), list[Observer]()
    if path is not None and mesh.world_rank == mesh.world_size - 1:
        check_regular(path, where=str(path), error=DataError)
        with write_errors(path, remedy="name another file with --log-json"):
            goodput_before(run)  # a file of another kind is refused here, before hours of loading
            if reporting.log_json is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                _alone(stack.enter_context(path.open("ab+")), flag="--log-json")
        observers.append(EventLog(path))
    if reporting.metrics_port is not None and mesh.world_rank == 0:
        observers.append(RunMetrics(reporting.metrics_host, reporting.metrics_port, before=goodput_before(run)))
    return observers


def _alone(file: IO[Any], *, flag: str) -> None:
    """Lock a file until it is closed. Raises DataError where another run writes it."""
    end = time.monotonic() + _SECONDS_OF_CHILDREN
    while lock(file) == "held elsewhere":
        if time.monotonic() > end:
            raise DataError(f"{file.name} is written by another run: name another place with {flag}")
        time.sleep(0.1)


def goodput_before(run: Run) -> Goodput:
    """The account of the earlier launches that wrote this run's events; empty for the first."""
    path = events_file(run.config)
    is_there = path is not None and (path.is_file() or path.is_dir())  # what is no file, such as /dev/null, holds none
    return Goodput.of(read_events(path)) if path is not None and is_there else Goodput()


def tell_start(run: Run, facts: StartupFacts, about_data: list[str], *, setup_seconds: float) -> None:
    """Tell the observers of the launch, and print what earlier ones spent their time on. A collective.

    ``setup_seconds``: since the process began.
    """
    config, reporter = run.config, run.reporter
    mesh = run.context.mesh
    is_last = mesh.world_rank == mesh.world_size - 1
    before = run_on_all(lambda: goodput_before(run) if is_last else Goodput(), mesh)
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": config.data_parallel_size,
        "workers": parallel.num_workers,
    }
    fields = {
        "version": __version__,
        "host": socket.gethostname(),
        "model": facts.model_name,
        "parameters": facts.parameters,
        "device": facts.device,
        "world_size": config.world_size,
        "layout": sizes,
        "iteration": run.progress.iteration,
        "trains": not config.training.skip_train,
        "train_iterations": config.train_iters,
        "loaded_from": facts.loaded_from,
        "setup_seconds": setup_seconds,
        "settings": settings_report(config),
        "data": about_data,
    }
    reporter.tell("start", **fields)
    if before.launches:
        before.see(Event("start", time.time(), {key: fields[key] for key in ("setup_seconds", "iteration", "trains")}))
        reporter.say(f"== time\n   {before}")


class _Warnings(logging.Handler):
    def __init__(self, observers: Observers) -> None:
        super().__init__(logging.WARNING)
        self._observers = observers

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(__package__):  # a report that fails is dropped, and would be asked to report it
            self._observers.tell("warning", text=record.getMessage(), level=record.levelname)


@contextmanager
def _seeing_warnings(observers: Observers) -> Iterator[None]:
    """Tell the observers of this rank's warnings during the block."""
    handler = _Warnings(observers)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


class _RankFile(logging.FileHandler):
    """A log on a disk that may fail: a warning says so once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path, self._failed = path, False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Warn of the first line that can't be written."""
        if not self._failed:
            self._failed = True
            logger.warning("--log-dir: %s can't be written (%s): training continues", self._path, sys.exc_info()[1])


def _traceback(error: BaseException) -> bool:
    return not isinstance(error, (MegatronError, KeyboardInterrupt))  # a user's mistake is a sentence


@contextmanager
def rank_log(run: Run, folder: Path) -> Iterator[None]:
    """Write this rank's log into ``folder`` during the block: its warnings, its steps of every log line with their time
    on this rank, and the traceback of an error. Raises DataError where it can't be written.
    """
    rank, reporting = run.context.mesh.world_rank, run.config.reporting
    path = folder / f"rank{rank:05d}.log"
    check_regular(path, where=str(path), error=DataError)
    with write_errors(path, remedy="name another folder with --log-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        handler = _RankFile(path)
        assert handler.stream is not None
        _alone(handler.stream, flag="--log-dir")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    own = logging.Logger("rank")  # no child of the root's: what it says is on no terminal
    own.addHandler(handler)
    own.info("rank %d of %d on %s, process %d", rank, run.config.world_size, socket.gethostname(), os.getpid())
    begun = time.perf_counter()

    def note(record: StepRecord) -> None:
        nonlocal begun
        if record.iteration % reporting.log_interval == 0:
            now, losses = time.perf_counter(), ", ".join(f"{name} {loss:.6g}" for name, loss in record.losses.items())
            own.info("iteration %d: %s; %.3f s since the line before", record.iteration, losses, now - begun)
            begun = now

    run.after_step.append(note)
    logging.getLogger().addHandler(handler)
    try:
        yield
        own.info("%s at iteration %d", _end_state(run), run.progress.iteration)
    except BaseException as error:
        place = run.context.mesh.activity.place
        own.error("failed at iteration %d, %s: %s", run.progress.iteration, place, error, exc_info=_traceback(error))
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):  # of what a full disk has not taken, which a warning has said
            handler.close()
