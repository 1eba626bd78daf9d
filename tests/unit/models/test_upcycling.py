"""A dense model and the mixture of experts that is made of it have the same logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.conversion.native import write_native
from megatron.core.conversion.portable import LazyTensor, PortableModel, load_weights
from megatron.core.models.gpt import upcycling
from megatron.core.models.gpt.train_spec import TRAIN_SPEC
from megatron.core.models.gpt.upcycling import upcycled
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import CheckpointError, ConfigError
from tests.harness.sentences import check_line, expect_error
from tools.checkpoint import upcycle

CONTEXT = ModelContext.single(dtype=torch.float64)
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
    vocab_size=29,
    make_vocab_size_divisible_by=1,
    max_position_embeddings=16,
)


def dense(config: ModelConfig = CONFIG) -> PortableModel:
    model = TRAIN_SPEC.build_model(config, (), CONTEXT, seed=4)
    tensors = {
        name: LazyTensor(tuple(each.shape), each.dtype, each.detach().clone) for name, each in model.named_parameters()
    }
    return PortableModel(model=config, tensors=tensors, tokenizer=TokenizerConfig(), seq_length=16)


def logits(portable: PortableModel) -> torch.Tensor:
    model = TRAIN_SPEC.build_model(portable.model, portable.groups, CONTEXT).eval()
    load_weights(model, portable, CONTEXT.mesh)
    found: torch.Tensor = model(torch.arange(16).view(1, 16)).logits()
    return found


@pytest.mark.parametrize(("num_experts", "granularity", "topk"), [(4, 1, 2), (8, 2, 4), (6, 3, 3), (4, 4, 4)])
def test_logits_are_those_of_the_dense_model(num_experts: int, granularity: int, topk: int) -> None:
    """Training goes on where the dense model stopped; Megatron-LM's scaling of all matrices changes a SwiGLU's."""
    source = dense()
    made = upcycled(source, num_experts=num_experts, granularity=granularity, topk=topk, seed=1)
    assert (logits(made) - logits(source)).abs().max() < 1e-9


def test_numbers_that_do_not_divide() -> None:
    """Each with its flag."""
    cases = {
        ("--num-experts 7", "--moe-upcycling-granularity 2"): (7, 2, 4),
        ("--moe-router-topk 3", "--moe-upcycling-granularity 2"): (8, 2, 3),
        ("--moe-router-topk 6", "--num-experts 4"): (4, 1, 6),
    }
    for flags, (num_experts, granularity, topk) in cases.items():
        with expect_error(ConfigError, *flags):
            upcycled(dense(), num_experts=num_experts, granularity=granularity, topk=topk, seed=1)


def test_models_that_cannot_be_upcycled() -> None:
    """Biases of experts would be multiplied by a token's weights; a model that has experts is one already."""
    with_biases = dataclasses.replace(CONFIG, add_bias_linear=True)
    experts = upcycled(dense(), num_experts=4, granularity=1, topk=2, seed=1)
    for model, what in ((dense(with_biases), "biases in its feed-forward networks"), (experts, "experts")):
        with expect_error(ConfigError, what):
            upcycled(model, num_experts=4, granularity=1, topk=2, seed=1)


def test_routers_are_drawn_apart() -> None:
    """Parts of a copy share a row; copies, layers and seeds don't, and rows are as large as initial weights."""
    config = dataclasses.replace(CONFIG, hidden_size=256)
    drawn = dict[tuple[int, str], torch.Tensor]()
    for seed in (1, 2):
        made = upcycled(dense(config), num_experts=8, granularity=2, topk=2, seed=seed)
        drawn |= {(seed, name): each.make() for name, each in made.tensors.items() if name.endswith("router.weight")}
    assert len(drawn) == 2 * CONFIG.num_layers
    for weight in drawn.values():
        assert torch.equal(weight[::2], weight[1::2])
        assert weight.std().item() == pytest.approx(CONFIG.init_method_std, rel=0.1)
    rows = torch.cat([weight[::2] for weight in drawn.values()])
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_command_proves_what_it_writes(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts whose scale, 3, bf16 rounds pass; half a percent too much in fp32 doesn't, and leaves nothing behind."""
    whole = dense()
    tensors = {
        name: LazyTensor(each.shape, dtype, partial(cast_to, each.make, dtype)) for name, each in whole.tensors.items()
    }
    write_native(dataclasses.replace(whole, tensors=tensors), tmp_path / "dense", final=tmp_path / "dense")
    flags = ["--load", str(tmp_path / "dense"), "--num-experts", "6", "--moe-router-topk", "3"]
    flags += ["--moe-upcycling-granularity", "3", "--save"]
    assert upcycle.main([*flags, str(tmp_path / "experts")]) == 0
    check_line(capsys.readouterr().out, "difference")
    if dtype == torch.float32:
        monkeypatch.setattr(upcycling, "upcycled", wrong(upcycling.upcycled))
        with expect_error(CheckpointError):
            upcycle.main([*flags, str(tmp_path / "wrong")])
        assert not (tmp_path / "wrong").exists()


def cast_to(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return make().to(dtype)


def wrong(right: Callable[..., PortableModel]) -> Callable[..., PortableModel]:
    """As ``right``, with experts' second matrices half a percent too large."""

    def made(*given: Any, **named: Any) -> PortableModel:
        portable = right(*given, **named)
        second = {name: each for name, each in portable.tensors.items() if "experts.linear_fc2" in name}
        larger = {name: LazyTensor(each.shape, each.dtype, partial(scaled, each.make)) for name, each in second.items()}
        return dataclasses.replace(portable, tensors={**portable.tensors, **larger})

    return made


def scaled(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return make() * 1.005
