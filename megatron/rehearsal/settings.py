"""The settings of a rehearsal: those of the run, with mock data and without files."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.ops.attention.registry import KERNELS
from megatron.planning.estimate import stage_costs
from megatron.planning.schedule import schedule_facts
from megatron.planning.shrinking import without_files
from megatron.planning.stages import with_stages


def rehearsed(run: RunConfig, train_spec: TrainSpec, *, vocab_size: int, steps: int, full: bool = False) -> RunConfig:
    """The run for ``steps`` steps, and one evaluation if it evaluates, with as few microbatches as need the memory of
    all; with ``full`` as many as the run's.
    """
    plain = without_files(run, vocab_size=vocab_size, steps=steps)
    # Without warm-up and decay, which may be longer than the rehearsal.
    rate: dict[str, Any] = {
        each.name: each.default
        for each in dataclasses.fields(run.optimizer)
        if each.name.startswith(("lr_decay", "lr_wsd", "lr_warmup"))
    }
    rate["lr_decay_style"] = "constant"
    plain = dataclasses.replace(
        plain,
        model=dataclasses.replace(
            run.model,
            vocab_size=vocab_size,
            attention_backend="auto" if run.model.attention_backend in KERNELS else run.model.attention_backend,
        ),
        precision=run.precision,
        optimizer=dataclasses.replace(run.optimizer, **rate),
        training=dataclasses.replace(plain.training, eval_iters=min(run.training.eval_iters, 1)),
    )
    plain = with_stages(plain, train_spec)
    return plain if full else _with_microbatches(plain, _fewest_microbatches(plain, train_spec))


def left_out(run: RunConfig) -> list[str]:
    """A sentence for each setting that a rehearsal can't follow."""
    backend = run.model.attention_backend
    return [
        *(["--compile was left out: shapes are the same without it"] if run.training.compile else []),
        *([f"--attention-backend {backend} was taken as auto: only torch's kernels run here"] * (backend in KERNELS)),
    ]


def _with_microbatches(run: RunConfig, number: int) -> RunConfig:
    batch = number * run.batch_unit
    return dataclasses.replace(run, training=dataclasses.replace(run.training, global_batch_size=batch))


def _fewest_microbatches(run: RunConfig, train_spec: TrainSpec) -> int:
    """The fewest with which every stage keeps as much at its peak as with all; two, where there are two."""
    every, stages = run.num_microbatches(0), run.parallel.pipeline_model_parallel_size
    kept = [costs.kept for costs in stage_costs(run, train_spec)]
    peaks = schedule_facts(run, kept).peaks
    for number in range(max(stages, 2), every, stages):
        if schedule_facts(_with_microbatches(run, number), kept).peaks == peaks:
            return number
    return every
