"""Tiny whole runs inside a test: real settings, data, model, optimizer and steps, in the type of the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES, Family
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run, build_run

GPT = FAMILIES["gpt"]
TINY_RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --init-method-std 0.2 --vocab-size 50 --num-workers 0 "
    "--eval-iters 0"
)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "on", "a", "mat", "##s", "."]
"""A vocabulary of words for those who look at what a model says."""


def tiny_config(flags: str, *, ranks: int = 1, family: Family = GPT) -> RunConfig:
    """The run of a tiny command line; ``flags`` replace its own. Three steps unless they say how long."""
    length = "" if "--train-samples" in flags else "--train-iters 3"
    return parse_run(f"{TINY_RUN} {length} {flags}".split(), world_size=ranks, extra_groups=family.groups)


def axes_of(config: RunConfig) -> dict[str, Any]:
    """The layout of a run as arguments of ``run_ranks``."""
    parallel = config.parallel
    return {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "dp": config.data_parallel_size,
        "dc": parallel.num_workers,
        "copies": parallel.num_distributed_optimizer_instances,
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
        "pp_before_dp": not parallel.use_tp_pp_dp_mapping,
        "sequence_parallel": parallel.sequence_parallel,
    }


def context_of(config: RunConfig, context: ParallelContext) -> ParallelContext:
    """The context of a rank of the harness, which knows none of the settings, as a launch of the run makes it."""
    return ParallelContext.of(
        config.parallel, mesh=context.mesh, rng=context.rng, device=context.device, dtype=context.dtype
    )


def tiny_run(context: ParallelContext, flags: str, *, family: Family = GPT) -> Run:
    """A run on this rank, ready for its first step."""
    config = tiny_config(flags, ranks=context.mesh.world_size, family=family)
    return build_run(config, family.train_spec, context, started=0.0)


def saved_model(
    folder: Path, family: str, words: str | None = None, *, flags: str = "", data: str = "--mock-data"
) -> Run:
    """A tiny model of random weights, which are large, and its checkpoint in ``folder/saved``.

    It reads ``data``. It knows ``PIECES``, with ``words`` as further flags of its vocabulary, or numbers alone.
    """
    folder.mkdir(exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(PIECES) + "\n")
    known = "" if words is None else f"--tokenizer-type BertWordPieceLowerCase --vocab-file {vocabulary} {words}"
    saving = f"{data} --save {folder}/saved --save-interval 1"
    run = tiny_run(ParallelContext.single(), f"{saving} {known} {flags}", family=FAMILIES[family])
    Saver(run).save()
    return run
