"""When and how a run's checkpoints are written: before training goes on, or beside it (``--async-save``)."""

from __future__ import annotations

import dataclasses
import logging
import os
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
from megatron.core.checkpointing.save import PendingSave, begin_save
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.conversion.chat_files import chat_entry
from megatron.core.conversion.kept_tokenizer import files_to_keep
from megatron.core.diloco.workers import of_worker
from megatron.core.files.remote_path import AnyPath, RemotePath, path_of
from megatron.core.files.writable import leaving_no_empty, try_to_write
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import WORLD
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import CheckpointError
from megatron.planning.estimate import flops_per_sample
from megatron.training.checkpoints.earlier_run import delete_earlier, earlier_checkpoints
from megatron.training.run.run import Run
from megatron.training.run.stop import NonFiniteError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A save under way, and what ``progress.txt`` will note when it is durable."""

    save: PendingSave
    iteration: int
    samples: int


class Saver:
    """Writes the run's checkpoints into ``--save``, one at a time. Its methods are collectives."""

    def __init__(self, run: Run, still_held: StillHeld = lambda: None) -> None:
        self._run = run
        self._still_held = still_held
        self._root = path_of(run.config.checkpoint.save or "")
        self._pending: _Pending | None = None
        published = run.config.checkpoint.load_hf  # which may be a folder in --save
        loaded = None if run.loaded_from in (None, published) else path_of(run.loaded_from or "").parent
        goes_on = loaded == self._root and not run.config.checkpoint.finetune
        self._saved_at = run.progress.iteration if goes_on else None
        self._earlier = run_on_first(lambda: earlier_checkpoints(run.config.checkpoint), run.context.mesh)
        self._staging = Staging() if run.config.checkpoint.async_save else None
        # What every checkpoint keeps of the tokenizer, as it is at the start, and its base; rank 0 writes it.
        self._files: dict[str, bytes] = {}
        if run.context.mesh.world_rank == 0:
            self._files |= files_to_keep(run.config.tokenizer)
            if run.base is not None:
                self._files[BASE_FILE] = Base.of(run.base).to_json().encode()

    def save(self) -> None:
        """Save the run as it is now; with ``--async-save``, return when the tensors have been copied.

        A save that is still under way is waited for. Raises CheckpointError when either can't be written.
        """
        self.finish()
        run, checkpoint, progress = self._run, self._run.config.checkpoint, self._run.progress
        run.reporter.say(f"saving checkpoint at iteration {progress.iteration:7d} to {self._root} in torch_dist format")
        state: Iterator[ShardedState] = chain(weights_to_save(run), run.buffer_state())
        if checkpoint.save_optim:
            state = chain(state, run.optimizer.entries(with_average=run.optimizer.has_average))
        if run.scaling is not None:
            state = chain(state, run.scaling.state())
        if run.outer is not None:
            shared = run.outer.entries() if checkpoint.save_optim else ()
            state = chain(of_worker(state, run.context.mesh), shared)
        save = begin_save(
            self._root,
            progress.iteration,
            state,
            run_state(run),
            run.context.mesh,
            background=self._staging,
            files={**self._files, **run.train_spec.files()},
        )
        self._pending = _Pending(save, progress.iteration, progress.consumed_samples)
        if self._staging is None:
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
        """At a step boundary, finish a background save that every rank has written; otherwise let it go on.

        Raises CheckpointError when a rank could not write, or another run saves there now.
        """
        self._still_held()
        if self._pending is None:
            return
        context = self._run.context
        written = torch.tensor(int(self._pending.save.is_written()), device=context.device)
        if all_reduce(written, context.mesh, *WORLD, op="min").item():
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way, if any, is durable; then delete checkpoints that retention drops."""
        pending, self._pending = self._pending, None
        self._still_held()
        if pending is None:
            return
        run, checkpoint = self._run, self._run.config.checkpoint
        pending.save.finish()
        self._saved_at = pending.iteration
        run.reporter.say(f"  successfully saved checkpoint from iteration {pending.iteration:7d} to {self._root}")
        run.reporter.tell("saved", iteration=pending.iteration)
        if self._earlier:
            self._earlier = delete_earlier(self._earlier, saved=pending.iteration, mesh=run.context.mesh)
        kept = Retention(checkpoint.keep_last_checkpoints, checkpoint.save_retain_interval)
        prune(self._root, pending.iteration, kept, run.context.mesh)
        if run.config.reporting.log_progress and run.context.mesh.world_rank == 0:
            note_progress(self._root, run, pending.samples, f"saved checkpoint\titeration: {pending.iteration}")


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
            saver.finish()
        raise
    saver.finish()


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
