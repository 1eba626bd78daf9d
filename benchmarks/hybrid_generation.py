"""Generation by a hybrid (Mamba-2, attention and MLP) against transformers' generate, on the CPU.

    python -m benchmarks.hybrid_generation
    python -m benchmarks.hybrid_generation --quick

Both hold the same weights and go on greedily, and they take turns. A turn is a whole call: reading the prompts, and all
new tokens. Then tokens a second of ours alone after longer and longer prompts, with Mamba-2 layers alone and with
attention: a state costs the same at any length. With one thread the clock is the processor time of this thread.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import generation, results
from benchmarks.generation import Contender, Prompts, now, padded, report, take_turns
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from megatron.core.ssm.mamba import mamba_branch
from megatron.core.transformer.stack import FEED_FORWARD, StackConfig, self_attention

KINDS = {"M": "mamba", "*": "attention", "-": "mlp"}


@dataclass(frozen=True)
class Shape:
    """A hybrid of 5 M parameters without its embeddings."""

    pattern: str = "M-M-M*-M-"
    hidden: int = 256
    heads: int = 4
    state: int = 64
    mamba_heads: int = 8
    groups: int = 2
    vocabulary: int = 4096
    length: int = 8192


def build(shape: Shape, context: ModelContext | None = None) -> GPTModel:
    """The hybrid with random weights."""
    config = ModelConfig(
        num_layers=len(shape.pattern),
        hidden_size=shape.hidden,
        ffn_hidden_size=4 * shape.hidden,
        num_attention_heads=shape.heads,
        position_embedding_type="none",
        max_position_embeddings=shape.length,
        vocab_size=shape.vocabulary,
        normalization="RMSNorm",
        activation="squared_relu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.08,  # so that greedy texts vary
    )
    mamba = MambaConfig(
        mamba_state_dim=shape.state,
        mamba_head_dim=2 * shape.hidden // shape.mamba_heads,
        mamba_num_groups=shape.groups,
        mamba_num_heads=shape.mamba_heads,
        mamba_time_step_limits=(0.001, 1e30),
    )
    layers = {"M": (mamba_branch(mamba),), "*": (self_attention(config),), "-": (FEED_FORWARD,)}
    stack = StackConfig(config, causal=True, pattern=tuple(layers[letter] for letter in shape.pattern))
    return GPTModel(config, context or ModelContext.single(), stack=stack, seed=1)


def ours(model: GPTModel, shape: Shape, *, requests: int) -> Contender:
    """The engine, without reuse of prefixes: each turn brings the same prompts."""
    limits = RunnerLimits(
        num_blocks=1 + requests * shape.length // generation.BLOCK,
        block_size=generation.BLOCK,
        max_requests=requests,
        max_length=shape.length,
        vocabulary=shape.vocabulary,
    )
    runner = CachedRunner(model, model._config, model._context, limits)

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        engine = Engine(runner, options=SchedulerOptions(prefix_caching=False))
        sampling = Sampling(temperature=0.0)
        asked = [
            Request(id=str(number), prompt=tuple(prompt), max_tokens=count, sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        return [[token.id for token in result.tokens] for result in engine.generate(asked)]

    return generate


def nemotron_h(model: GPTModel, shape: Shape, *, chunk: int = 128) -> Any:
    """transformers' Nemotron-H with the weights of ``model``. ``chunk``: of its scan, in tokens."""
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = NemotronHConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        layers_block_type=[KINDS[letter] for letter in shape.pattern],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        intermediate_size=4 * shape.hidden,
        ssm_state_size=shape.state,
        mamba_num_heads=shape.mamba_heads,
        mamba_head_dim=2 * shape.hidden // shape.mamba_heads,
        n_groups=shape.groups,
        max_position_embeddings=shape.length,
        chunk_size=chunk,
    )
    peer = NemotronHForCausalLM(config)
    absent = peer.load_state_dict(renamed(model, shape), strict=True)
    assert not absent.missing_keys, absent
    return peer


def transformers(model: GPTModel, shape: Shape) -> Contender:
    """transformers' generate."""
    peer = nemotron_h(model, shape).eval()
    peer.generation_config.eos_token_id = None

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        tokens, padding = padded(prompts)
        mask = (torch.arange(tokens.shape[1]) >= padding[:, None]).long()
        found = peer.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        answers: list[list[int]] = found[:, tokens.shape[1] :].tolist()
        return answers

    return generate


def renamed(model: GPTModel, shape: Shape) -> dict[str, Tensor]:
    """Weights under transformers' names."""
    own = dict(model.state_dict())
    found = {
        "model.embeddings.weight": own["embedding.word_embeddings.weight"],
        "model.norm_f.weight": own["decoder.final_layernorm.weight"],
        "lm_head.weight": own["output_layer.weight"],
    }
    for number, letter in enumerate(shape.pattern):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        norm = {"M": "norm", "*": "input_layernorm", "-": "pre_mlp_layernorm"}[letter]
        found[f"{theirs}.norm.weight"] = own[f"{ours}.{norm}.weight"]
        if letter == "M":
            mixer = f"{ours}.mixer."
            found |= {f"{theirs}.mixer.{name.removeprefix(mixer)}": each for name, each in own.items() if mixer in name}
        elif letter == "*":
            qkv = own[f"{ours}.self_attention.linear_qkv.weight"].unflatten(0, (shape.heads, 3, -1))
            for name, each in zip("qkv", qkv.unbind(1)):
                found[f"{theirs}.mixer.{name}_proj.weight"] = each.flatten(0, 1)
            found[f"{theirs}.mixer.o_proj.weight"] = own[f"{ours}.self_attention.linear_proj.weight"]
        else:
            found[f"{theirs}.mixer.up_proj.weight"] = own[f"{ours}.mlp.linear_fc1.weight"]
            found[f"{theirs}.mixer.down_proj.weight"] = own[f"{ours}.mlp.linear_fc2.weight"]
    return found


def by_length(shape: Shape, lengths: Sequence[int], *, count: int, rounds: int) -> None:
    """Print tokens a second after prompts of ``lengths``: the time of a call less that of one with a single token."""
    generate = ours(build(shape).eval().requires_grad_(False), shape, requests=1)
    rates = []
    for length in lengths:
        prompt = [torch.randint(shape.vocabulary, (length,), generator=torch.Generator().manual_seed(1)).tolist()]
        seconds = []
        for number in range(rounds + 1):
            times = []
            for tokens in (1, 1 + count):
                began = now()
                generate(prompt, tokens)
                times.append(now() - began)
            if number:
                seconds.append(times[1] - times[0])
        rates.append(count / statistics.median(seconds))
    shown = ", ".join(f"{rate:,.0f} after {length:,}" for length, rate in zip(lengths, rates))
    print(f"{shape.pattern}: tokens a second {shown}; the last is {rates[-1] / rates[0]:.2f} of the first")


def main() -> None:
    """Print rates side by side, and by length."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text (default 64)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], help="of the prompts of ours alone")
    parser.add_argument("--rounds", type=int, default=5)
    given = results.parse(parser, tokens=8, lengths=[16, 64], rounds=1)
    torch.set_num_threads(1)
    quick = Shape(pattern="M*-", hidden=64, state=16, vocabulary=384)
    shape, ratios = quick if given.quick else Shape(), dict[str, float]()
    model = build(shape).eval().requires_grad_(False)
    for batch in given.batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(shape.vocabulary, (batch, given.prompt), generator=generator).tolist()
        contenders = {"ours": ours(model, shape, requests=batch), "transformers": transformers(model, shape)}
        print(f"{batch} texts of {given.prompt} tokens, {given.tokens} new ones each, one thread")
        print(f"  {'':<24}{'tokens/s':>9}{'best':>9}{'same':>8}{'ratio':>8}{'best':>7}")
        turns = take_turns(contenders, prompts, given.tokens, rounds=given.rounds)
        ratios |= {f"{batch} texts": ratio for ratio in report(turns, batch * given.tokens).values()}
    for pattern in ("M" * sum(letter == "M" for letter in shape.pattern), shape.pattern):
        by_length(Shape(**{**vars(shape), "pattern": pattern}), given.lengths, count=given.tokens, rounds=given.rounds)
    results.save(given, ratios)


if __name__ == "__main__":
    main()
