"""Every kind of scaled rotary frequencies against transformers' formulas, in fp64, on both sides of each border."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="frequencies are compared with the dev extra's transformers")

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.core.ops.rotary import Rotary
from megatron.core.ops.rotary_scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Scaling,
    Yarn,
    longrope_attention_factor,
    yarn_attention_factor,
)
from tests.harness.published import in_fp64

WIDTHS = (6, 8, 64, 128)


def check(scaling: Scaling, width: int, base: float, *, length: int, longest: int = 64, **rope: Any) -> None:
    """Frequencies and attention factor are transformers'."""
    heads: dict[str, Any] = {"hidden_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(**heads, max_position_embeddings=longest, rope_parameters={"rope_theta": base, **rope})
    with in_fp64():
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    ours = scaling.frequencies(width, base, length=length)
    torch.testing.assert_close(ours, frequencies, rtol=1e-13, atol=0)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-14)


def test_linear_and_llama3() -> None:
    """Each parameter of Llama 3's scaling matters: 8192, 1 and 4 were taken for granted."""
    for width, base in itertools.product(WIDTHS, (1e4, 5e5)):
        check(Linear(factor=4.0), width, base, length=9, rope_type="linear", factor=4.0)
        for factor, low, high, original in ((8.0, 1.0, 4.0, 8192), (32.0, 0.5, 2.0, 64), (1.5, 2.0, 16.0, 300)):
            ours = Llama3(factor=factor, low=low, high=high, original_length=original)
            theirs: dict[str, Any] = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            original_length = {"original_max_position_embeddings": original}
            check(ours, width, base, length=9, rope_type="llama3", **theirs, **original_length)


def test_yarn() -> None:
    """Borders that are rounded or not, that lie outside the head, and that are one pair."""
    borders = ((32.0, 1.0), (4.0, 4.0), (1.0, 0.1), (1e-3, 1e-4), (1e4, 1e3))
    for width, base, original in itertools.product(WIDTHS, (1e2, 1e4, 1.5e5), (16, 4096)):
        for (fast, slow), truncate in itertools.product(borders, (True, False)):
            ours = Yarn(
                attention_factor=yarn_attention_factor(8.0),
                factor=8.0,
                beta_fast=fast,
                beta_slow=slow,
                original_length=original,
                round_to_int=truncate,
            )
            theirs: dict[str, Any] = {"factor": 8.0, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            theirs["original_max_position_embeddings"] = original
            check(ours, width, base, length=9, rope_type="yarn", **theirs)


def test_attention_factors() -> None:
    """YaRN's with DeepSeek's two scales, and LongRoPE's; a context that isn't longer has none."""
    for factor, mscale, all_dim in itertools.product((1.0, 8.0, 40.0), (0.707, 1.0), (0.707, 1.0)):
        ours = yarn_attention_factor(factor, mscale=mscale, mscale_all_dim=all_dim)
        yarn = Yarn(attention_factor=ours, factor=factor, beta_fast=32.0, beta_slow=1.0, original_length=64)
        theirs: dict[str, Any] = {"factor": factor, "mscale": mscale, "mscale_all_dim": all_dim}
        check(yarn, 8, 1e4, length=9, rope_type="yarn", original_max_position_embeddings=64, **theirs)
    assert yarn_attention_factor(8.0) == pytest.approx(0.1 * math.log(8) + 1)
    assert longrope_attention_factor(1.0, 4096) == longrope_attention_factor(0.5, 4096) == 1.0


def test_dynamic_ntk_on_both_sides_of_the_original_length() -> None:
    """Shorter sequences keep the plain frequencies, longer ones stretch the base."""
    for width, length in itertools.product(WIDTHS, (1, 63, 64, 65, 1000)):
        ours = DynamicNTK(factor=4.0, original_length=64)
        check(ours, width, 1e4, length=length, rope_type="dynamic", factor=4.0)
        plain = Scaling().frequencies(width, 1e4, length=length)
        assert torch.equal(ours.frequencies(width, 1e4, length=length), plain) == (length <= 64)


def test_longrope_on_both_sides_of_the_original_length() -> None:
    """The factors of short sequences hold up to the original length itself."""
    for width, length in itertools.product(WIDTHS, (1, 63, 64, 65, 1000)):
        short, long = tuple(1 + pair / 7 for pair in range(width // 2)), tuple(3.0 + pair for pair in range(width // 2))
        factor = longrope_attention_factor(8.0, 64)
        ours = LongRope(attention_factor=factor, short_factors=short, long_factors=long, original_length=64)
        theirs = {"short_factor": [*short], "long_factor": [*long], "original_max_position_embeddings": 64}
        check(ours, width, 1e4, length=length, longest=512, rope_type="longrope", **theirs)


def test_the_table_has_the_attention_factor() -> None:
    """Queries and keys grow alike, so scores grow by its square."""
    plain = Rotary(8).table(torch.arange(5), length=5)
    grown = Rotary(8, scaling=Scaling(attention_factor=1.5)).table(torch.arange(5), length=5)
    torch.testing.assert_close(grown.cos, 1.5 * plain.cos)
    torch.testing.assert_close(grown.sin, 1.5 * plain.sin)
