"""When and how a run's checkpoints are written: before training goes on, or beside it (``--async-save``); and again."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import chain
from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_all, run_on_first
from megatron.core.checkpointing.base import BASE_FILE, Base
from megatron.core.checkpointing.lease import StillHeld, held
from megatron.core.checkpointing.load import CHAT, MODEL_NAME, SPEC_STATE
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import PendingSave, Snapshot, take_snapshot
from megatron.core.conversion.chat_files import chat_entry
from megatron.core.conversion.kept_tokenizer import files_to_keep
from megatron.core.diloco.workers import of_worker
from megatron.core.files.remote_path import AnyPath, RemotePath, path_of
from megatron.core.files.writable import leaving_no_empty, try_to_write
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import WORLD
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import CheckpointError, StorageAwayError
from megatron.planning.estimate import flops_per_sample
from megatron.training.checkpoints.earlier_run import delete_earlier, earlier_checkpoints
from megatron.training.checkpoints.tiers import Tier, leave_copy, note_beginning, origin_of, remove_left_copy
from megatron.training.checkpoints.waiting import Job, WaitingSaves
from megatron.training.run.run import Run
from megatron.training.run.stop import NonFiniteError

logger = logging.getLogger(__name__)


class Saver:
    """Writes the run's checkpoints into ``--save``, one at a time. Its methods are collectives.

    A save that fails in a way that may pass is tried again while training goes on, from a copy in main memory.
    """

    def __init__(self, run: Run, still_held: StillHeld = lambda: None) -> None:
        self._run = run
        self._still_held = still_held
        self._root = path_of(run.config.checkpoint.save or "")
        self._under_way: tuple[Job, PendingSave] | None = None
        self._left: tuple[int, str] | None = None  # the iteration of the copy that is left on nodes, and words about it
        self._waiting = WaitingSaves(run.config.checkpoint.save_retry_copies)
        published = run.config.checkpoint.load_hf  # which may be a folder in --save
        loaded = None if run.loaded_from in (None, published) else path_of(run.loaded_from or "").parent
        goes_on = loaded == self._root and not run.config.checkpoint.finetune
        self._saved_at = run.progress.iteration if goes_on else None
        self._earlier = run_on_first(lambda: earlier_checkpoints(run.config.checkpoint), run.context.mesh)
        self._origin, newest = run_on_first(self._begin, run.context.mesh)
        if run.recovered:
            self._saved_at = newest if newest >= 0 else None
        # What every checkpoint keeps of the tokenizer, as it is at the start, and its base; rank 0 writes it.
        self._files: dict[str, bytes] = {}
        if run.context.mesh.world_rank == 0:
            self._files |= files_to_keep(run.config.tokenizer)
            if run.base is not None:
                self._files[BASE_FILE] = Base.of(run.base).to_json().encode()
        self._tier = Tier(run, self._files) if run.config.checkpoint.non_persistent_ckpt_type else None

    def _begin(self) -> tuple[str, int]:
        settings = self._run.config.checkpoint
        if settings.save is None:
            return "", -1
        origin, newest = origin_of(self._root)
        return (note_beginning(self._root) if settings.non_persistent_ckpt_type and not origin else origin), newest

    def save(self) -> None:
        """Save the run as it is now; with ``--async-save``, return when the tensors have been copied.

        A save that is being written is waited for. While the storage is away, the tensors are copied, and the save
        waits with those that failed. Raises CheckpointError when either can't be written, nor may be later.
        """
        self.finish()
        iteration = self._run.progress.iteration
        self._say(f"saving checkpoint at iteration {iteration:7d} to {self._root} in torch_dist format")
        job = Job(self._snapshot(), self._run.progress.consumed_samples)
        if self._waiting.jobs:
            self._let_wait(job)
            return
        if self._run.config.checkpoint.async_save:
            self._waiting.copied(job)
        self._start(job)
        if not self._run.config.checkpoint.async_save:
            self.finish()

    @property
    def saved_at(self) -> int | None:
        """The iteration of the newest checkpoint of this run that is durable, if there is one."""
        return self._saved_at

    def kept(self) -> str:
        """Which checkpoint is kept, and how many iterations are lost, if the run ends now; the same on all ranks."""
        now, saved = self._run.progress.iteration, self._saved_at
        if self._run.config.checkpoint.save is None:
            return f"no --save was given; iterations lost: {now:,}"
        if saved is None:
            return f"no checkpoint had been saved in {self._root}; iterations lost: {now:,}"
        return f"the checkpoint of iteration {saved} is kept in {self._root}; iterations lost: {now - saved:,}"

    def settle(self) -> None:
        """At a step boundary, finish a background save that every rank has written, or try again what waits when it is
        time; otherwise let it go on.

        Raises CheckpointError when a rank could not write, or another run saves there now.
        """
        self._still_held()
        context = self._run.context
        if self._tier is not None:
            self._tier.settle()
        if self._under_way is not None:
            written = torch.tensor(int(self._under_way[1].is_written()), device=context.device)
            if all_reduce(written, context.mesh, *WORLD, op="min").item():
                self.finish()
        elif self._waiting.jobs:
            is_early = context.mesh.world_rank == 0 and self._waiting.pause > 0
            due = torch.tensor(int(not is_early), device=context.device)
            if all_reduce(due, context.mesh, *WORLD, op="min").item():
                self._start(self._waiting.jobs[0])

    def finish(self) -> None:
        """Wait until the save that is being written, if any, is durable or has failed; then delete checkpoints that
        retention drops.
        """
        self._end_attempt(since=None)

    def copy_if_due(self) -> None:
        """Make a copy of the run as it is now, when ``--non-persistent-save-interval`` says so."""
        interval = self._run.config.checkpoint.non_persistent_save_interval
        if self._tier is not None and interval is not None and self._run.progress.iteration % interval == 0:
            with self._run.reporter.aside("save-checkpoint"):
                self._tier.save(self._snapshot(), origins=self._origins)

    def end(self) -> None:
        """Make every save durable; then nothing needs the copies any more."""
        self.make_durable()
        if self._tier is not None:
            self._tier.finish()
            if self._saved_at == self._run.progress.iteration:
                self._tier.remove()

    def make_durable(self) -> None:
        """Wait until every save is durable, also those that have failed so far, for ``--save-retry-minutes-at-end``.

        Meanwhile a copy is in ``--save-fallback-dir``, as the run may be ended before.
        """
        begun = self._waiting.clock()
        self._end_attempt(since=begun)
        if self._waiting.jobs:
            self._say(f"warning: {self._leave_copy()}")
        is_left = bool(self._waiting.jobs)
        while self._waiting.jobs:
            time.sleep(self._waiting.pause)
            self._start(self._waiting.jobs[0])
            self._end_attempt(since=begun)
        if is_left:
            remove_left_copy(self._run)
            self._left = None

    def drop_waiting(self) -> None:
        """Forget saves that failed: the run goes back to a checkpoint before them."""
        self.finish()
        for job in [*self._waiting.jobs]:
            self._say(f"the save of iteration {job.iteration}, which waited in memory, is dropped")
            self._waiting.done(job)
        if self._tier is not None:
            self._tier.clear()

    @property
    def _origins(self) -> list[str]:
        """The checkpoints that a copy made now follows: the newest one, and those that are not durable yet."""
        under_way = [self._under_way[0]] if self._under_way is not None else []
        return [self._origin, *(job.origin for job in (*under_way, *self._waiting.jobs))]

    def _leave_copy(self) -> str:
        """Leave a copy of the run as it is now on the nodes, if none is there; what became of it, in words."""
        if self._left is None or self._left[0] != self._run.progress.iteration:
            if self._tier is not None:
                self._tier.finish()  # it may be writing this very copy
            is_left, words = leave_copy(self._run, self._snapshot(), origins=self._origins, small_files=self._files)
            if not is_left:
                return words
            self._left = self._run.progress.iteration, words
        return self._left[1]

    def _snapshot(self) -> Snapshot:
        run = self._run
        state: Iterator[ShardedState] = chain(weights_to_save(run), run.buffer_state())
        if run.config.checkpoint.save_optim:
            state = chain(state, run.optimizer.entries(with_average=run.optimizer.has_average))
        if run.scaling is not None:
            state = chain(state, run.scaling.state())
        if run.outer is not None:
            shared = run.outer.entries() if run.config.checkpoint.save_optim else ()
            state = chain(of_worker(state, run.context.mesh), shared)
        files = {**self._files, **run.train_spec.files()}
        return take_snapshot(run.progress.iteration, state, run_state(run), run.context.mesh, files=files)

    def _start(self, job: Job) -> None:
        self._under_way = job, job.start(self._root)

    def _end_attempt(self, *, since: float | None) -> None:
        """Wait for the save that is being written. ``since``: when the end of the run began to wait."""
        under_way, self._under_way = self._under_way, None
        self._still_held()
        if under_way is None:
            return
        job, pending = under_way
        try:
            pending.finish()
        except StorageAwayError as error:
            self._failed(job, error, since=since)
        else:
            self._waiting.answered()
            self._waiting.done(job)
            self._saved(job)

    def _failed(self, job: Job, error: StorageAwayError, *, since: float | None) -> None:
        """Let a save wait that failed, or raise its error when that has been tried for long enough."""
        settings, waiting = self._run.config.checkpoint, self._waiting
        pause = waiting.failed(job)
        minutes = settings.save_retry_minutes if since is None else settings.save_retry_minutes_at_end
        tried = run_on_first(lambda: waiting.tried_for(job, since=since), self._run.context.mesh)
        if tried >= 60 * minutes:
            how_long = f"; tried {job.attempts} times in {tried / 60:.1f} minutes" if minutes else ""
            left = self._leave_copy() if minutes else self.kept()
            raise StorageAwayError(f"{error}{how_long}; {left}") from error
        if job not in waiting.jobs:
            self._let_wait(job)
        self._run.reporter.tell(
            "save-failed", iteration=job.iteration, attempt=job.attempts, retry_seconds=pause, text=str(error)
        )
        meanwhile = "" if since is not None else "training goes on, and "
        self._say(f"warning: {error}; {meanwhile}attempt {job.attempts + 1} follows in {pause:.0f} s")

    def _let_wait(self, job: Job) -> None:
        for dropped in self._waiting.make_room():
            most = self._waiting.most
            self._say(
                f"warning: the save of iteration {dropped.iteration}, which waited in memory, is dropped for that of "
                f"iteration {job.iteration}: --save-retry-copies {most} {'waits' if most == 1 else 'wait'} at most"
            )
        self._waiting.add(job)

    def _saved(self, job: Job) -> None:
        run, checkpoint = self._run, self._run.config.checkpoint
        self._saved_at, self._origin = job.iteration, job.origin
        self._say(f"  successfully saved checkpoint from iteration {job.iteration:7d} to {self._root}")
        run.reporter.tell("saved", iteration=job.iteration, attempts=job.attempts + 1)
        kept = Retention(checkpoint.keep_last_checkpoints, checkpoint.save_retain_interval)
        try:
            if self._earlier:
                self._earlier = delete_earlier(self._earlier, saved=job.iteration, mesh=run.context.mesh)
            prune(self._root, job.iteration, kept, run.context.mesh)
        except StorageAwayError as error:  # the checkpoint itself is safe
            if run.context.mesh.world_rank == 0:
                logger.warning("older checkpoints are left for the next save to delete: %s", error)
        if run.config.reporting.log_progress and run.context.mesh.world_rank == 0:
            note_progress(self._root, run, job.samples, f"saved checkpoint\titeration: {job.iteration}")

    def _say(self, text: str) -> None:
        self._run.reporter.say(text)


def weights_to_save(run: Run) -> Iterator[ShardedState]:
    """The parameters that checkpoints of a run hold: all, or beside those of its base the ones that it trains."""
    trained = run.config.optimizer.trained
    return (each for each in run.model_state() if run.base is None or each.name.removeprefix("model.") in trained)


@contextmanager
def saving(run: Run, still_held: StillHeld = lambda: None) -> Iterator[Saver]:
    """A run's saver; a save under way is finished when the block ends, also by a loss that is not a number."""
    saver = Saver(run, still_held)
    try:
        yield saver
    except NonFiniteError:  # on every rank of a worker alike; with one worker all take part in finishing
        if run.context.mesh.size("dc") == 1:
            saver.end()
        raise
    saver.end()


@contextmanager
def holding_save_folder(config: RunConfig, context: ParallelContext) -> Iterator[StillHeld]:
    """Make the ``--save`` folder, try to write in it, and keep other runs out of it for the block. Runs that only
    evaluate don't keep others out. A folder that was made and is empty at the end is deleted.

    A collective. Raises CheckpointError on all ranks when the folder can't be written, before any training is lost, or
    when another run saves there. Yields a check of whether the folder is still held, which works on rank 0.
    """
    save, checks = config.checkpoint.save, list[StillHeld]()

    def still_held() -> None:
        for check in checks:
            check()

    with ExitStack() as stack:
        if save is not None:
            run_on_first(lambda: stack.enter_context(leaving_no_empty(path_of(save))), context.mesh)
            try:
                run_on_all(lambda: try_to_write(path_of(save)), context.mesh)
            except CheckpointError as error:
                raise CheckpointError(
                    f"--save {path_of(save)} cannot be written: {error}; name a folder that every rank may write into",
                    exit_code=error.exit_code,
                ) from error
        if save is not None and not config.training.skip_train:
            run_on_first(lambda: checks.append(stack.enter_context(held(path_of(save)))), context.mesh)
        yield still_held


def run_state(run: Run) -> dict[str, Any]:
    """Everything in a checkpoint that isn't a tensor, as JSON."""
    checkpoint = run.config.checkpoint
    return {
        MODEL_NAME: run.train_spec.name,
        "config": run.config.to_json(),
        "progress": dataclasses.asdict(run.progress),
        "schedule": run.schedule.state_dict(run.progress.scheduled_samples) if run.schedule is not None else None,
        "optimizer": run.optimizer.state_dict() if checkpoint.save_optim else None,
        "random_seed": run.context.rng.seed if checkpoint.save_rng else None,
        "tokenizer": {"name": run.tokenizer.name, "fingerprint": run.tokenizer.fingerprint},
        "data_phases": run.data.phases,
        **({"guards": run.guards.to_json()} if run.config.guards.judges_steps else {}),
        CHAT: chat_entry(run.chat),
        **({SPEC_STATE: dict(kept)} if (kept := run.train_spec.state()) else {}),
        **({"diloco": run.outer.state_dict()} if run.outer is not None and checkpoint.save_optim else {}),
    }


def note_progress(root: AnyPath, run: Run, samples: int, event: str) -> None:
    """Append a line to ``progress.txt`` beside the checkpoints: time, job, ranks, event, samples and FLOPs so far."""
    fields = (
        f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        f"job ID: {os.environ.get('SLURM_JOB_ID', '')}",
        f"ranks: {run.context.mesh.world_size}",
        event,
        f"samples: {samples}",
        f"model FLOPs: {samples * flops_per_sample(run.config, run.train_spec):.3e}",
    )
    path, line = root / "progress.txt", "\t".join(fields) + "\n"
    try:
        if isinstance(path, RemotePath):  # object stores can't append
            path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + line, encoding="utf-8")
        else:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
    except OSError as error:  # the checkpoint itself is safe
        logger.warning("%s could not be written: %s", path, error.strerror)
