"""Rules about experts: sizes that divide, choices that a router can make, losses that balance."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.expert_settings import ExpertSettings
from megatron.config.family import Rule
from megatron.config.flags import subject
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.rules.sizes import divisors, divisors_near, indivisible, some
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


def settings_need_experts(run: RunConfig) -> str | None:
    """A setting of experts has no effect without them."""
    moe = run.group(ExpertSettings)
    given = changed_flags(run, type(moe))
    if moe.has_experts or not given:
        return None
    return f"{subject(given, 'has', 'have')} no effect without --num-experts; give it, too"


def expert_ranks_need_experts(run: RunConfig) -> str | None:
    """Only experts are divided over ranks of their own."""
    if run.parallel.expert_model_parallel_size == 1 or run.divides_over_expert_ranks:
        return None
    return "--expert-model-parallel-size divides experts; give --num-experts, or leave it out"


def layers_are_marked(run: RunConfig) -> str | None:
    """The pattern is one, and marks a layer."""
    moe = run.group(ExpertSettings)
    try:
        marked = moe.expert_layers(*run.stacks)
    except ConfigError as error:
        return str(error)
    if any(marked) or not moe.has_experts:
        return None
    return f"--moe-layer-freq {moe.moe_layer_freq} leaves no layer with experts; leave it and --num-experts out"


def experts_divide_over_ranks(run: RunConfig) -> str | None:
    """Each expert-parallel rank holds equally many experts."""
    experts, ranks = run.group(ExpertSettings).num_experts or 0, run.parallel.expert_model_parallel_size
    return indivisible("--num-experts", experts, "--expert-model-parallel-size", ranks)


def experts_divide_over_tensor_ranks(run: RunConfig) -> str | None:
    """Matrices of experts split evenly."""
    moe = run.group(ExpertSettings)
    if not moe.has_experts:
        return None
    return indivisible(
        "--moe-ffn-hidden-size", moe.moe_ffn_hidden_size, "--expert-tensor-parallel-size", run.parallel.etp
    )


def shared_experts_divide_over_ranks(run: RunConfig) -> str | None:
    """The shared experts split as a dense network does."""
    flag, width = (
        "--moe-shared-expert-intermediate-size",
        run.group(ExpertSettings).moe_shared_expert_intermediate_size or 0,
    )
    return indivisible(flag, width, "--tensor-model-parallel-size", run.parallel.tensor_model_parallel_size)


def expert_grid_fits(run: RunConfig) -> str | None:
    """The ranks of a stage form a grid of experts."""
    parallel, moe = run.parallel, run.group(ExpertSettings)
    inside = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    ranks, wanted = inside * run.data_parallel_size, parallel.expert_model_parallel_size * parallel.etp
    if not moe.has_experts or run.world_size % (run.model_parallel_size * parallel.num_workers):
        return None
    unless_given = "" if parallel.expert_tensor_parallel_size else " (that of --tensor-model-parallel-size)"
    asked = (
        f"--expert-model-parallel-size {parallel.expert_model_parallel_size} x --expert-tensor-parallel-size "
        f"{parallel.etp}{unless_given}"
    )
    if ranks % wanted:
        return (
            f"the {ranks} ranks of tensor, context and data parallelism are not divisible by {asked} = {wanted}; "
            f"use sizes whose product is {some(divisors(ranks), near=wanted)}"
        )
    return None


def choice_has_enough_experts(run: RunConfig) -> str | None:
    """A token chooses different experts."""
    moe = run.group(ExpertSettings)
    if not moe.has_experts or moe.moe_router_topk <= (moe.num_experts or 0):
        return None
    return f"--moe-router-topk {moe.moe_router_topk} is more than --num-experts {moe.num_experts}; choose fewer"


def groups_are_of_experts(run: RunConfig) -> str | None:
    """Groups divide the experts, and those that are kept have enough."""
    moe = run.group(ExpertSettings)
    groups, kept, experts, chosen = (
        moe.moe_router_num_groups,
        moe.moe_router_group_topk,
        moe.num_experts or 0,
        moe.moe_router_topk,
    )
    if groups is None and kept is None:
        return None
    if groups is None or kept is None:
        return "--moe-router-num-groups and --moe-router-group-topk have an effect together only; give both or neither"
    if experts % groups:
        return (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; use "
            f"{divisors_near(experts, groups)} groups"
        )
    if kept > groups:
        return f"--moe-router-group-topk {kept} is more than --moe-router-num-groups {groups}; keep at most {groups}"
    if kept * experts // groups < chosen:
        return (
            f"--moe-router-topk {chosen} is more than the {kept * experts // groups} experts in the "
            f"--moe-router-group-topk {kept} groups that a token keeps; keep more groups"
        )
    if moe.moe_router_group_score == "top2" and experts == groups:
        return (
            f"--moe-router-group-score top2 adds the best two scores of a group, and each of the {groups} groups of "
            f"--num-experts {experts} has one; use fewer groups, or --moe-router-group-score max"
        )
    if moe.moe_router_group_score == "sum" and chosen % kept:
        return (
            f"--moe-router-topk {chosen} is not divisible by --moe-router-group-topk {kept}: a group's score is the "
            f"sum of its best {chosen} / {kept} experts; use --moe-router-group-topk "
            f"{some(divisors(chosen), near=kept)}, or --moe-router-group-score max or top2"
        )
    return None


def losses_have_weights(run: RunConfig) -> str | None:
    """Each balancing loss has a weight, once."""
    moe = run.group(ExpertSettings)
    kinds, weights = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    asked = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    if "none" in kinds and (len(kinds) > 1 or any(weights)):
        return f"{asked} with {_typed(weights)} asks for a loss and for none; leave one of them out"
    if "sinkhorn" in kinds and (len(kinds) > 1 or any(weights)):
        return f"{asked} with {_typed(weights)} asks for a loss, and sinkhorn balances without one; keep one of them"
    if len({*kinds}) < len(kinds):
        return f"{asked} names a loss twice; name each once"
    if len(kinds) != len(weights):
        losses = f"{len(kinds)} loss{'es' if len(kinds) > 1 else ''}"
        return f"{asked} names {losses}, and {_typed(weights)} has {len(weights)}; give one for each"
    return None


def _typed(weights: tuple[float, ...]) -> str:
    return f"--moe-aux-loss-coeff {' '.join(f'{weight:g}' for weight in weights)}"


def sinkhorn_is_alone(run: RunConfig) -> str | None:
    """Choices by normalized logits have weights of their own, and nothing else that moves them."""
    moe = run.group(ExpertSettings)
    if not moe.uses_sinkhorn or not moe.has_experts:
        return None
    score = "sigmoid" if moe.moe_router_topk == 1 else "softmax"
    unused = {
        f"--moe-router-score-function {moe.moe_router_score_function}": moe.moe_router_score_function != score,
        "--moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias,
        "--moe-router-num-groups": moe.moe_router_num_groups is not None,
        "--moe-router-topk-scaling-factor": moe.moe_router_topk_scaling_factor is not None,
    }
    given = [flag for flag, is_given in unused.items() if is_given]
    if not given:
        return None
    weights = "its sigmoid" if moe.moe_router_topk == 1 else "a softmax over all experts"
    return (
        f"--moe-router-load-balancing-type sinkhorn with --moe-router-topk {moe.moe_router_topk} chooses among all "
        f"experts by normalized logits, and weighs a chosen one by {weights}; leave {' and '.join(given)} out"
    )


def load_is_balanced(run: RunConfig) -> str | None:
    """Something keeps tokens from choosing a few experts only."""
    moe = run.group(ExpertSettings)
    if not moe.has_experts or moe.balancing_losses or moe.moe_router_enable_expert_bias:
        return None
    if moe.moe_router_force_load_balancing or moe.uses_sinkhorn or (moe.num_experts or 0) == moe.moe_router_topk:
        return None
    kinds = " ".join(moe.moe_router_load_balancing_type)
    why = "" if kinds == "none" else f": --moe-router-load-balancing-type {kinds} has a coefficient of 0"
    return (
        f"nothing balances the load of experts{why}; --moe-aux-loss-coeff 0.01 or --moe-router-enable-expert-bias would"
    )


def _rule(sentence: str, when: Callable[[ExpertSettings], object]) -> Rule:
    """A ``rule`` about the settings of experts alone."""
    return rule(sentence, lambda run: when(run.group(ExpertSettings)))


RULES: tuple[Rule, ...] = (
    expert_ranks_need_experts,
    settings_need_experts,
    layers_are_marked,
    experts_divide_over_ranks,
    experts_divide_over_tensor_ranks,
    shared_experts_divide_over_ranks,
    expert_grid_fits,
    choice_has_enough_experts,
    groups_are_of_experts,
    losses_have_weights,
    sinkhorn_is_alone,
    rule(
        "--first-k-dense-replace leaves none of {run.layers_asked} with experts; give less, or leave "
        "it and --num-experts out",
        lambda run: (run.group(ExpertSettings).first_k_dense_replace or 0) >= max(run.stacks),
    ),
    _rule(
        "--first-k-dense-replace and --moe-layer-freq are mutually exclusive; keep one",
        lambda moe: moe.first_k_dense_replace is not None and moe.moe_layer_freq != "1",
    ),
    _rule(
        "--moe-expert-capacity-factor 0 would drop every choice; give more than 0, or leave it out",
        lambda moe: moe.moe_expert_capacity_factor == 0,
    ),
    _rule(
        "--moe-router-topk 1 needs --moe-router-pre-softmax or --moe-router-score-function sigmoid: a softmax over one "
        "expert is always 1, and the router would not learn",
        lambda moe: (
            moe.has_experts
            and moe.moe_router_topk == 1
            and moe.moe_router_score_function == "softmax"
            and not moe.moe_router_pre_softmax
        ),
    ),
    _rule(
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or sqrtsoftplus, as a bias moves "
        "scores that do not depend on each other; choose one of them",
        lambda moe: moe.moe_router_enable_expert_bias and moe.moe_router_score_function == "softmax",
    ),
    _rule(
        "--moe-shared-expert-gate has no effect without --moe-shared-expert-intermediate-size; give both",
        lambda moe: moe.moe_shared_expert_gate and moe.moe_shared_expert_intermediate_size is None,
    ),
    _rule(
        "--moe-router-group-score has no effect without --moe-router-num-groups; leave it out",
        lambda moe: moe.moe_router_group_score != "sum" and moe.moe_router_num_groups is None,
    ),
    _rule(
        "--moe-token-drop-policy position has no effect without --moe-expert-capacity-factor; give both",
        lambda moe: moe.moe_token_drop_policy == "position" and moe.moe_expert_capacity_factor is None,
    ),
)

REMARKS: tuple[Rule, ...] = (
    load_is_balanced,
    _rule(
        "--moe-expert-capacity-factor: capacity is that of a sequence, so "
        "every layout drops the same choices; Megatron-LM's is that of a rank's tokens",
        lambda moe: moe.moe_expert_capacity_factor is not None,
    ),
    _rule(
        "--moe-router-load-balancing-type sinkhorn: logits are normalized over the tokens of a microbatch, so every "
        "layout chooses the same experts; Megatron-LM normalizes those of a rank's tokens",
        lambda moe: moe.has_experts and moe.uses_sinkhorn,
    ),
    rule(
        "--moe-count-padding: no effect on samples without padding, which --packing best-fit, --data-order megatron, "
        "--fim-rate, --full-validation and --mtp-num-layers may have",
        lambda run: (
            run.group(ExpertSettings).moe_count_padding
            and run.group(ExpertSettings).has_experts
            and not (run.data.may_pad or run.family.pads_samples)
            and not run.model.mtp_num_layers
        ),
    ),
    _rule(
        "--moe-router-force-load-balancing is for benchmarks: choices of the routers are ignored",
        lambda moe: moe.moe_router_force_load_balancing,
    ),
    _rule(
        "--moe-router-pre-softmax: no effect with another --moe-router-score-function than softmax",
        lambda moe: moe.moe_router_pre_softmax and moe.moe_router_score_function != "softmax",
    ),
    rule(
        "--moe-router-bias-update-rate: no effect without --moe-router-enable-expert-bias",
        lambda run: (
            run.given("moe_router_bias_update_rate") and not run.group(ExpertSettings).moe_router_enable_expert_bias
        ),
    ),
    rule(
        "--moe-per-layer-logging: no effect without --tensorboard-dir, --wandb-project or --mlflow-experiment",
        lambda run: run.group(ExpertSettings).moe_per_layer_logging and not run.reporting.writes_curves,
    ),
)
