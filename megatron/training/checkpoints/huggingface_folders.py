"""The trained model in Hugging Face's format: ``--save-hf`` at the end, or at every so many checkpoints.

A model is written after the checkpoint of its iteration, so a run that is killed between the two, or while it writes,
writes the model when it is resumed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.lora import without_adapters
from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.find import is_unused
from megatron.core.checkpointing.first_rank import Help, work_on_first
from megatron.core.checkpointing.gathering import Gathering
from megatron.core.conversion.adapters import merged
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.reading import CONFIG
from megatron.core.conversion.huggingface.writing import check_writable, write_huggingface
from megatron.core.conversion.native import PREFIX
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.remote import becoming
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.files.writable import why_not_writable
from megatron.core.optimizer.weight_average import AVERAGES
from megatron.errors import CheckpointError, exit_code_of
from megatron.small_files import check_kinds, read_json
from megatron.training.checkpoints.published import companions_of, describe_published, starts_from_published
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run

NOTE = "megatron_run.json"
"""File in a folder of ``--save-hf`` that says which run wrote it, and after which iteration."""
_MAX_SHARD_SIZE = 5_000_000_000


class HuggingFaceFolders:
    """Writes the models of ``--save-hf``. Its method is a collective."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._resumed_at = run.progress.iteration

    def write_if_due(self) -> None:
        """Write the model as it is now if one is due and isn't there; raises CheckpointError when it can't be."""
        run, settings, iteration = self._run, self._run.config.checkpoint, self._run.progress.iteration
        is_last = iteration == run.config.train_iters
        is_due = is_last or (settings.save_hf_interval is not None and iteration % settings.save_hf_interval == 0)
        if settings.save_hf is None or not is_due or iteration == 0:
            return
        place = path_of(settings.save_hf)
        if settings.save_hf_interval is not None:
            place /= f"iter_{iteration:07d}"
        self._saver.make_durable()  # a restart must be able to write this model

        def is_there() -> bool:  # an interrupted upload lacks the file that is put last
            return iteration_in(place, settings) == iteration and (place / CONFIG).is_file()

        if iteration == self._resumed_at and run_on_first(is_there, run.context.mesh):
            return
        if settings.save_hf_ema and not run.optimizer.has_average:
            raise CheckpointError(
                f"--save-hf-ema: no moving average of the weights has begun at iteration {iteration}, because no step "
                "with --ema-decay was taken; leave --save-hf-ema out, or train on with more --train-iters"
            )
        with run.reporter.aside("save-hf"):
            averages = run.optimizer.averages() if settings.save_hf_ema else ()
            gathering = Gathering([*run.model_state(), *averages], run.context)
            work_on_first(partial(self._write, place, gathering), run.context, help=gathering.gather)
        what = "moving average of the weights" if settings.save_hf_ema else "model"
        run.reporter.say(f"  wrote the {what} of iteration {iteration} to {place} in Hugging Face's format")

    def _write(self, place: AnyPath, gathering: Gathering, ask: Help) -> None:
        run, iteration = self._run, self._run.progress.iteration
        numbers = {name: number for number, name in enumerate(gathering.names)}

        def rounded(number: int, dtype: torch.dtype) -> Tensor:
            gathered: Tensor = ask(number)
            return gathered.to(dtype)

        tensors = {}
        for name, shape, dtype in zip(gathering.names, gathering.shapes, gathering.dtypes):
            if name.startswith(PREFIX):  # otherwise an average, which parameters that were not trained don't have
                parameter = name.removeprefix(PREFIX)
                number = numbers.get(AVERAGES + parameter, numbers[name])
                tensors[parameter] = LazyTensor(shape, dtype, partial(rounded, number, dtype))
        portable = PortableModel(
            model=run.config.model,
            groups=run.config.extra,
            tensors=tensors,
            tokenizer=run.config.tokenizer,
            seq_length=run.config.data.seq_length,
            companions=companions_of(run),
            iteration=iteration,
            chat=run.chat,
        )
        note = {"iteration": iteration, "run": run.config.checkpoint.saved_place}
        try:
            check = partial(iteration_in, place, run.config.checkpoint)
            with becoming(place, say=run.reporter.say, check=check, first=NOTE) as aside:
                write_huggingface(merged(portable), aside, max_shard_size=_MAX_SHARD_SIZE)
                (aside / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            raise CheckpointError(
                f"--save-hf {place} cannot be written: {reason}; {self._saver.kept()}", exit_code=exit_code_of(error)
            ) from error


def iteration_in(place: AnyPath, settings: CheckpointConfig) -> int | None:
    """Iteration of the model that an earlier start of the run wrote at ``place``; None where there is nothing.

    CheckpointError for anything else: it is never overwritten.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return None
    path, found = place / NOTE, dict[str, Any]()
    if path.is_file():
        found = read_json(path, dict[str, Any], error=CheckpointError)
        check_kinds(found, {"run": str, "iteration": Count}, where=str(path), error=CheckpointError)
    if not settings.saved_place or found.get("run") != settings.saved_place:
        raise CheckpointError(
            f"--save-hf {place} exists, and is no model that this run has written: name a new folder, nothing is "
            "overwritten"
        )
    return int(found.get("iteration") or 0)


def check_huggingface(config: RunConfig) -> list[str]:
    """What the run will read from ``--load-hf`` and write to ``--save-hf``, a line each, known without its ranks.

    Raises CheckpointError as ``describe_published``, for a model that has no Hugging Face format, and for a folder that
    can't be written or holds anything but models that the run has written before.
    """
    settings, lines = config.checkpoint, list[str]()
    if starts_from_published(settings):
        lines.append(f"checkpoint: none yet, starts from {describe_published(config)}")
        lines.append(f"proof of these weights, by logits: --load-hf-proof {settings.load_hf_proof}")
    if settings.save_hf is not None:
        _check_target(config)
        when = f"every {settings.save_hf_interval} iterations" if settings.save_hf_interval else "the last iteration"
        lines.append(f"--save-hf: {settings.save_hf} can be written, after {when}")
    return lines


def _check_target(config: RunConfig) -> None:
    settings = config.checkpoint
    place = path_of(settings.save_hf or "")
    try:
        check_writable(config.model, without_adapters(config.extra))
    except CheckpointError as error:
        raise CheckpointError(f"--save-hf {place}: {error}") from error
    resumes = settings.resumes_own and not is_unused(settings.load or "")
    there = [place]
    if settings.save_hf_interval is not None and place.is_dir():
        there = [path for path in place.iterdir() if not path.name.startswith(".")]
    for path in there:
        iteration = iteration_in(path, settings)
        if iteration is not None and not resumes:
            raise CheckpointError(
                f"--save-hf {path} holds a model of iteration {iteration}, and this run starts from iteration 0: name "
                "a new folder, nothing is overwritten"
            )
    if isinstance(place, Path) and (reason := why_not_writable(place.parent)) is not None:
        raise CheckpointError(f"--save-hf {place} cannot be written: {reason}; name another folder")
