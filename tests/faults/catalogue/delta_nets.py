"""Faults in gated delta nets and in the gate of attention."""

from __future__ import annotations

from tests.faults.fault import Fault

CHUNKED, MIXER = "megatron/core/ops/delta_rule/chunked.py", "megatron/core/ssm/gated_delta_net.py"
MATH, UNIT, ROWS = (
    ("unit/ops/test_delta_rule.py",),
    ("unit/ssm/test_gated_delta_net.py",),
    ("equivalence/test_delta_nets.py",),
)

FAULTS = (
    Fault(
        "recomputed_delta_net_forgets_documents",
        "megatron/core/ssm/mixer.py",
        old="mixed = recomputed(self._mix, projected, inputs.document_ids)",
        new="mixed = recomputed(self._mix, projected, None)",
        suffers="A recomputed layer lets documents that are packed together read each other.",
        first=UNIT,
    ),
    Fault(
        "delta_rule_masks_after_exp",
        CHUNKED,
        old="between = (total - total.mT).masked_fill(~is_earlier, -torch.inf).exp()",
        new="between = (total - total.mT).exp().masked_fill(~is_earlier, 0.0)",
        suffers="Strong decays overflow above the diagonal, and gradients of gated delta nets become NaN.",
        first=MATH,
    ),
    Fault(
        "delta_rule_state_crosses_documents",
        CHUNKED,
        old="from_state = from_state.masked_fill(of_tokens != before, 0.0)",
        new="from_state = from_state * 1.0",
        suffers="A packed document reads the state of the one before.",
        first=MATH,
    ),
    Fault(
        "delta_rule_loses_gradients_of_decays_between_chunks",
        CHUNKED,
        old="decay=(states * after).sum((-2, -1), keepdim=True),",
        new="decay=(states * 0.0).sum((-2, -1), keepdim=True),",
        suffers="Decays learn from tokens of their own chunk alone.",
        first=MATH,
    ),
    Fault(
        "delta_net_norm_gradient_of_one_rank",
        MIXER,
        old='Sharding((width,), partial_grad=("tp",))',
        new="Sharding((width,))",
        suffers="The norm that all value heads share learns from one tensor-parallel rank's heads.",
        first=ROWS,
    ),
    Fault(
        "delta_net_forgets_rows_of_the_convolution",
        "megatron/core/ssm/short_convolution.py",
        old="torch.cat((before, rows), dim=1)[:, rows.shape[1] :]",
        new="torch.cat((rows, before), dim=1)[:, rows.shape[1] :]",
        suffers="Generated tokens see other words than those before them in the convolution of gated delta nets.",
        first=UNIT,
    ),
    Fault(
        "delta_net_passes_states_without_their_maps",
        MIXER,
        old="state = torch.matmul(transition, state) + added",
        new="state = added",
        suffers="With --linear-cp-comm-type states a rank forgets all but the run of tokens before its own.",
        first=ROWS,
    ),
    Fault(
        "attention_gate_of_another_head",
        "megatron/core/transformer/attention.py",
        old="gate = fused[..., 1 : step * per_group : step, :]",
        new="gate = fused[..., per_group : step * per_group, :]",
        suffers="Heads of Qwen3-Next are gated by queries and gates of others.",
        first=("unit/models/test_published.py",),
    ),
)
