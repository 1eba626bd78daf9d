"""A step with a cache must give the logits of the whole text, whatever the blocks, the chunks and the neighbours."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.core.inference.cache import KeyValueCache
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.models.gpt.model import GPTModel
from megatron.core.ops.text_cache import Paged
from megatron.core.parallel.model_context import ModelContext

VARIANTS: dict[str, dict[str, Any]] = {
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "rotary": {"position_embedding_type": "rope"},
    "interleaved, a part": {"position_embedding_type": "rope", "rotary_interleaved": True, "rotary_percent": 0.5},
    "two groups": {"position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2},
    "window": {"position_embedding_type": "rope", "window_size": (5, 0), "window_attn_skip_freq": "2"},
    "alibi": {"position_embedding_type": "alibi"},
    "soft cap, sinks": {"position_embedding_type": "rope", "attn_logit_softcapping": 5.0, "softmax_type": "learnable"},
    "off by one": {"position_embedding_type": "rope", "softmax_type": "off-by-one"},
    "head norms": {"position_embedding_type": "rope", "qk_layernorm": True},
    "parallel": {"position_embedding_type": "rope", "parallel_attention": True},
    "one group, no rotary in every second layer": {
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 1,
        "no_rope_freq": "2",
    },
    "local base": {
        "position_embedding_type": "rope",
        "window_size": (6, 0),
        "window_attn_skip_freq": "2",
        "rotary_base_local": 100.0,
    },
    "longrope": {
        "position_embedding_type": "longrope",
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 8.0,
        "longrope_short_factors": (1.0, 1.5, 2.0, 3.0),
        "longrope_long_factors": (2.0, 3.0, 5.0, 9.0),
    },
    "dynamic": {
        "position_embedding_type": "dynamic_ntk",
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 2.0,
    },
    "latent": {
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "normalization": "RMSNorm",
    },
    "latent queries, yarn, wide values": {
        "position_embedding_type": "yarn",
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 4.0,
        "mscale_all_dim": 1.2,
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 12,
        "qk_layernorm": True,
        "softmax_type": "learnable",
        "normalization": "RMSNorm",
    },
}
VOCABULARY = 40
LIMITS = RunnerLimits(num_blocks=30, block_size=4, max_requests=4, max_length=64, vocabulary=VOCABULARY)


def gpt(settings: dict[str, Any], *, dtype: torch.dtype = torch.float64, max_position_embeddings: int = 64) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_position_embeddings,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        **{"hidden_size": 32, **settings},
    )
    return GPTModel(config, ModelContext.single(dtype=dtype), seed=5).eval().requires_grad_(False)


def runner(model: GPTModel) -> CachedRunner:
    return CachedRunner(model, model._config, model._context, LIMITS)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_whole_text(name: str) -> None:
    """Two texts, one in chunks and one token by token, in blocks that are not in order.

    The model sees whole texts with the rotary positions of the longest.
    """
    model = gpt(VARIANTS[name])
    steps = runner(model)
    texts = torch.randint(VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [(9, 3, 4, 17, 2, 28), (5, 6, 7, 8, 1, 29)]
    cuts: list[list[int]] = [[0, 7, 8, 20, 21, 22, 23], list(range(24))]
    found: list[list[torch.Tensor]] = [[], []]
    for number in range(23):
        rows, owners = [], []
        for text, ends in enumerate(cuts):
            if number + 1 < len(ends):
                chunk = tuple(texts[text][ends[number] : ends[number + 1]])
                rows.append(PlanRow(slot=text, start=ends[number], tokens=chunk, blocks=blocks[text], logits_from=0))
                owners.append(text)
        logits = steps.start(StepPlan(tuple(rows))).logits()
        for text, part in zip(owners, torch.split(logits, [len(row.tokens) for row in rows]), strict=True):
            found[text].append(part)
    for text, parts in enumerate(found):
        padded = torch.tensor([texts[text] + [0] * (LIMITS.max_length - 23)])
        whole = model(padded).logits()[0, :23]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-9)


def test_a_beam_goes_on_in_a_copy_of_a_block_that_another_keeps() -> None:
    """Two continuations of one text, whose third block is copied for the second before either writes to it."""
    model = gpt(VARIANTS["two groups"])
    steps, text = runner(model), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    row = PlanRow(slot=0, start=0, tokens=tuple(text), blocks=(9, 3, 4), logits_from=8)
    steps.start(StepPlan((row,)))
    first = replace(row, start=9, tokens=(7,), logits_from=0)
    second = replace(first, slot=1, tokens=(8,), blocks=(9, 3, 17), copies=4)
    logits = steps.start(StepPlan((first, second))).logits()
    for token, found in zip((7, 8), logits, strict=True):
        whole = model(torch.tensor([[*text, token]])).logits()[0, -1]
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("most_copied", [1000, 0], ids=["shared calls", "calls of their own"])
def test_texts_of_any_lengths_get_their_own_logits_in_one_step(most_copied: int) -> None:
    """The first and the third text share a call, so results don't come in the order of texts."""
    model = gpt(VARIANTS["two groups"], max_position_embeddings=128)
    limits = replace(LIMITS, num_blocks=61, max_length=128)
    steps = CachedRunner(model, model._config, model._context, limits)
    steps._cache.most_copied = most_copied
    texts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (6, 71, 7)]
    rows = [
        PlanRow(slot=n, start=0, tokens=tuple(text[:-1]), blocks=tuple(range(1 + 20 * n, 21 + 20 * n)), logits_from=0)
        for n, text in enumerate(texts)
    ]
    steps.start(StepPlan(tuple(rows)))
    last = [replace(row, start=len(row.tokens), tokens=(text[-1],)) for row, text in zip(rows, texts)]
    logits = steps.start(StepPlan(tuple(last))).logits()
    for text, found in zip(texts, logits, strict=True):
        torch.testing.assert_close(found, model(torch.tensor([text])).logits()[0, -1], rtol=0, atol=1e-9)


def test_a_cpu_copies_short_texts_only() -> None:
    """Copying keys and values of 700 tokens for a shared call took longer than the calls that it saved."""
    heads = Paged(groups=8, key_width=64, value_width=64)
    for device, most in (("cpu", 64), ("meta", sys.maxsize)):
        cache = KeyValueCache({0: heads}, LIMITS, dtype=torch.float32, device=torch.device(device))
        assert cache.most_copied == most


def test_latent_attention_keeps_latents_only() -> None:
    """The cache of a model with latent attention took as much memory as that of one without."""
    cache = runner(gpt(VARIANTS["latent"]))._cache
    (keys, _), (values, _) = cache.keys.values(), cache.values.values()
    assert keys.shape == (1, LIMITS.num_blocks * LIMITS.block_size, 8 + 4)
    assert values.data_ptr() == keys.data_ptr()


def test_the_engine_answers_with_a_model() -> None:
    """Greedy answers are the argmax of the whole text."""
    model = gpt(VARIANTS["two groups"])
    prompts = [(3, 1, 4), (1,), (5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9), (3, 2, 3, 8), (3, 2, 3, 8)]
    requests = [
        Request(id=str(number), prompt=prompt, max_tokens=12, sampling=Sampling(temperature=0.0))
        for number, prompt in enumerate(prompts)
    ]
    for prompt, result in zip(prompts, Engine(runner(model)).generate(requests), strict=True):
        ids = [*prompt, *(token.id for token in result.tokens)]
        likeliest = model(torch.tensor([ids])).logits()[0].argmax(-1).tolist()
        assert ids[len(prompt) :] == likeliest[len(prompt) - 1 : -1]


SAMPLINGS = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_k=10), Sampling(temperature=100.0)]


@pytest.mark.parametrize("name", ["learned positions", "rotary"])
def test_a_prompt_gets_the_same_text_alone_and_in_any_batch(name: str) -> None:
    """Positions and random numbers belong to the text, or answers depend on other users. The rows that pad the
    vocabulary are never drawn, however hot the sampling.
    """
    engine = Engine(runner(gpt(VARIANTS[name])))
    prompts = [(3, 1, 4), (1,), (5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9), (3, 2, 3, 8), (1,)]
    for sampling in SAMPLINGS:
        requests = [
            Request(id=str(number), prompt=prompt, max_tokens=12, sampling=sampling, seed=11 + number)
            for number, prompt in enumerate(prompts)
        ]
        together = [result.ids for result in engine.generate(requests)]
        assert together == [engine.generate([request])[0].ids for request in requests]
        assert all(max(ids) < VOCABULARY for ids in together)
        assert (together[1] == together[4]) == sampling.is_greedy, "the seed decides"


def logits_of(steps: CachedRunner, plans: Sequence[Sequence[tuple[int, int, int]]], texts: list[list[int]]) -> Any:
    """Logits of each text's tokens, computed in plans of rows ``(text, start, stop)``, in blocks out of order."""
    size, count = steps.limits.block_size, len(texts)
    blocks = [tuple(range(1 + text, steps.limits.num_blocks, count)) for text in range(count)]
    if size >= 128:
        each = (steps.limits.num_blocks - 1) // count
        blocks = [tuple(range(1 + text * each, 1 + (text + 1) * each)) for text in range(count)]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for plan in plans:
        rows = tuple(
            PlanRow(slot=text, start=start, tokens=tuple(texts[text][start:stop]), blocks=blocks[text], logits_from=0)
            for text, start, stop in plan
        )
        logits = steps.start(StepPlan(rows)).logits()
        for (text, _, _), part in zip(plan, torch.split(logits, [len(row.tokens) for row in rows]), strict=True):
            found[text].append(part)
    return [torch.cat(parts) if parts else None for parts in found]


EXACT: dict[str, dict[str, Any]] = {
    "plain": {"position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2},
    "window, sinks": {
        "position_embedding_type": "rope",
        "window_size": (100, 0),
        "softmax_type": "learnable",
        "qk_layernorm": True,
    },
    "alibi, cap": {"position_embedding_type": "alibi", "attn_logit_softcapping": 5.0},
    "latent": VARIANTS["latent"],
    "wide": {"position_embedding_type": "rope", "ffn_hidden_size": 1376, "activation": "swiglu", "hidden_size": 512},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", EXACT)
def test_bits_depend_on_the_text_alone(name: str, dtype: torch.dtype) -> None:
    """A text at once and alone, and in chunks and single tokens beside two others, in blocks of any size, in shared
    calls and calls of their own, over memory that was full of NaN. On the libraries of most processors products of 1, 4
    and 100 rows differ in their last bits.
    """
    length = 150
    model = gpt(EXACT[name], dtype=dtype, max_position_embeddings=length)
    texts = torch.randint(VOCABULARY, (3, length), generator=torch.Generator().manual_seed(1)).tolist()
    alone = [[(0, 0, length)]]
    cuts = [0, 33, 40, *range(126, 131), 147, *range(148, length + 1)]
    mixed = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        beside = [(1, number, number + 1)] + ([(2, 0, 61)] if number == 3 else [])
        mixed.append([beside[0], (0, start, stop), *beside[1:]])
    expected: torch.Tensor | None = None
    for size in (128, 16):
        blocks = 1 + 3 * -(-length // size)
        limits = replace(LIMITS, num_blocks=blocks, block_size=size, max_length=length)
        steps = CachedRunner(model, model._config, model._context, limits, is_batch_invariant=True)
        steps._cache.most_copied = sys.maxsize if size == 128 else 0
        for plans in (alone, mixed):
            for table in (*steps._cache.keys.values(), *steps._cache.values.values()):
                table[:, size:] = torch.nan
            found = logits_of(steps, plans, texts)[0]
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (size, len(plans))


@pytest.mark.parametrize("name", ["two groups", "window", "alibi"])
def test_bits_do_not_depend_on_tiny_blocks_and_cuts(name: str) -> None:
    """A text in blocks of 1 and 2 tokens in random order, smaller than a tile, and cut anywhere."""
    model, length, draw = gpt(VARIANTS[name], dtype=torch.bfloat16), 40, random.Random(1)
    texts = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1)).tolist()
    expected: torch.Tensor | None = None
    for size in (64, 1, 2, 16):
        each = -(-length // size)
        limits = replace(LIMITS, num_blocks=1 + 2 * each, block_size=size)
        steps = CachedRunner(model, model._config, model._context, limits, is_batch_invariant=True)
        for table in (*steps._cache.keys.values(), *steps._cache.values.values()):
            table[:, size:] = torch.nan
        blocks = list(range(1, 1 + 2 * each))
        draw.shuffle(blocks)
        cuts = [0, length] if expected is None else sorted({0, length, *draw.sample(range(1, length), 9)})
        found = []
        for start, stop in pairwise(cuts):
            rows = [
                PlanRow(
                    slot=text,
                    start=start,
                    tokens=tuple(texts[text][start:stop]),
                    blocks=tuple(blocks[text * each : (text + 1) * each]),
                    logits_from=0,
                )
                for text in range(1 + (expected is not None))
            ]
            found.append(steps.start(StepPlan(tuple(rows))).logits()[: stop - start])
        expected = torch.cat(found) if expected is None else expected
        assert torch.equal(torch.cat(found), expected), (size, cuts)


def test_bf16_on_a_cpu_is_batch_invariant_by_default() -> None:
    """Elsewhere it costs too much to be the default."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert runner(gpt(VARIANTS["rotary"], dtype=dtype))._is_batch_invariant == (dtype == torch.bfloat16)
