"""What a train spec does before the first step, with a run's weights and its passes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.base import fingerprint_of
from megatron.core.files.remote_path import path_of
from megatron.core.models.first_pass import FirstPass
from megatron.core.parallel.rng import StreamKey
from megatron.training.checkpoints.published import digest_of_files
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.run.run import Run


def before_training(run: Run) -> Sequence[str]:
    """Let the train spec do what it does before training; lines for the log. A collective."""
    settings, training = run.config.checkpoint, run.config.training

    def forward(batches: Sequence[Mapping[str, Tensor]]) -> None:
        evaluate(run, iter([[run.data.microbatch(batch, StreamKey(0)) for batch in batches]]))

    first = FirstPass(
        config=run.config,
        context=run.context,
        model=run_on_first(lambda: origin_of(run), run.context.mesh),
        save=None if settings.save is None else path_of(settings.save),
        load=None if settings.load is None else path_of(settings.load),
        on_first=lambda work: run_on_first(work, run.context.mesh),
        forward=forward,
        at_once=training.global_batch_size // run.config.batch_unit,
        state=run.spec_state,
    )
    return run.train_spec.before_training(first)


def origin_of(run: Run) -> str:
    """A digest of what the run's weights were loaded from, or of the settings that initial ones follow from."""
    published, adapter = run.config.checkpoint.load_hf, run.config.checkpoint.load_peft
    if run.loaded_from is None:
        model = (dataclasses.asdict(run.config.model), run.config.training.seed)
        return hashlib.sha256(repr(model).encode()).hexdigest()
    is_published = published is not None and run.loaded_from == published
    return digest_of_start(run.loaded_from, is_published=is_published, adapter=adapter)


def digest_of_start(place: str, *, is_published: bool, adapter: str | None = None) -> str:
    """A digest of the weights in ``place``: a published model, which may have an ``adapter``, or a checkpoint of ours.

    Raises CheckpointError where there is none.
    """
    if not is_published:
        return fingerprint_of(path_of(place))
    found = [digest_of_files(place), *([] if adapter is None else [digest_of_files(adapter)])]
    return hashlib.sha256(repr(found).encode()).hexdigest()
