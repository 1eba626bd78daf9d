"""Rules about how ranks divide the work."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import divide, divisors, indivisible, multiples_near, some, tensor_parallel_sizes
from megatron.config.run import RunConfig


def world_divides(run: RunConfig) -> str | None:
    """The number of ranks is a multiple of the model-parallel size, for each worker."""
    sizes, unit = run.parallel, run.model_parallel_size * run.parallel.num_workers
    if run.world_size % unit == 0 or sizes.diloco_ranks_per_worker is not None:  # which has a rule of its own
        return None
    axes = {
        "--tensor-model-parallel-size": sizes.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": sizes.pipeline_model_parallel_size,
        "--context-parallel-size": sizes.context_parallel_size,
        "--diloco-workers": sizes.num_workers,
    }
    asked = {flag: size for flag, size in axes.items() if size > 1}
    product = " x ".join(f"{flag} {size}" for flag, size in asked.items())
    total = f" = {unit}" if len(asked) > 1 else ""
    fits = some(divisors(run.world_size), near=unit)
    ranks = "1 rank is" if run.world_size == 1 else f"{run.world_size} ranks are"
    return (
        f"{ranks} not divisible by {product}{total}; start a multiple of {unit} "
        f"ranks, or use {'sizes whose product is' if total else 'a size of'} {fits}"
    )


def heads_divide_over_ranks(run: RunConfig) -> str | None:
    """Each tensor-parallel rank holds whole query heads."""
    return _splits(run, "--num-attention-heads", run.model.num_attention_heads)


def query_groups_divide_over_ranks(run: RunConfig) -> str | None:
    """Each tensor-parallel rank holds whole key/value heads, or each such head is shared by equally many ranks."""
    groups, ranks = run.model.num_query_groups, run.parallel.tensor_model_parallel_size
    if groups == run.model.num_attention_heads or divide(groups, ranks):
        return None
    return (
        f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {ranks}; "
        f"sizes that fit: {some(tensor_parallel_sizes(run), near=ranks)}"
    )


def ffn_divides_over_ranks(run: RunConfig) -> str | None:
    """The MLP splits evenly."""
    return _splits(run, "--ffn-hidden-size", run.model.ffn_hidden_size)


def projection_divides_over_ranks(run: RunConfig) -> str | None:
    """The projection of multi-token prediction reads hidden states and embeddings side by side."""
    return _splits(run, "twice --hidden-size", 2 * run.model.hidden_size) if run.model.mtp_num_layers else None


def _splits(run: RunConfig, flag: str, size: int) -> str | None:
    ranks = run.parallel.tensor_model_parallel_size
    fits = tensor_parallel_sizes(run) if size % ranks else ()
    return indivisible(flag, size, "--tensor-model-parallel-size", ranks, fits=fits)


def sequence_divides_over_tensor_ranks(run: RunConfig) -> str | None:
    """With sequence parallelism, each tensor-parallel rank holds an equal part of the sequence."""
    ranks, length = run.parallel.tensor_model_parallel_size, run.data.seq_length
    if not run.parallel.sequence_parallel or run.parallel.context_parallel_size > 1 or length % ranks == 0:
        return None
    return (
        f"--seq-length {length} is not divisible by --tensor-model-parallel-size {ranks}, as --sequence-parallel "
        f"needs; use a length of {multiples_near(length, ranks)}"
    )


def param_gather_overlap_needs_sharding(run: RunConfig) -> str | None:
    """--overlap-param-gather needs a sharded optimizer and overlapped gradient reduction."""
    parallel = run.parallel
    needed = {
        "--use-distributed-optimizer": parallel.zero_stage > 0,
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
    }
    lacking = [flag for flag, given in needed.items() if not given]
    if not parallel.overlap_param_gather or not lacking:
        return None
    return f"--overlap-param-gather needs {' and '.join(lacking)}, too"


def expert_ranks_need_a_family_with_experts(run: RunConfig) -> str | None:
    """Ranks divide experts of a family that may have some, whose own rule says how to ask for them."""
    if run.parallel.expert_model_parallel_size == 1 or any(part.may_divide_over_expert_ranks for part in run.parts):
        return None
    return f"--expert-model-parallel-size divides experts; a {run.family.title} has none; leave it out"


RULES: tuple[Rule, ...] = (
    expert_ranks_need_a_family_with_experts,
    world_divides,
    heads_divide_over_ranks,
    query_groups_divide_over_ranks,
    ffn_divides_over_ranks,
    projection_divides_over_ranks,
    sequence_divides_over_tensor_ranks,
    param_gather_overlap_needs_sharding,
    rule(
        "--world-size {run.command.world_size} is for --dry-run; a run has as many ranks as "
        "torchrun --nproc_per_node=N starts",
        lambda run: run.command.world_size is not None and not run.command.dry_run,
    ),
    rule(
        "--launch-file {run.command.launch_file} is for --dry-run, which compares it with the settings; leave it out",
        lambda run: run.command.launch_file is not None and not run.command.dry_run,
    ),
    rule(
        "--device-memory-gb is for --dry-run, which estimates whether the run fits; leave it out",
        lambda run: run.command.device_memory_gb is not None and not run.command.dry_run,
    ),
    rule(
        "--no-check-files is for --dry-run; a run reads its files: leave it out",
        lambda run: not run.command.check_files and not run.command.dry_run,
    ),
)
