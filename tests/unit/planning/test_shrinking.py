"""A shrunken run keeps its layout, passes every rule, and is small."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.parse import parse_run
from megatron.config.pipeline import num_stages
from megatron.config.rules import failures
from megatron.config.run import RunConfig
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.t5.config import GROUPS as T5_GROUPS
from megatron.core.models.t5.config import T5Config
from megatron.planning.shrinking import SMALL_VOCABULARY, on_one_rank, shrunk, without_files

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted([*FOLDER.glob("gpt3/*.flags"), *FOLDER.glob("llama/*.flags")])
FILES = ["--tokenizer-model", "x", "--vocab-file", "x", "--merge-file", "x"]  # named, not read
OWN = ""
OTHERS = (
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
    "--context-parallel-size 4 --cp-comm-type a2a",
    "--tensor-model-parallel-size 4 --context-parallel-size 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
)
LAYOUTS = [
    pytest.param(example, layout, id=f"{example.stem} {layout}")
    for example in EXAMPLES
    for layout in (OWN, *OTHERS)
    if layout == OWN or "--pipeline" not in example.read_text()
]


def small(argv: str, *, ranks: int) -> tuple[RunConfig, RunConfig]:
    """The run of the flags, and what it shrinks to."""
    batch = ["--micro-batch-size", "4", "--global-batch-size", "8192"]
    run = parse_run(
        [*argv.split(), *batch, "--mock-data", "--dry-run", *FILES], world_size=ranks, extra_groups=GPT_GROUPS
    )
    return run, shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))


@pytest.mark.parametrize(("example", "layout"), LAYOUTS)
def test_layout_and_kinds_of_layers_stay(example: Path, layout: str) -> None:
    """Parity of another layout, or of other layers, would prove nothing about the user's run."""
    run, little = small(f"@{example} {layout}", ranks=1024)
    assert failures(little) == []
    assert little.model_parallel_size == run.model_parallel_size
    assert num_stages(little) == num_stages(run)
    assert little.data_parallel_size == min(run.data_parallel_size, 2)
    for same in ("normalization", "activation", "position_embedding_type", "untie_embeddings_and_output_weights"):
        assert getattr(little.model, same) == getattr(run.model, same)
    assert (little.model.num_query_groups < little.model.num_attention_heads) == (
        run.model.num_query_groups < run.model.num_attention_heads
    )
    assert little.parallel.use_distributed_optimizer == run.parallel.use_distributed_optimizer


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 8", "--context-parallel-size 4"])
def test_both_stacks_of_a_t5_shrink(layout: str) -> None:
    """A decoder left as long as it was would not fit the positions, and one without layers is none."""
    flags = f"@{EXAMPLES[0].parents[1]}/t5/t5_220m_distributed.flags {layout}"
    argv = [*flags.split(), "--mock-data", "--dry-run", *FILES]
    run = parse_run(argv, world_size=8, extra_groups=(T5Config,))
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert failures(little) == []
    assert num_stages(little) == num_stages(run) and little.num_layers <= num_stages(run) + 1
    assert min(little.model.num_layers, little.group(T5Config).decoder_num_layers) > 0


@pytest.mark.parametrize(("encoder", "decoder"), [(10, 1), (1, 10), (2, 8)])
def test_no_stack_of_a_t5_with_experts_grows(encoder: int, decoder: int) -> None:
    """A parity check of a long encoder and a decoder of one layer ended in an error about --moe-layer-freq, as the
    decoder became longer than the pattern of its layers.
    """
    flags = (
        f"--num-layers {encoder} --decoder-num-layers {decoder} --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 32 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
        "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 200 --num-experts 4 --moe-layer-freq 2 --mock-data "
        "--dry-run --pipeline-model-parallel-size 4"
    )
    run = parse_run(flags.split(), world_size=4, extra_groups=T5_GROUPS)
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert failures(little) == []
    assert sum(little.stacks) == num_stages(run) + 1
    assert all(few <= many for few, many in zip(little.stacks, run.stacks, strict=True))


def test_it_is_small() -> None:
    """A user's laptop has to hold every rank of it."""
    _, little = small("@examples/llama/llama3_8b.flags --pipeline-model-parallel-size 4", ranks=1024)
    assert little.world_size == 16
    assert little.model.hidden_size <= 64 and little.data.seq_length <= 32 and little.model.num_layers <= 8
    assert little.training.global_batch_size <= 32


def test_heads_divide_over_more_ranks_than_groups() -> None:
    """One group of keys for all queries leaves two heads, which eight ranks could not divide."""
    flags = "@examples/llama/llama3_8b.flags --num-query-groups 1 --tensor-model-parallel-size 8"
    run, little = small(flags, ranks=8)
    assert failures(run) == failures(little) == []
    assert little.model.num_attention_heads == 8 and little.model.num_query_groups == 1


def test_words_stay_narrow() -> None:
    """At a small hidden size that the words' width happens to be, the small model had no projections to compare."""
    _, little = small("@examples/llama/llama3_8b.flags --word-embedding-size 32", ranks=8)
    assert little.model.hidden_size == 32 and little.model.word_width == 16
    assert failures(little) == []


def test_given_stages_keep_their_layers() -> None:
    """A layout string says how many layers there are."""
    flags = "@examples/llama/llama3_8b.flags --num-layers 7 --pipeline-model-parallel-size 3"
    _, little = small(f"{flags} --pipeline-model-parallel-layout Et*2|t*3|t*2L", ranks=6)
    assert little.model.num_layers == 7


def test_one_rank_has_the_same_model_and_batches() -> None:
    """The comparison would be with something else."""
    _, little = small("@examples/llama/llama3_8b.flags --pipeline-model-parallel-size 2", ranks=8)
    alone = on_one_rank(little)
    assert failures(alone) == []
    assert alone.world_size == 1 and alone.model == little.model and alone.data == little.data
    assert alone.training.global_batch_size == little.training.global_batch_size
    assert alone.training.recompute_granularity is None


def test_nothing_is_left_behind() -> None:
    """A proof would write its settings and its losses among the curves of the run itself."""
    flags = "--profile --tensorboard-dir a --wandb-project b --save c --save-interval 1 --load c"
    _, little = small(f"@examples/llama/llama3_8b.flags {flags}", ranks=8)
    assert (little.reporting.tensorboard_dir, little.reporting.wandb_project) == (None, None)
    assert not little.profiling.profile
    assert (little.checkpoint.save, little.checkpoint.load) == (None, None)
