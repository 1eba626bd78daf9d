"""Every attention kernel that is installed, against explicit scores in fp64, as benchmarks/gpu.py checks it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_checks import ATTENTION, attention_error, attention_inputs, refusal_of_attention
from megatron.core.device import capability
from megatron.core.ops.attention.registry import KERNELS
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_explicit_scores(name: str, case: str) -> None:
    """What stubs show of signatures and conventions, shown of the real package."""
    if reason := refusal_of_attention(name, case, GPU, torch.bfloat16):
        pytest.skip(reason)
    assert attention_error(name, case, GPU, torch.bfloat16) < 0.02


def test_requests_know_their_gpu() -> None:
    q, k, _ = attention_inputs("causal", GPU, torch.bfloat16)
    request = AttentionRequest.of(q, k, AttentionOptions(causal=True, scale=0.125))
    assert request.capability == capability(GPU)
