"""Faults in state-space layers: what ranks share and pass on, documents, and states in generation."""

from __future__ import annotations

from tests.faults.fault import Fault

MIXER, SEQUENCES = "megatron/core/ssm/mamba.py", "megatron/core/ssm/sequences.py"
HEADS, CONVOLUTION = "megatron/core/ssm/heads.py", "megatron/core/ssm/short_convolution.py"
ROWS, UNIT = ("equivalence/test_state_space.py",), ("unit/ssm/test_mamba.py",)

FAULTS = (
    Fault(
        "states_passed_without_decay",
        SEQUENCES,
        old="state = run[..., :1] * state + run[..., 1:]",
        new="state = state + run[..., 1:]",
        suffers="With --mamba-cp-comm-type states a token remembers everything that other ranks hold of its text.",
        first=ROWS,
    ),
    Fault(
        "rows_of_another_run_before_the_convolution",
        SEQUENCES,
        old="whole[:, number * kept : number * kept + count] for number in own_runs(mesh)",
        new="whole[:, number * kept : number * kept + count] for number in own_runs(mesh)[::-1]",
        suffers="The convolution of a rank's early run of tokens begins with what lies before its late one.",
        first=ROWS,
    ),
    Fault(
        "document_goes_on_across_runs",
        CONVOLUTION,
        old="        previous = earlier[:, -1]\n",
        new="        previous = own[:, 0]\n",
        suffers="With states passed on, a document that begins a rank's run of tokens remembers the one before.",
        first=ROWS,
    ),
    Fault(
        "norm_of_shared_groups_is_each_rank_s",
        MIXER,
        old="average = self._average if self._sharers > 1 else None",
        new="average = None",
        suffers="With fewer groups than tensor-parallel ranks each rank normalizes its part of a group.",
        first=ROWS,
    ),
    Fault(
        "groups_go_to_the_wrong_context_ranks",
        SEQUENCES,
        old="repeat_interleave(max(1, ranks // len(groups)), dim=0).view(ranks, -1)",
        new="repeat(max(1, ranks // len(groups)), 1).view(ranks, -1)",
        suffers="Heads of context-parallel ranks read B and C of other groups.",
        first=ROWS,
    ),
    Fault(
        "first_rows_kept_for_the_convolution",
        CONVOLUTION,
        old="torch.cat((before, rows), dim=1)[:, rows.shape[1] :]",
        new="torch.cat((before, rows), dim=1)[:, : before.shape[1]]",
        suffers="Generation goes on with a convolution over the beginning of the text.",
        first=UNIT,
    ),
    Fault(
        "limits_of_the_step_ignored",
        MIXER,
        old="steps if limits is None else steps.clamp(*limits),",
        new="steps,",
        suffers="A model with limits of its time step (Nemotron-H) talks nonsense.",
        first=UNIT,
    ),
    Fault(
        "parameters_of_heads_are_narrow",
        HEADS,
        old="return torch.promote_types(context.dtype, torch.float32)",
        new="return context.dtype",
        suffers="Decays near 1 are rounded to bf16, so that states forget at another pace.",
        first=UNIT,
    ),
)
