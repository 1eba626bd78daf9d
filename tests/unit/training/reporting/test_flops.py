"""TFLOP/s and MFU are quoted in papers and used to buy hardware: both sides of the fraction must be right."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from megatron.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.config import T5Config
from megatron.core.models.train_spec import TrainSpec
from megatron.planning.estimate import flops_per_sample, whole_costs
from megatron.training.reporting.flops import (
    Peak,
    SpeedScale,
    data_sheet_peak,
    device_peak,
    measured_peak,
    throughput_line,
)
from tasks.fine_tuning.train_spec import ClassificationSpec, LabelledData
from tasks.settings import FINE_TUNING, AnswerShape, TaskConfig
from tests.harness.closed_forms import answer_flops, bert_flops_per_sample, gpt_flops_per_sample, t5_flops_per_sample
from tests.harness.sentences import check_sentence

CPU = torch.device("cpu")


def model(**changes: object) -> ModelConfig:
    settings: dict[str, object] = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "vocab_size": 1000,
    }
    return ModelConfig(**settings | changes)  # type: ignore[arg-type]


def test_published_size_by_hand() -> None:
    """GPT-3 175B, 2,048 tokens: the figure everybody's formula agrees on, about 6 FLOPs per parameter and token."""
    gpt3 = model(
        num_layers=96, hidden_size=12288, num_attention_heads=96, max_position_embeddings=2048, vocab_size=50257
    )
    per_token = gpt_flops_per_sample(gpt3, 2048) / 2048
    h, layers, s, v = 12288, 96, 2048, 50304
    assert per_token == pytest.approx(24 * layers * 3 * h * h * (1 + s / (12 * h)) + 6 * h * v, rel=1e-12)
    assert per_token == pytest.approx(6 * 175e9, rel=0.02)


class Attention(nn.Module):
    """Only the matrix products of an attention layer, scores over the whole square."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.groups) * self.width, bias=False)
        self.proj = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        sizes = [self.heads * self.width, self.groups * self.width, self.groups * self.width]
        q, k, v = (part.view(b, s, -1, self.width).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1))
        k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Reference(nn.Module):
    """A plain GPT's matrix products, written without the project's layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_hidden_size
        self.gated = config.gated
        self.attention = nn.ModuleList(Attention(config) for _ in range(config.num_layers))
        self.up = nn.ModuleList(nn.Linear(h, f * (2 if self.gated else 1), bias=False) for _ in self.attention)
        self.down = nn.ModuleList(nn.Linear(f, h, bias=False) for _ in self.attention)
        self.output: nn.Module = nn.Linear(h, config.padded_vocab_size(1), bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention, up, down in zip(self.attention, self.up, self.down):
            x = x + attention(x)
            inner = up(x)
            if self.gated:
                gate, value = inner.chunk(2, dim=-1)
                inner = torch.nn.functional.silu(gate) * value
            x = x + down(inner)
        return self.output(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "swiglu", "ffn_hidden_size": 176},
        {"group_query_attention": True, "num_query_groups": 2},
        {"kv_channels": 32},
        {
            "group_query_attention": True,
            "num_query_groups": 1,
            "activation": "swiglu",
            "kv_channels": 8,
            "num_layers": 1,
        },
    ],
    ids=["plain", "swiglu", "gqa", "wide heads", "all"],
)
def test_within_one_percent_of_a_counter(changes: dict[str, object]) -> None:
    """torch counts what a model multiplies: the whole attention square, of which we state the causal half."""
    config, s = model(**changes), 128
    reference = Reference(config)
    counter = FlopCounterMode(display=False)
    with counter:
        reference(torch.randn(1, s, config.hidden_size, requires_grad=True)).sum().backward()
    query_width = config.num_attention_heads * config.kv_channels
    other_half = 6 * s * s * query_width * config.num_layers
    assert gpt_flops_per_sample(config, s) + other_half == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("window", [0, 7, 126, 127, 500])
def test_windows_count_the_keys_that_queries_see(window: int) -> None:
    """A model of windows was reported at the FLOPs of full attention, and its stages cut by them."""

    def flops(**changes: object) -> float:
        data, training = DataConfig(seq_length=s), TrainingConfig(micro_batch_size=2, train_iters=1)
        run = RunConfig(model=model(**changes), data=data, training=training)
        return flops_per_sample(run, FAMILIES["gpt"].train_spec)

    s, layers, width = 128, 2, 64  # of three layers, the second has full attention
    full, less = flops(), flops(window_size=(window, 0), window_attn_skip_freq="2")
    seen = s * s / 2 if window >= s - 1 else sum(min(query + 1, window + 1) for query in range(s))
    assert full - less == pytest.approx(12 * width * (s * s / 2 - seen) * layers)


def test_frozen_weights_have_no_gradient_product() -> None:
    """TFLOP/s and MFU of a run with --freeze counted weight gradients that nobody computes."""
    config, s = model(activation="swiglu"), 128
    reference, counter = Reference(config), FlopCounterMode(display=False)
    for part in (reference.up[1], reference.down[1], reference.attention[2], reference.output):
        part.requires_grad_(False)
    with counter:
        reference(torch.randn(1, s, config.hidden_size, requires_grad=True)).sum().backward()
    patterns = ("decoder.layers.1.mlp.*", "decoder.layers.2.self_attention.*", "output_layer.weight")
    run = RunConfig(
        model=dataclasses.replace(config, untie_embeddings_and_output_weights=True),
        data=DataConfig(seq_length=s),
        training=TrainingConfig(micro_batch_size=2, train_iters=1),
    )
    other_half = 6 * s * s * config.num_attention_heads * config.kv_channels * config.num_layers
    frozen = dataclasses.replace(run, optimizer=OptimizerConfig(freeze=patterns))
    spec = FAMILIES["gpt"].train_spec
    assert flops_per_sample(frozen, spec) + other_half == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert flops_per_sample(run, spec) + other_half > 1.1 * counter.get_total_flops()


def test_answers_are_layers_for_each_choice_and_a_head_on_one_token() -> None:
    """Counted: what torch counts of the layers, with the whole square of attention."""
    config, s, choices = model(), 128, 4
    counter, layers = FlopCounterMode(display=False), Reference(config)
    layers.output = nn.Identity()
    head = nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.Linear(config.hidden_size, 3))
    with counter:
        head(layers(torch.randn(choices, s, config.hidden_size, requires_grad=True))[:, 0]).sum().backward()
    counted = answer_flops(config, s, AnswerShape(choices=choices, classes=3))
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_vocabulary_is_counted_as_padded_for_the_layout() -> None:
    config = model()
    extra = gpt_flops_per_sample(config, 128, tensor_model_parallel_size=8) - gpt_flops_per_sample(config, 128)
    assert config.padded_vocab_size(8) == config.padded_vocab_size(1) == 1024
    assert extra == 0
    wider = gpt_flops_per_sample(config, 128, tensor_model_parallel_size=16) - gpt_flops_per_sample(config, 128)
    assert wider == 6 * 64 * 1024 * 128


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA H200", torch.float32, 66.9),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312.0),
        ("NVIDIA A10", torch.bfloat16, 125.0),
        ("NVIDIA GB200", torch.bfloat16, 2500.0),
    ],
)
def test_data_sheet(name: str, dtype: torch.dtype, tflops: float) -> None:
    peak = data_sheet_peak(name, dtype)
    assert peak is not None
    assert peak.tflops == tflops
    assert name in str(peak)


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 4090", "Some Future Chip"])
def test_device_that_is_not_on_file_has_no_peak(name: str) -> None:
    """A neighbour's figure would make a wrong MFU look right."""
    assert data_sheet_peak(name, torch.bfloat16) is None


def test_peak_of_this_cpu_is_measured_and_says_so() -> None:
    peak = device_peak(CPU, torch.float32)
    assert peak is not None
    assert 1e-3 < peak.tflops < 1e3
    check_sentence(str(peak), "512x512 float32", hide=[r"^\S+"])
    assert "measured" in measured_peak(CPU, torch.bfloat16, size=64, repeats=1).source


SCALE = SpeedScale(flops_per_sample=2e12, tokens_per_sample=512, world_size=4, peak=Peak(10.0, "by hand"))


def test_throughput_from_samples_and_seconds() -> None:
    speed = SCALE.throughput(samples=32, seconds=8.0)
    assert (speed.tokens_per_second, speed.tflops_per_device, speed.utilization) == (2048.0, 2.0, 0.2)


def test_line_states_the_peak_it_refers_to() -> None:
    assert throughput_line(SCALE.throughput(samples=32, seconds=8.0), SCALE) == (
        " throughput | tokens/s: 2048.0 | model TFLOP/s per device: 2 | MFU: 20.0% of 10 TFLOP/s (by hand) |"
    )


def test_line_without_a_peak_invents_none() -> None:
    scale = SpeedScale(flops_per_sample=2e12, tokens_per_sample=512, world_size=4)
    line = throughput_line(scale.throughput(samples=32, seconds=8.0), scale)
    assert line.endswith("| MFU: unknown, no peak on file for this device |")


LLAMA = {"activation": "swiglu", "group_query_attention": True, "num_query_groups": 2, "kv_channels": 32}


def test_future_tokens_count_a_layer_a_projection_and_the_vocabulary_each() -> None:
    config = model(position_embedding_type="rope", mtp_num_layers=2)
    training = TrainingConfig(micro_batch_size=3, train_iters=1)
    run = RunConfig(model=config, data=DataConfig(seq_length=128), training=training)
    told = flops_per_sample(run, FAMILIES["gpt"].train_spec)
    assert told == pytest.approx(gpt_flops_per_sample(config, 128), rel=1e-12)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_latent_attention_counts_its_products(q_lora_rank: int | None) -> None:
    """Latents, what is computed from them, and scores and values of different widths."""
    config = model(
        activation="swiglu",
        position_embedding_type="rope",
        add_bias_linear=False,
        multi_latent_attention=True,
        q_lora_rank=q_lora_rank,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=20,
    )
    training = TrainingConfig(micro_batch_size=3, train_iters=1)
    run = RunConfig(model=config, data=DataConfig(seq_length=128), training=training)
    told = flops_per_sample(run, FAMILIES["gpt"].train_spec)
    assert told == pytest.approx(gpt_flops_per_sample(config, 128), rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("sizes", [{}, LLAMA], ids=["plain", "llama"])
def test_what_modules_say_is_the_closed_form(sizes: dict[str, object], ranks: int) -> None:
    """Of every family, at any layout: the figure that MFU is stated with."""
    layout = ParallelConfig(tensor_model_parallel_size=ranks)

    def told(train_spec: TrainSpec, *groups: object) -> float:
        run = RunConfig(
            model=model(**sizes),
            data=DataConfig(seq_length=128),
            training=TrainingConfig(micro_batch_size=3, train_iters=1),
            parallel=layout,
            extra=groups,
            world_size=ranks,
        )
        assert whole_costs(run, train_spec).uncounted == frozenset()
        return flops_per_sample(run, train_spec)

    config, padded = model(**sizes), {"tensor_model_parallel_size": ranks}
    assert told(FAMILIES["gpt"].train_spec) == pytest.approx(gpt_flops_per_sample(config, 128, **padded), rel=1e-12)
    for has_order in (True, False):
        bert = BertConfig(mask_prob=0.2, bert_binary_head=has_order)
        expected = bert_flops_per_sample(config, 128, hidden_share=0.2, binary_head=has_order, **padded)
        assert told(FAMILIES["bert"].train_spec, bert) == pytest.approx(expected, rel=1e-12)
    t5 = T5Config(decoder_num_layers=2, decoder_seq_length=48)
    expected = t5_flops_per_sample(config, 128, decoder_num_layers=2, decoder_seq_length=48, **padded)
    assert told(FAMILIES["t5"].train_spec, t5) == pytest.approx(expected, rel=1e-12)
    for task, shape in FINE_TUNING.items():
        found = told(ClassificationSpec(task, LabelledData()), TaskConfig(task=cast("Any", task)))
        assert found == pytest.approx(answer_flops(config, 128, shape), rel=1e-12)
