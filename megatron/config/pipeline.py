"""How a model's layers are divided into pipeline stages: evenly, by flags, or by a layout string. Pure arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config.flags import one_of
from megatron.config.parallel import PipelineScheduleName
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_EMBEDDING, _LAYER, _LATER, _LOSS = "E", "t", "m", "L"
_TOKEN = re.compile(r"(?:([EtmL|()])(?:(?<!\()\*(\d+))?)|(\*\d*|.)")  # a letter and its repetitions, or what is wrong
_LONGEST = 100_000  # letters of a layout
_MOST_PASSES = 500_000  # largest schedule that is computed
LAYOUT_EXAMPLE = "'Et*2|t*3|t*2L' for 7 layers in 3 stages"


@dataclass(frozen=True)
class Stage:
    """A consecutive part of a model: its layers by global number, whether it holds the ends, and on which pipeline rank
    it is.
    """

    layers: range
    is_first: bool
    is_last: bool
    rank: int = 0


def too_long_to_schedule(*, stages: int, microbatches: int) -> str | None:
    """Why a schedule is refused whose list of passes would take minutes and gigabytes to compute."""
    too_many, most = "too many to compute a schedule", math.isqrt(_MOST_PASSES)
    if stages > most:
        return f"{stages} pipeline stages are {too_many}; use at most {most}"
    if stages * microbatches > _MOST_PASSES:
        fitting = _MOST_PASSES // stages
        return (
            f"{microbatches} microbatches a step through {stages} pipeline stages are {too_many}; use at most {fitting}"
        )
    return None


def model_stages(run: RunConfig) -> list[Stage]:
    """The model cut into stages, first to last, on ranks in order, once per chunk; with ZB-V down and up."""
    ranks = run.parallel.pipeline_model_parallel_size
    down_and_up = [*range(ranks), *reversed(range(ranks))]
    on = down_and_up if run.parallel.pipeline_schedule == "zb-v" else [*range(ranks)] * chunks_per_rank(run)
    return [replace(stage, rank=rank) for stage, rank in zip(stages_of(stage_sizes(run)), on, strict=True)]


def stages_of(sizes: Sequence[int]) -> list[Stage]:
    """Stages with the given numbers of layers, in order: no layer is lost or held twice."""
    found, start = list[Stage](), 0
    for number, size in enumerate(sizes):
        found.append(Stage(range(start, start + size), number == 0, number == len(sizes) - 1))
        start += size
    return found


def schedule_name(run: RunConfig) -> PipelineScheduleName:
    """The pipeline schedule: the one asked for, else interleaved where a rank has several chunks, else 1F1B."""
    asked = run.parallel.pipeline_schedule
    return asked or ("interleaved" if chunks_per_rank(run) > 1 else "1f1b")


def num_stages(run: RunConfig) -> int:
    """Consecutive parts into which the model is cut."""
    return run.parallel.pipeline_model_parallel_size * chunks_per_rank(run)


def chunks_per_rank(run: RunConfig) -> int:
    """Stages that each pipeline rank holds.

    Raises ConfigError when the flags ask for a number that isn't whole.
    """
    parallel, layers = run.parallel, run.num_layers
    ranks, per_chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if parallel.pipeline_schedule == "zb-v":
        return 2
    if run.segments and ranks > 1:
        if len(run.segments) % ranks:
            raise ConfigError(
                f"--hybrid-layer-pattern has {len(run.segments)} stages, not divisible by "
                f"--pipeline-model-parallel-size {ranks}; write a multiple of {ranks}, separated by |"
            )
        return len(run.segments) // ranks
    if parallel.pipeline_model_parallel_layout is not None:
        stages = len(parse_layout(parallel.pipeline_model_parallel_layout))
        if stages % ranks:
            raise ConfigError(
                f"--pipeline-model-parallel-layout has {stages} stages, not divisible by "
                f"--pipeline-model-parallel-size {ranks}; give a multiple of {ranks}, separated by |"
            )
        return stages // ranks
    if per_chunk is None:
        return parallel.num_virtual_stages_per_pipeline_rank or 1
    if layers % (ranks * per_chunk):
        sizes = [size for size in range(1, layers // ranks + 1) if layers % (ranks * size) == 0]
        advice = f"use {one_of(sizes)}, or " if sizes else ""
        raise ConfigError(
            f"{run.layers_asked} is not divisible by --pipeline-model-parallel-size {ranks} x "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}; {advice}give "
            "--num-virtual-stages-per-pipeline-rank, which allows stages of different sizes"
        )
    return layers // (ranks * per_chunk)


def stage_sizes(run: RunConfig) -> list[int]:
    """Layers of each stage, first to last; together they are all layers.

    Raises ConfigError when the flags don't describe such a division.
    """
    parallel, layers, stages = run.parallel, run.num_layers, num_stages(run)
    if run.segments and stages > 1:
        if len(run.segments) != stages:
            raise ConfigError(
                f"--hybrid-layer-pattern has {len(run.segments)} stages and --pipeline-schedule zb-v two for each of "
                f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}; write {stages}"
            )
        return list(run.segments)
    if parallel.pipeline_model_parallel_layout is not None:
        layout = parse_layout(parallel.pipeline_model_parallel_layout)
        sizes, later = [stage.count(_LAYER) for stage in layout], layout[-1].count(_LATER)
        if later and later != run.model.mtp_num_layers:
            raise ConfigError(
                f"--pipeline-model-parallel-layout holds {later} layers of multi-token prediction (m) but "
                f"--mtp-num-layers is {run.model.mtp_num_layers}; write as many"
            )
        if sum(sizes) != layers:
            raise ConfigError(
                f"--pipeline-model-parallel-layout holds {sum(sizes)} layers (t) but the model has "
                f"{run.layers_asked}; write {layers}"
            )
        if len(sizes) != stages:
            raise ConfigError(
                f"--pipeline-model-parallel-layout has {len(sizes)} stages and --pipeline-schedule zb-v two for each "
                f"of --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}; write {stages}"
            )
        return sizes
    if parallel.stage_layers and len(parallel.stage_layers) == stages and sum(parallel.stage_layers) == layers:
        return list(parallel.stage_layers)
    if parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers:
        return _sizes_with_given_ends(run)
    first, last = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    if layers + first + last < stages:
        raise ConfigError(
            f"{run.layers_asked} is less than the {stages} pipeline stages, {chunks_per_rank(run)} on each of "
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}; use at least "
            f"{stages - first - last} layers or fewer stages"
        )
    sizes = balanced_sizes(layers + first + last, stages)
    sizes[0] -= first
    sizes[-1] -= last
    return sizes


def balanced_sizes(num_layers: int, num_stages: int) -> list[int]:
    """``num_layers`` over ``num_stages``: sizes differ by at most one, and the middle stages are the larger ones."""
    small, surplus = divmod(num_layers, num_stages)
    sizes = [small] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: abs(stage - (num_stages - 1) / 2))
    for stage in middle_first[:surplus]:
        sizes[stage] += 1
    return sizes


def _sizes_with_given_ends(run: RunConfig) -> list[int]:
    """The first or last rank, or both, hold what the flags say, evenly in their chunks; the others share the rest."""
    parallel, chunks = run.parallel, chunks_per_rank(run)
    ranks = parallel.pipeline_model_parallel_size
    given = {
        rank: (flag, layers)
        for rank, flag, layers in (
            (0, "--decoder-first-pipeline-num-layers", parallel.decoder_first_pipeline_num_layers),
            (ranks - 1, "--decoder-last-pipeline-num-layers", parallel.decoder_last_pipeline_num_layers),
        )
        if layers is not None
    }
    for flag, layers in given.values():
        if layers % chunks:
            below = layers // chunks * chunks
            fits = " or ".join(str(each) for each in (below, below + chunks) if each)
            raise ConfigError(f"{flag} {layers} is not divisible by the {chunks} chunks of a rank; use {fits}")
    left, others = run.num_layers - sum(layers for _, layers in given.values()), ranks - len(given)
    asked = " and ".join(f"{flag} {layers}" for flag, layers in given.values())
    if others == 0 and left:
        raise ConfigError(f"{asked} must together be {run.layers_asked}: there are no other ranks; leave one out")
    if left < others * chunks:
        raise ConfigError(
            f"{asked} out of {run.layers_asked} leave {max(left, 0)} for the other pipeline ranks, "
            f"which need at least {others * chunks}; give at most {run.num_layers - others * chunks}"
        )
    middle = iter(balanced_sizes(left, others * chunks) if others else ())
    return [
        given[stage % ranks][1] // chunks if stage % ranks in given else next(middle) for stage in range(ranks * chunks)
    ]


def parse_layout(text: str) -> list[str]:
    """Stages of a ``--pipeline-model-parallel-layout``: ``Et*2|(t|)*2tL`` is ``Ett``, ``t``, ``t``, ``tL``.

    ``E`` embedding, ``t`` layer, ``m`` layer of multi-token prediction, ``L`` final norm, output and loss, ``|``
    between stages, ``x*3`` or ``(xy)*3`` three times, ``,`` nothing. Raises ConfigError for anything else, and when an
    end or a stage is missing.
    """
    stages = _expanded(text).split("|")
    whole = "".join(stages)
    for letter, what, place, index in (
        (_EMBEDDING, "the embedding", "first", 0),
        (_LOSS, "the loss", "last", -1),
    ):
        if whole.count(letter) != 1 or whole[index] != letter:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text!r} needs {letter}, {what}, once and {place}; write it like "
                f"{LAYOUT_EXAMPLE}"
            )
    if _LATER in "|".join(stages)[: -len(_LOSS)].rstrip(_LATER):
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text!r}: m, multi-token prediction, is on the last stage, before L"
        )
    if "" in stages:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text!r}: stage {stages.index('')} is empty; give it a layer (t) or "
            "take out a |"
        )
    return stages


def _expanded(text: str) -> str:
    """Every letter and bar of a layout string, in order, without repetitions."""
    where = f"--pipeline-model-parallel-layout {text!r}"
    groups = [""]  # what each open parenthesis holds so far, the outermost first
    for letter, times, wrong in _TOKEN.findall(text.replace(" ", "")):
        if letter == "(":
            groups.append("")
        if letter == "(" or wrong == ",":
            continue
        if wrong or (letter == ")" and len(groups) == 1):
            token = wrong or letter
            if token.startswith("*"):
                raise ConfigError(f"{where}: {token} must follow E, t, m, L, | or a ) and have a number, as in t*3")
            raise ConfigError(
                f"{where} has {token!r}; it consists of E, t, m, L, |, (, ), * and numbers, like {LAYOUT_EXAMPLE}"
            )
        part = groups.pop() if letter == ")" else letter
        repeated = int(times or 1)
        if len(part) * repeated > _LONGEST:
            raise ConfigError(f"{where} repeats more layers than a model can have: *{times or 1}")
        groups[-1] += part * repeated
    if len(groups) > 1:
        raise ConfigError(f"{where} lacks a )")
    return groups[0]
