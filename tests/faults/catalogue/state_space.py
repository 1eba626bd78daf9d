"""Faults in the math of state-space layers."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "state_leaks_into_the_next_document",
        "megatron/core/ops/state_space/chunked.py",
        old="entering = entering.masked_fill_((own != before).unsqueeze(2), 0.0)",
        new="entering = entering.clone()",
        suffers="With packed documents Mamba layers read the end of the document before.",
        first=("unit/ops/test_state_space.py",),
    ),
    Fault(
        "gradient_of_the_last_state_lost",
        "megatron/core/ops/state_space/chunked.py",
        old="torch.zeros_like(states[:, 0]) if grad_state is None else grad_state.to(states.dtype)",
        new="torch.zeros_like(states[:, 0])",
        suffers="With states passed over context-parallel ranks a rank's tokens learn nothing from later ranks.",
        first=("unit/ops/test_state_space.py",),
    ),
    Fault(
        "convolution_of_two_documents",
        "megatron/core/ops/causal_conv.py",
        old="past if seen is None else past * seen[back - 1][:, rows]",
        new="past",
        suffers="The first tokens of a packed document see the last ones of another.",
        first=("unit/ops/test_causal_conv.py",),
    ),
    Fault(
        "norm_of_a_part_of_the_group",
        "megatron/core/ops/gated_norm.py",
        old="mean = how.averaged(_grouped(product.mul_(weight), groups).mean(-1, keepdim=True))",
        new="mean = _grouped(product.mul_(weight), groups).mean(-1, keepdim=True)",
        suffers="With fewer groups than tensor-parallel ranks the gated norm has gradients of a part of each group.",
        first=("unit/ops/test_gated_norm.py",),
    ),
    Fault(
        "initial_state_of_a_numbered_document",
        "megatron/core/ops/state_space/mamba_ssm.py",
        old="numbered(document_ids).to(torch.int32)",
        new="document_ids.to(torch.int32)",
        suffers="On a GPU with mamba-ssm a document that continues an earlier slice begins from nothing.",
        first=("unit/ops/test_state_space_backends.py",),
    ),
)
