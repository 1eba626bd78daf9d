"""Rules about outer steps between workers."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.flags import plural_s
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import multiples_near
from megatron.config.run import RunConfig


def last_steps_are_shared(run: RunConfig) -> str | None:
    """What workers learn after the last outer step stays with them."""
    diloco = run.diloco
    if run.parallel.num_workers == 1 or diloco.diloco_fragments > 1 or run.training.skip_train:
        return None
    if run.training.train_iters is None and run.training.train_samples is None:
        return None
    rest = (run.train_iters - diloco.diloco_overlap_steps) % diloco.diloco_sync_interval
    if not rest:
        return None
    return (
        f"the run ends {rest} step{plural_s(rest)} after an outer step: the model that it ends with is that of the "
        "first worker alone; choose iterations that are a multiple of --diloco-sync-interval "
        f"{diloco.diloco_sync_interval}"
        + (f" and {diloco.diloco_overlap_steps} more" if diloco.diloco_overlap_steps else "")
    )


def workers_are_whole(run: RunConfig) -> str | None:
    """The launched ranks are whole workers of --diloco-ranks-per-worker, and each is whole copies of the model."""
    sizes, started = run.parallel, run.world_size
    ranks, copy = sizes.diloco_ranks_per_worker, run.model_parallel_size
    if ranks is None:
        return None
    if ranks % copy:
        return (
            f"--diloco-ranks-per-worker {ranks} is not divisible by the {copy} ranks that hold one copy of the model; "
            f"use {multiples_near(ranks, copy)}"
        )
    if started % ranks:
        were = "1 rank was started, which is" if started == 1 else f"{started} ranks were started, which are"
        return f"{were} not divisible by --diloco-ranks-per-worker {ranks}; start {multiples_near(started, ranks)}"
    if sizes.diloco_workers != started // ranks:
        return (
            f"--diloco-workers {sizes.diloco_workers} and --diloco-ranks-per-worker {ranks} need "
            f"{(sizes.diloco_workers or 1) * ranks} ranks, and {started} were started; leave --diloco-workers out"
        )
    return None


REMARKS: tuple[Rule, ...] = (
    last_steps_are_shared,
    rule(
        "--diloco-workers without --use-distributed-optimizer: each of the {run.data_parallel_size} data-parallel "
        "ranks of a worker sends the whole model to its counterparts; with it each sends its shard",
        lambda run: run.parallel.num_workers > 1 and run.data_parallel_size > 1 and run.parallel.zero_stage == 0,
    ),
)

RULES: tuple[Rule, ...] = (
    workers_are_whole,
    rule(
        "--diloco-workers {run.parallel.diloco_workers} with --fp16: each worker would have a loss scale of its own "
        "and skip other steps; use --bf16",
        lambda run: run.precision.fp16 and run.parallel.diloco_workers is not None,
    ),
    rule(
        "--diloco-fragments {run.diloco.diloco_fragments} is more than the {run.num_layers} layers; use at most "
        "{run.num_layers}",
        lambda run: run.diloco.diloco_fragments > run.num_layers,
    ),
    rule(
        "--diloco-fragments {run.diloco.diloco_fragments} is more than --diloco-sync-interval "
        "{run.diloco.diloco_sync_interval}, in which each fragment is sent once; use at most "
        "{run.diloco.diloco_sync_interval}",
        lambda run: run.diloco.diloco_fragments > run.diloco.diloco_sync_interval,
    ),
    rule(
        "--diloco-overlap-steps {run.diloco.diloco_overlap_steps} is not less than --diloco-sync-interval "
        "{run.diloco.diloco_sync_interval}: a fragment would be sent again before its outer step is applied; use fewer",
        lambda run: run.diloco.diloco_overlap_steps >= run.diloco.diloco_sync_interval,
    ),
)
