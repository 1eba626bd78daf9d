"""The settings of experts: which layers have them, how tokens choose among them, and how their load is balanced."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, architecture_flag, architecture_switch, flag, switch
from megatron.config.layer_patterns import every_or_listed

LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]

LOSS_NAMES: dict[str, str] = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names under which the balancing losses are reported, as Megatron-LM does."""
Z_LOSS = "z_loss"


class ExpertSettings(Settings):
    """The fields of ``MoEConfig``, and what follows from them alone: all that rules about experts read."""

    num_experts: int | None = architecture_flag(
        "Experts of each mixture-of-experts layer; 0: none.", default=None, at_least=0
    )
    moe_layer_freq: str = architecture_flag(
        "Layers with experts: N for every N-th of a stack, the first among them; or a list such as '[0]*3+[1]*58' with "
        "a 1 for each such layer and a 0 for a dense one, an encoder's layers before the decoder's.",
        default="1",
    )
    first_k_dense_replace: int | None = flag(
        "Layers without experts at the start of a stack (DeepSeek's name); the others have some. It sets "
        "--moe-layer-freq.",
        default=None,
        at_least=0,
        at_most=10_000,
    )
    moe_ffn_hidden_size: int = architecture_flag(
        "Inner width of an expert.", derived="--ffn-hidden-size", follows=("ffn_hidden_size",), at_least=1
    )
    moe_shared_expert_intermediate_size: int | None = architecture_flag(
        "Total inner width of the shared experts, which process every token.",
        default=None,
        at_least=1,
    )
    moe_shared_expert_gate: bool = architecture_switch(
        "Multiply the output of the shared experts by a learned number between 0 and 1 for each token (Qwen2-MoE)."
    )
    moe_router_topk: int = architecture_flag("Experts that each token is routed to (top-k).", default=2, at_least=1)
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = architecture_flag(
        "How the router's logits become weights of experts. softmax: over the chosen experts. sigmoid (DeepSeek-V3) "
        "and sqrtsoftplus: for each expert, then divided by the sum over the chosen ones.",
        default="softmax",
    )
    moe_router_pre_softmax: bool = architecture_switch(
        "Apply the softmax to all experts before the top-k choice; weights of the chosen experts are not renormalized."
    )
    moe_router_topk_scaling_factor: float | None = architecture_flag(
        "Multiply the weights of the chosen experts by this.", default=None, above=0
    )
    moe_router_num_groups: int | None = architecture_flag(
        "Group-limited routing: number of groups of experts, of which a token first chooses --moe-router-group-topk.",
        default=None,
        at_least=1,
    )
    moe_router_group_topk: int | None = architecture_flag(
        "Group-limited routing: groups that each token chooses; its experts come from these groups.",
        default=None,
        at_least=1,
    )
    moe_router_group_score: Literal["sum", "max", "top2"] = architecture_flag(
        "Score of a group. sum: sum of its best scores, --moe-router-topk / --moe-router-group-topk of them "
        "(Megatron-LM); top2: sum of its best two (DeepSeek-V3, which chooses two in each group, so that sum does the "
        "same); max: its best score (DeepSeek-V2).",
        default="sum",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = architecture_flag(
        "Precision of the router's matrix product, if wider than the model's; scores are at least fp32 in any case.",
        default=None,
    )
    moe_router_enable_expert_bias: bool = architecture_switch(
        "Loss-free balancing (arXiv:2408.15664): add a bias to each expert's score, for the top-k choice only. Each "
        "step raises the bias of experts with less than the mean load, and lowers the others."
    )
    moe_router_bias_update_rate: float = flag(
        "Step size of the biases of --moe-router-enable-expert-bias.", default=1e-3, at_least=0
    )
    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = flag(
        "Losses that balance the load of experts, each with a weight in --moe-aux-loss-coeff. aux_loss: over each "
        "microbatch; seq_aux_loss: over each sequence, a row of the batch; global_aux_loss: over the microbatches that "
        "all data-parallel replicas compute at the same time. sinkhorn: no loss, but choices by logits that are "
        "normalized over the tokens of a microbatch. All but seq_aux_loss depend on --micro-batch-size, "
        "global_aux_loss also on the number of replicas; none depends on how other ranks divide the work.",
        default=("aux_loss",),
        refused_values={
            "quantile_balancing": "it is not available; use aux_loss, or none with --moe-router-enable-expert-bias",
        },
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        "Weight of each loss of --moe-router-load-balancing-type; balanced experts have a loss of 1.",
        default=(0.0,),
        at_least=0,
    )
    moe_z_loss_coeff: float | None = flag(
        "Weight of the z-loss, the mean squared logsumexp of the router's logits (arXiv:2202.08906: 0.001).",
        default=None,
        at_least=0,
    )
    moe_expert_capacity_factor: float | None = flag(
        "Capacity of an expert in training: of each sequence it processes at most this times its balanced share of "
        "tokens, and drops the rest. Dropping is the same at every layout; Megatron-LM's capacity counts a rank's "
        "tokens. A negative factor drops nothing, as without the flag.",
        default=None,
    )
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "Which tokens an expert keeps within its capacity: those with the largest weights, or the first positions.",
        default="probs",
    )
    moe_count_padding: bool = switch(
        "Route and count padding as text, as Megatron-LM's pretraining does: rows after the text of a sample, and "
        "positions of multi-token prediction whose future token is outside of their text. Balance, capacity and expert "
        "biases then depend on how much padding there is."
    )
    moe_router_force_load_balancing: bool = switch(
        "For benchmarks: assign experts to tokens in turn, and ignore the router."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = flag(
        "How tokens reach experts on other ranks. alltoall: each token is sent to its experts only; allgather: every "
        "rank gets all tokens, which sends less if --moe-router-topk is at least the number of expert-parallel ranks.",
        default="alltoall",
        renamed_values={
            "flex": ("alltoall", "its kernels are not used; tokens travel by all-to-all"),
            "alltoall_seq": ("alltoall", "its former name"),
        },
    )
    moe_per_layer_logging: bool = switch(
        "Also write curves of each layer's router losses and balance of experts, besides those of all layers."
    )
    moe_matmul_backend: Literal["auto", "grouped_mm", "loop"] = flag(
        "Kernel of the experts' matrix products; auto takes the first that supports them. loop: one product an expert.",
        default="auto",
    )

    @property
    def has_experts(self) -> bool:
        """Whether any layer may have experts."""
        return bool(self.num_experts)

    @property
    def uses_sinkhorn(self) -> bool:
        """Whether training chooses experts by normalized logits."""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def has_shared_experts(self) -> bool:
        """Whether layers with experts have some that see every token."""
        return self.has_experts and self.moe_shared_expert_intermediate_size is not None

    @property
    def scores_of_group(self) -> int:
        """How many of a group's best scores add up to that of the group, with groups of experts."""
        by_name = {"max": 1, "top2": 2, "sum": self.moe_router_topk // (self.moe_router_group_topk or 1)}
        return by_name[self.moe_router_group_score]

    def expert_layers(self, *stacks: int) -> tuple[bool, ...]:
        """Whether each layer has experts, one stack after the other; ConfigError for a pattern that isn't one."""
        if not self.has_experts:
            return (False,) * sum(stacks)
        return every_or_listed(self.moe_layer_freq, *stacks, flag="--moe-layer-freq")

    @property
    def balancing_losses(self) -> dict[LoadBalancing, float]:
        """Losses with their weights, without those that weigh nothing."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return {kind: weight for kind, weight in pairs if kind in LOSS_NAMES and weight}
