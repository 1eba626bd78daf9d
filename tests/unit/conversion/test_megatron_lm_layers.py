"""Attention's features in checkpoints of Megatron-LM, both ways: what they compute, arguments and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.arguments import arguments_of
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.t5.config import T5Config
from megatron.errors import CheckpointError
from tests.harness.sentences import check_sentence, expect_error
from tests.unit.conversion.logits import fixed_tokens, megatron_lm_logits
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors, write_torch

YARN = {"position_embedding_type": "yarn"}
# Our settings, and the saved arguments that say the same.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"window_size": (5, 0)}, {"window_size": (5, 0)}),
    "every second layer full": (
        {"window_size": (5, 0), "window_attn_skip_freq": "2"},
        {"window_size": (5, 0), "window_attn_skip_freq": 2},
    ),
    "listed layers": (
        {"window_size": (3, 0), "window_attn_skip_freq": "[1,0,0,1]"},
        {"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 0, 1]},
    ),
    "off-by-one": ({"softmax_type": "off-by-one"}, {"softmax_type": "off-by-one"}),
    "learnable sinks": ({"softmax_type": "learnable"}, {"softmax_type": "learnable"}),
    "scale": ({"softmax_scale": 0.1}, {"softmax_scale": 0.1}),
    "YaRN": (
        {**YARN, "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8, "yarn_beta_fast": 4.0},
        {**YARN, "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8, "yarn_beta_fast": 4.0},
    ),
    "YaRN with two scales, not rounded": (
        {
            **YARN,
            "rotary_scaling_factor": 8.0,
            "original_max_position_embeddings": 6,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "yarn_correction_range_round_to_int": False,
        },
        {
            **YARN,
            "yarn_rotary_scaling_factor": 8.0,
            "yarn_original_max_position_embeddings": 6,
            "yarn_mscale": 1.0,
            "yarn_mscale_all_dim": 0.5,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    "every second layer without positions": ({"no_rope_freq": "2"}, {"no_rope_freq": 2}),
    "listed layers without positions": ({"no_rope_freq": "[1,0,0,1]"}, {"no_rope_freq": [1, 0, 0, 1]}),
    "quick GEGLU": ({"activation": "quick_geglu"}, {"quick_geglu": True, "swiglu": False}),
    "quick GEGLU, clamped, offset": (
        {"activation": "quick_geglu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        {"quick_geglu": True, "swiglu": False, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    ),
    "gated output": ({"attention_output_gate": True}, {"attention_output_gate": True}),
    "L2 norms": ({"qk_l2_norm": True}, {"qk_l2_norm": True}),
}


def spelled(name: str, value: Any) -> str:
    """An argument on Megatron-LM's command line."""
    joined = ",".join(map(str, value)) if isinstance(value, tuple | list) else value
    shown = f" '[{joined}]'" if isinstance(value, list) else "" if value is True else f" {joined}"
    return f"--{name.replace('_', '-')}{shown}"


@pytest.mark.parametrize("case", CASES)
def test_arguments_both_ways(case: str, tmp_path: Path) -> None:
    """Each changes the logits, in both programs alike, and comes back with the arguments and bytes that went."""
    ours, theirs = CASES[case]
    model, usual = ModelConfig(**{**MODERN, **ours}), ModelConfig(**MODERN)
    values = random_tensors(model)
    source = write_torch(tmp_path / "theirs", {**MODERN, **theirs}, values, style="te", tp=2, pp=2)
    assert read_megatron_lm(source, true_vocab_size=101).model == model
    plain = write_torch(tmp_path / "plain", MODERN, random_tensors(usual), style="te")
    changed, unchanged = (megatron_lm_logits(root, fixed_tokens(model)) for root in (source, plain))
    assert (changed - unchanged).abs().max() > 0.01
    convert(Conversion("megatron-lm", source, "megatron", tmp_path / "ours", true_vocab_size=101), lambda line: None)
    for dist in (True, False):
        said: list[str] = []
        back = tmp_path / f"back, dist {dist}"
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", back, dist=dist), said.append)
        (note,) = (line for line in said if line.startswith("note: "))
        named = [name for name in theirs if name not in ("position_embedding_type", "swiglu")]
        if "positions" in case:
            check_sentence(f" {note}", "--no-rope-freq")
            named = []
        assert all((spelled(name, theirs[name]), f"{name} = {theirs[name]}")["YaRN" in case] in note for name in named)
        again = read_megatron_lm(back)
        assert again.model == model
        for name, value in values.items():
            expected = with_gates_behind_each_query(value, model) if "gated" in case and "_qkv" in name else value
            assert torch.equal(again.tensors[name].make(), expected), name


def with_gates_behind_each_query(rows: Tensor, model: ModelConfig) -> Tensor:
    """Our order of the rows of a key head, from Megatron-LM's: all queries, all their gates, key and value."""
    queries, found = model.num_attention_heads // model.num_query_groups, list[Tensor]()
    for group in rows.chunk(model.num_query_groups):
        heads = torch.split(group, model.kv_channels)
        found += (each for number in range(queries) for each in (heads[number], heads[queries + number]))
        found += heads[-2:]
    return torch.cat(found)


def test_patterns_without_effect(tmp_path: Path) -> None:
    """They were handed on as settings, which a run that takes them refuses."""
    for number, (theirs, window) in enumerate(
        (({"window_attn_skip_freq": 9}, (3, 0)), ({"window_attn_skip_freq": 1}, None))
    ):
        settings = {**MODERN, "window_size": (3, 0), "no_rope_freq": 9}
        saved = {**settings, **theirs}
        write_torch(tmp_path / str(number), saved, random_tensors(ModelConfig(**MODERN)), style="te")
        model = read_megatron_lm(tmp_path / str(number), true_vocab_size=101).model
        assert (model.window_size, model.window_attn_skip_freq, model.no_rope_freq) == (window, None, None)


def test_windows_of_a_bert(tmp_path: Path) -> None:
    """A window on both sides, which the family has."""
    settings = {**CLASSIC, "window_size": (2, 3)}
    model = ModelConfig(**settings)
    values = random_tensors(model, (BertConfig(),))
    write_torch(tmp_path / "x", settings, values, style="core")
    said: list[str] = []
    convert(Conversion("megatron-lm", tmp_path / "x", "megatron", tmp_path / "ours", true_vocab_size=101), said.append)
    assert read_native(tmp_path / "ours").model.window_size == (2, 3)


def test_sinks_and_scales_of_a_t5(tmp_path: Path) -> None:
    """Of both kinds of attention."""
    settings = {**CLASSIC, "softmax_type": "learnable", "softmax_scale": 1.0}
    group = T5Config(decoder_num_layers=4)
    values = random_tensors(ModelConfig(**settings), (group,))
    write_torch(tmp_path / "x", settings, values, style="core", tp=2)
    job = Conversion("megatron-lm", tmp_path / "x", "megatron", tmp_path / "ours", true_vocab_size=101)
    convert(job, lambda line: None)
    convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "back"), lambda line: None)
    again = read_megatron_lm(tmp_path / "back")
    assert all(torch.equal(again.tensors[name].make(), value) for name, value in values.items())
    name = "decoder.layers.3.cross_attention.sinks"
    assert name in values


def test_windows_that_are_none(tmp_path: Path) -> None:
    """Unlimited ones, and what is no window, no pattern of layers or none of the family."""
    values = random_tensors(ModelConfig(**CLASSIC))
    number = iter(range(100))

    def read(**arguments: Any) -> ModelConfig:
        root = tmp_path / str(next(number))
        return read_megatron_lm(write_torch(root, CLASSIC, values, style="core", **arguments)).model

    for window in ((-1, 0), [-1, -1], None, ()):
        assert read(window_size=window, window_attn_skip_freq=2).window_size is None
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"window_size": 128}, "window_size is 128"),
        ({"window_size": (4, "x")}, "window_size is (4, 'x')"),
        ({"window_size": (-1, 4)}, "window_size = (-1, 4)"),
        ({"window_size": (4, 1)}, "window_size = (4, 1)"),
        ({"window_size": (4, 0), "window_attn_skip_freq": 0}, "window_attn_skip_freq is 0"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq is [1, 0]"),
        ({"no_rope_freq": -1, "position_embedding_type": "rope"}, "no_rope_freq is -1"),
        ({"no_rope_freq": [1, 0], "position_embedding_type": "rope"}, "no_rope_freq is [1, 0]"),
        ({"softmax_type": "x"}, 'softmax_type is "x"'),
        ({"softmax_scale": "x"}, 'softmax_scale is "x"'),
    ]
    for arguments, fact in wrong:
        with expect_error(CheckpointError, fact):
            read(**arguments)


def test_yarn_that_is_none(tmp_path: Path) -> None:
    """Core's YaRN turns whole heads, in halves, and only a GPT has it; there and here a length and a factor belong to
    it.
    """
    values = random_tensors(ModelConfig(**MODERN))
    whole = {**YARN, "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8}
    wrong: list[tuple[dict[str, Any], str]] = [
        (YARN, "yarn_rotary_scaling_factor"),
        ({**whole, "rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ({**whole, "rotary_interleaved": True}, "rotary_interleaved = True"),
        ({**whole, "yarn_beta_fast": "x"}, 'yarn_beta_fast is "x"'),
        ({**whole, "position_embedding_type": "longrope"}, "'longrope'"),
    ]
    for number, (arguments, fact) in enumerate(wrong):
        write_torch(tmp_path / str(number), {**MODERN, **arguments}, values, style="core")
        with expect_error(CheckpointError, fact):
            read_megatron_lm(tmp_path / str(number))
    for more, fact in (
        ({"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ({"rotary_attention_factor": 2.0}, "--rotary-attention-factor 2.0"),
    ):
        ours = {**YARN, "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8, **more}
        with expect_error(CheckpointError, fact):
            arguments_of(portable(ModelConfig(**{**MODERN, **ours}), values), dist=True, own={}, unsupported={})
