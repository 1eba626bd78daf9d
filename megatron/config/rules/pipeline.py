"""Rules about pipeline stages: which division of layers, which schedule."""

from __future__ import annotations

from megatron.config.flags import flag_of, subject
from megatron.config.pipeline import chunks_per_rank, num_stages, stage_sizes, too_long_to_schedule
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def layers_fall_into_stages(run: RunConfig) -> str | None:
    """Every layer is in a stage, and every stage has a layer."""
    others = (
        *(stages_need_ranks, virtual_stages_are_given_once, layout_stands_alone, ends_stand_alone),
        borders_stand_alone,
    )
    if any(rule(run) for rule in others):
        return None
    try:
        stage_sizes(run)
    except ConfigError as error:
        return str(error)
    return None


def stages_need_ranks(run: RunConfig) -> str | None:
    """Flags that describe a pipeline need at least two pipeline ranks."""
    named = _named(run, *_VIRTUAL, *_ENDS, "pipeline_schedule", "pipeline_model_parallel_layout")
    named += ["| in --hybrid-layer-pattern"] if len(run.segments) > 1 else []
    if run.parallel.pipeline_model_parallel_size > 1 or not named:
        return None
    return (
        f"{subject(named, 'describes', 'describe')} a pipeline, but --pipeline-model-parallel-size is 1; give at least "
        f"2, or leave {'it' if len(named) == 1 else 'them'} out"
    )


def virtual_stages_are_given_once(run: RunConfig) -> str | None:
    """Virtual stages are given by layers per chunk or by chunks per rank."""
    named = _named(run, *_VIRTUAL)
    return f"{' and '.join(named)} both set the number of virtual stages; keep one" if len(named) > 1 else None


def layout_stands_alone(run: RunConfig) -> str | None:
    """A layout string replaces the other flags that divide layers."""
    named = _named(run, *_VIRTUAL, *_ENDS, *_ACCOUNTS)
    if run.parallel.pipeline_model_parallel_layout is None or not named:
        return None
    return f"--pipeline-model-parallel-layout already places every layer; leave {' and '.join(named)} out"


def borders_stand_alone(run: RunConfig) -> str | None:
    """Stage borders in the pattern of a hybrid replace the other flags that divide layers."""
    named = _named(run, *_VIRTUAL, *_ENDS, *_ACCOUNTS, "pipeline_model_parallel_layout")
    if not run.segments or not named:
        return None
    return f"| in --hybrid-layer-pattern already places every layer; leave {' and '.join(named)} out"


def ends_stand_alone(run: RunConfig) -> str | None:
    """Given layers of the first or last rank exclude the accounting flags, and ZB-V, which has both on one rank."""
    ends, accounts = _named(run, *_ENDS), _named(run, *_ACCOUNTS)
    if ends and accounts:
        return f"{' and '.join(ends)} cannot be combined with {' and '.join(accounts)}; keep one way of dividing layers"
    if ends and run.parallel.pipeline_schedule == "zb-v":
        return (
            f"{' and '.join(ends)} cannot be combined with --pipeline-schedule zb-v, whose first rank holds the first "
            "and the last stage; use --pipeline-model-parallel-layout"
        )
    return None


def schedule_suits_the_chunks(run: RunConfig) -> str | None:
    """Interleaving needs several chunks on a rank; ZB-V has two; the others have one."""
    schedule = run.parallel.pipeline_schedule
    if schedule is None or run.parallel.pipeline_model_parallel_size == 1 or virtual_stages_are_given_once(run):
        return None
    virtual = _named(run, *_VIRTUAL)
    if schedule == "zb-v":
        if not virtual or run.parallel.num_virtual_stages_per_pipeline_rank == 2:
            return None
        return f"--pipeline-schedule zb-v always has two stages on a rank; leave {virtual[0]} out"
    try:
        chunks = chunks_per_rank(run)
    except ConfigError:
        return None
    if schedule == "interleaved" and chunks == 1:
        return (
            "--pipeline-schedule interleaved needs more stages than ranks; give --num-virtual-stages-per-pipeline-rank "
            "2 or more"
        )
    if schedule != "interleaved" and chunks > 1:
        where = "--hybrid-layer-pattern" if run.segments else "--pipeline-model-parallel-layout"
        return (
            f"--pipeline-schedule {schedule} has one stage on a rank, and the flags ask for {chunks}; use interleaved, "
            f"or {f'leave {virtual[0]} out' if virtual else f'give {where} fewer stages'}"
        )
    return None


def schedule_can_be_listed(run: RunConfig) -> str | None:
    """The list of passes of a step has a bounded length."""
    if run.parallel.pipeline_model_parallel_size == 1 or layers_fall_into_stages(run):
        return None
    microbatches = run.training.global_batch_size // run.batch_unit
    return too_long_to_schedule(stages=num_stages(run), microbatches=max(microbatches, 1))


def _named(run: RunConfig, *fields: str) -> list[str]:
    """Flags of those fields that are set."""
    return [flag_of(field) for field in fields if getattr(run.parallel, field)]


RULES = (
    layers_fall_into_stages,
    stages_need_ranks,
    virtual_stages_are_given_once,
    layout_stands_alone,
    borders_stand_alone,
    ends_stand_alone,
    schedule_suits_the_chunks,
    schedule_can_be_listed,
)
