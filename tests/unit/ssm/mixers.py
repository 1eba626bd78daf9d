"""What tests of layers with a state share: sizes, inputs, and checks of documents, generation and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.costs import Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.transformer.inputs import LayerInputs
from tests.harness.kept import bytes_kept

VOCABULARY = 40
LIMITS = RunnerLimits(num_blocks=40, block_size=4, max_requests=3, max_length=64, vocabulary=VOCABULARY)


def settings(layers: int = 1, hidden: int = 32, *, attention_output_gate: bool = False) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        position_embedding_type="none",
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_output_gate=attention_output_gate,
        max_position_embeddings=64,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
    )


def inputs(document_ids: Tensor | None = None) -> LayerInputs:
    return LayerInputs(StreamKey(0), SideLosses(), document_ids=document_ids)


def assert_packed_documents_are_those_apart(mixer: nn.Module) -> None:
    """Neither state nor convolution of one document reaches into the next that is packed behind it."""
    x = torch.randn(18, 1, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[0] * 7 + [1] * 2 + [2] * 9])
    apart = torch.cat([mixer(part, inputs()) for part in (x[:7], x[7:9], x[9:])])
    assert torch.allclose(mixer(x, inputs(ids)), apart, rtol=0, atol=1e-12)


def assert_bf16_is_near_fp32(mixer: Callable[[torch.dtype], nn.Module], bound: float) -> None:
    """The result of a layer in bf16 has its type, and differs from that in fp32 by ``bound`` at most."""
    x = torch.randn(40, 1, 32, generator=torch.Generator().manual_seed(1))
    exact, found = mixer(torch.float32)(x, inputs()), mixer(torch.bfloat16)(x.bfloat16(), inputs())
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < bound * exact.norm()


def whole_text(of: GPTModel, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation by forward passes over the whole text."""
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(of(torch.tensor([ids])).logits()[0, -1].argmax()))
    return ids[len(prompt) :]


# Shorter than the convolution, around borders of chunks of 5, and longer.
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 2, 3, 4, 5, 6, 9, 10, 11, 23)
]


def assert_cached_texts_are_whole_ones(of: GPTModel, tokens: int = 12) -> None:
    """Prompts in parts beside each other, and one token after the other, go on as whole forward passes say."""
    of = of.eval().requires_grad_(False)
    engine = Engine(CachedRunner(of, of._config, of._context, LIMITS), options=SchedulerOptions(max_tokens=8))
    asked = [
        Request(id=str(n), prompt=tuple(prompt), max_tokens=tokens, sampling=Sampling(temperature=0.0))
        for n, prompt in enumerate(PROMPTS)
    ]
    found = [result.ids for result in engine.generate(asked)]
    assert found == [whole_text(of, prompt, tokens) for prompt in PROMPTS]


def assert_counted_is_kept(shorter: GPTModel, longer: GPTModel, context: ModelContext) -> None:
    """The layers that one model has beside those of the other keep as much for backward as is counted."""
    models, tokens = [shorter.train(), longer.train()], torch.randint(VOCABULARY, (2, 64))
    kept = [bytes_kept(model, tokens) for model in models]
    workload = Workload(context=context, batch=2, length=64, stream_itemsize=context.dtype.itemsize)
    counted = [costs_of(model, workload).kept for model in models]
    assert counted[1] - counted[0] == pytest.approx(kept[1] - kept[0], rel=0.02)
