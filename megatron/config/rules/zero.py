"""Rules about what data-parallel ranks divide among them."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.rules.sentence import rule
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


RULES: tuple[Rule, ...] = (one_strategy, kept_weights_are_gathered)

REMARKS: tuple[Rule, ...] = (
    rule(
        "--use-nccl-ub registers what stays in memory: not the whole gradients of ZeRO 2 and 3, nor the whole weights "
        "of ZeRO 3, which come and go",
        lambda run: run.parallel.use_nccl_ub and run.parallel.zero_stage > 1,
    ),
)
