"""Rules about what data-parallel ranks divide among them."""

from __future__ import annotations

from math import gcd

from megatron.config.family import Rule
from megatron.config.flags import plural_s
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import divisors, some
from megatron.config.run import RunConfig


def one_strategy(run: RunConfig) -> str | None:
    """Flags that name a strategy name the same one."""
    parallel, strategy = run.parallel, run.parallel.data_parallel_sharding_strategy
    asked = f"--data-parallel-sharding-strategy {strategy}"
    if parallel.use_torch_fsdp2 and parallel.use_megatron_fsdp:
        return "--use-torch-fsdp2 and --use-megatron-fsdp are mutually exclusive; keep one"
    if parallel.use_torch_fsdp2 and strategy not in (None, "optim_grads_params"):
        return f"--use-torch-fsdp2 divides weights over data-parallel ranks, and {asked} doesn't; leave one of them out"
    if parallel.use_distributed_optimizer and strategy == "no_shard":
        return f"--use-distributed-optimizer divides optimizer state, and {asked} doesn't; leave one of them out"
    return None


def kept_weights_are_gathered(run: RunConfig) -> str | None:
    """Weights that are kept after they were gathered are those of ZeRO 3."""
    if not run.parallel.torch_fsdp2_no_reshard_after_forward or run.parallel.zero_stage == 3:
        return None
    return (
        "--torch-fsdp2-no-reshard-after-forward keeps weights that ZeRO 3 gathers: give --use-torch-fsdp2 or "
        "--data-parallel-sharding-strategy optim_grads_params, too, or leave it out"
    )


def copies_have_something_to_divide(run: RunConfig) -> str | None:
    """Copies are of what ranks divide."""
    copies = run.parallel.num_distributed_optimizer_instances
    if copies == 1 or run.parallel.zero_stage > 0:
        return None
    return (
        f"--num-distributed-optimizer-instances {copies} is the number of copies of what data-parallel ranks divide, "
        "and they divide nothing: give --use-distributed-optimizer or --data-parallel-sharding-strategy, too, or leave "
        "it out"
    )


def copies_divide_replicas(run: RunConfig) -> str | None:
    """Each copy has equally many data-parallel ranks, and equally many with the same experts."""
    copies, ranks = run.parallel.num_distributed_optimizer_instances, run.data_parallel_size
    if copies == 1 or run.world_size % (run.model_parallel_size * run.parallel.num_workers):
        return None
    if ranks % copies:
        return (
            f"--num-distributed-optimizer-instances {copies} doesn't divide the {ranks} data-parallel "
            f"rank{plural_s(ranks)}; numbers that fit: {some(divisors(ranks), near=copies)}"
        )
    replicas, rest = divmod(
        run.world_size, run.parallel.num_workers * run.parallel.pipeline_model_parallel_size * run.expert_ranks
    )
    if rest or replicas % copies == 0:
        return None
    return (
        f"--num-distributed-optimizer-instances {copies} doesn't divide the {replicas} replica{plural_s(replicas)} of "
        f"each expert, which {run.expert_ranks} of the {run.world_size} ranks hold together; numbers that fit: "
        f"{some(divisors(gcd(replicas, ranks)), near=copies)}, or use a smaller --expert-model-parallel-size"
    )


def state_is_divided_over_copies_of_weights(run: RunConfig) -> str | None:
    """--outer-dp-sharding-strategy optim is for weights that are divided inside of copies."""
    if run.parallel.outer_dp_sharding_strategy == "no_shard" or run.parallel.zero_stage == 3:
        return None
    return (
        "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params; to divide "
        "optimizer state over all data-parallel ranks without it, leave out --outer-dp-sharding-strategy and "
        "--num-distributed-optimizer-instances"
    )


def copies_of_single_ranks(run: RunConfig) -> str | None:
    """A copy of one rank has nobody to divide with."""
    parallel = run.parallel
    copies, ranks = parallel.num_distributed_optimizer_instances, run.data_parallel_size
    if copies == 1:
        return None
    divides_state = parallel.outer_dp_sharding_strategy == "optim"
    if copies == ranks * parallel.context_parallel_size:
        kept = "weights and gradients, and divides" if divides_state else "weights, gradients and"
        return (
            f"--num-distributed-optimizer-instances {copies} makes each data-parallel rank a copy of its own, which "
            f"keeps all {kept} optimizer state; use fewer copies to divide more"
        )
    replicas = run.world_size // (parallel.num_workers * parallel.pipeline_model_parallel_size * run.expert_ranks)
    if run.expert_ranks > parallel.tensor_model_parallel_size and copies == replicas:
        return (
            f"--num-distributed-optimizer-instances {copies} is the number of replicas of each expert: a copy has one "
            f"of them, which it doesn't divide{', but for optimizer state' * divides_state}"
        )
    return None


RULES: tuple[Rule, ...] = (
    one_strategy,
    kept_weights_are_gathered,
    copies_have_something_to_divide,
    copies_divide_replicas,
    state_is_divided_over_copies_of_weights,
)

REMARKS: tuple[Rule, ...] = (
    copies_of_single_ranks,
    rule(
        "--use-nccl-ub registers what stays in memory: not the whole gradients of ZeRO 2 and 3, nor the whole weights "
        "of ZeRO 3, which come and go",
        lambda run: run.parallel.use_nccl_ub and run.parallel.zero_stage > 1,
    ),
)
