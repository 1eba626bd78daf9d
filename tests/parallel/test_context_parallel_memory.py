"""What ranks that split a layer or a sequence keep for the backward pass, against the estimate of a dry run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.config import ParallelConfig
from megatron.config.run import RunConfig
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from tests.harness import run_ranks
from tests.harness.kept import bytes_kept
from tests.unit.config.command_lines import run_of
from tests.unit.planning.test_estimate import kept_activations

QUIET: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_size": 128}
LLAMA = QUIET | {
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
LATENT = {name: value for name, value in LLAMA.items() if "group" not in name} | {
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
}
WAYS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_type": ("p2p",)},
    "all_gather": {"cp_comm_type": ("all_gather",)},
    "a2a": {"cp_comm_type": ("a2a",)},
}


def kept(context: ModelContext, run: RunConfig) -> int:
    """Bytes that a forward pass over this rank's slice leaves behind for the backward pass."""
    parallel = run.parallel
    context = dataclasses.replace(
        context, cp_comm_types=parallel.cp_comm_type, sequence_parallel=parallel.sequence_parallel
    )
    model = GPTModel(run.model, context, seed=1)
    tokens = torch.zeros(
        run.training.micro_batch_size, run.data.seq_length // parallel.context_parallel_size, dtype=torch.int64
    )
    return bytes_kept(model, tokens)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [QUIET, LLAMA, LATENT], ids=["gpt2", "llama", "latent"])
def test_estimate_is_what_is_kept(model: dict[str, Any], way: str) -> None:
    """Long sequences are why somebody asks for these ranks: a wrong estimate costs a queue."""
    parallel = ParallelConfig(context_parallel_size=2, **WAYS[way])
    run = dataclasses.replace(run_of(ranks=2, length=256, model=model), parallel=parallel)
    for found in run_ranks(kept, run, cp=2):
        assert kept_activations(run) == [pytest.approx(found, rel=0.03)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", [QUIET, LLAMA, {"hidden_size": 128}], ids=["gpt2", "llama", "dropout"])
def test_tensor_parallel_ranks(model: dict[str, Any], sequence_parallel: bool) -> None:
    """With sequence parallelism a dry run counted the inputs of matmuls whole, which no rank keeps."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    run = dataclasses.replace(run_of(ranks=2, length=256, model=model), parallel=parallel)
    for found in run_ranks(kept, run, tp=2):
        assert kept_activations(run) == [pytest.approx(found, rel=0.03)]
