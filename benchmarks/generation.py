"""Generation with a cache against transformers' generate and a hand-written loop, on the CPU.

    python -m benchmarks.generation --dtype bf16
    python -m benchmarks.generation --dtype fp32 --batches 1 8 --rounds 9
    python -m benchmarks.generation --quick

All contenders hold the same weights and go on greedily, and they take turns. A turn is a whole call: reading the
prompts, and all new tokens. Printed are generated tokens a second, by median and by best turn, and ratios. With one
thread the clock is the processor time of this thread, so other work on the machine hardly counts.

``unequal``: prompts of 8 to 512 tokens, most of them short; contenders without a scheduler pad them on the left.
At the end: how long reading a prompt takes against the forward pass of training, what sampling with top-p takes of a
step, and the memory of the cache against its formula.
"""

from __future__ import annotations

import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results
from megatron.config.model import ModelConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.products import INT8, Form
from megatron.core.inference.request import Request, Result
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, RunningStep, StepPlan
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext

Prompts = list[list[int]]
Contender = Callable[[Prompts, int], list[list[int]]]
"""Prompts, and how many tokens each gets, to the new tokens."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK = 64


@dataclass(frozen=True)
class Shape:
    """35.6 M parameters, of which 16.4 M are the tied embedding."""

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 32_000
    length: int = 1024


class TimedRunner(CachedRunner):
    """Adds up what its steps take."""

    seconds = 0.0

    @override
    def start(self, plan: StepPlan) -> RunningStep:
        began = now()
        found = super().start(plan)
        self.seconds += now() - began
        return found


def now() -> float:
    """Seconds: of this thread where it is the only one, else by the clock."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def build(shape: Shape, dtype: torch.dtype) -> GPTModel:
    """A GPT-2 with random weights."""
    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.length,
        vocab_size=shape.vocabulary,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.08,  # so that greedy texts vary
        activation="gelu",
    )
    return GPTModel(config, ModelContext.single(dtype=dtype), seed=1).eval().requires_grad_(False)


def runner_of(model: GPTModel, shape: Shape, *, requests: int, form: Form | None = None) -> TimedRunner:
    """Room for as many whole texts."""
    blocks = 1 + requests * -(-shape.length // BLOCK)
    limits = RunnerLimits(
        num_blocks=blocks,
        block_size=BLOCK,
        max_requests=requests,
        max_length=shape.length,
        vocabulary=shape.vocabulary,
    )
    return TimedRunner(model, model._config, model._context, limits, form=form)


def ours(model: GPTModel, shape: Shape, *, requests: int, form: Form | None = None) -> Contender:
    """The engine, without reuse of prefixes: each turn brings the same prompts."""
    runner = runner_of(model, shape, requests=requests, form=form)

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        return [
            [token.id for token in result.tokens] for result in run(runner, prompts, count, Sampling(temperature=0.0))
        ]

    return generate


def run(runner: CachedRunner, prompts: Prompts, count: int, sampling: Sampling) -> list[Result]:
    """Answers of a new engine."""
    engine = Engine(runner, options=SchedulerOptions(prefix_caching=False))
    requests = [
        Request(id=str(number), prompt=tuple(prompt), max_tokens=count, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    return engine.generate(requests)


def hand_loop(model: GPTModel, shape: Shape) -> Contender:
    """What one writes by hand: torch's functions, a static cache, prompts padded on the left, all rows in lock step."""
    weights = dict(model.state_dict())
    words, heads = weights["embedding.word_embeddings.weight"], shape.heads
    width, dtype = shape.hidden // heads, words.dtype

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (shape.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def forward(tokens: Tensor, positions: Tensor, caches: Sequence[Tensor], start: int, mask: Tensor | None) -> Tensor:
        batch, count = tokens.shape
        x = F.embedding(tokens, words) + F.embedding(positions, weights["embedding.position_embeddings.weight"])
        for number, cache in enumerate(caches):
            layer = f"decoder.layers.{number}"
            fused = product(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
            query, key, value = fused.view(batch, count, heads, 3, width).permute(3, 0, 2, 1, 4)
            cache[0][:, :, start : start + count], cache[1][:, :, start : start + count] = key, value
            keys, values = cache[0][:, :, : start + count], cache[1][:, :, : start + count]
            mixed = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None and count > 1)
            mixed = mixed.transpose(1, 2).reshape(batch, count, shape.hidden)
            x = x + product(mixed, f"{layer}.self_attention.linear_proj")
            hidden = F.gelu(product(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"))
            x = x + product(hidden, f"{layer}.mlp.linear_fc2")
        return F.linear(norm(x[:, -1], "decoder.final_layernorm"), words).argmax(-1)

    @torch.inference_mode()
    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        tokens, padding = padded(prompts)
        batch, longest = tokens.shape
        total = longest + count
        caches = [torch.zeros(2, batch, heads, total, width, dtype=dtype) for _ in range(shape.layers)]
        mask, seen = None, torch.arange(total)
        if padding.any():
            real = (seen >= padding[:, None])[:, None, None]
            mask = torch.where(real & (seen <= seen[:, None]), 0.0, -1e9).to(dtype)
        positions = (seen - padding[:, None]).clamp(min=0)
        found = [forward(tokens, positions[:, :longest], caches, 0, cut(mask, 0, longest))]
        for place in range(longest, total - 1):
            one = forward(
                found[-1][:, None], positions[:, place : place + 1], caches, place, cut(mask, place, place + 1)
            )
            found.append(one)
        answers: list[list[int]] = torch.stack(found, dim=1).tolist()
        return answers

    def cut(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
        return None if mask is None else mask[:, :, start:stop, :stop]

    return generate


def padded(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor, padded on the left, and how much each is."""
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    return torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]), padding


def transformers(model: GPTModel, shape: Shape, *, cache: str) -> Contender:
    """transformers' GPT-2 with the weights of ``model``; ``cache``: "dynamic" or "static"."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu",
    )
    peer = GPT2LMHeadModel(config).to(next(model.parameters()).dtype).eval()  # type: ignore[arg-type]
    peer.load_state_dict(renamed(model, shape), strict=False)
    peer.generation_config.eos_token_id = None

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        tokens, padding = padded(prompts)
        mask = (torch.arange(tokens.shape[1]) >= padding[:, None]).long()
        found = peer.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
            disable_compile=True,
        )
        answers: list[list[int]] = found[:, tokens.shape[1] :].tolist()
        return answers

    return generate


def renamed(model: GPTModel, shape: Shape) -> dict[str, Tensor]:
    """Weights under transformers' names; its matrices are transposed, with all queries before all keys."""
    names = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    ours = dict(model.state_dict())
    found = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
        "lm_head.weight": ours["embedding.word_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = ours[f"decoder.final_layernorm.{kind}"]
        for layer in range(shape.layers):
            for name, theirs in names.items():
                each = ours[f"decoder.layers.{layer}.{name}.{kind}"]
                if "qkv" in name:
                    by_head = each.unflatten(0, (shape.heads, 3, -1))
                    each = by_head.transpose(0, 1).flatten(0, 2)
                found[f"transformer.h.{layer}.{theirs}.{kind}"] = each.t() if each.dim() == 2 else each
    return found


@dataclass
class Turns:
    """Seconds of a contender's turns, and what it generated."""

    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def take_turns(contenders: dict[str, Contender], prompts: Prompts, count: int, *, rounds: int) -> dict[str, Turns]:
    """Each contender in each round, after a turn that does not count."""
    turns = {name: Turns() for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            began = now()
            turns[name].answers = contender(prompts, count)
            if number:
                turns[name].seconds.append(now() - began)
    return turns


def prompts_of(batch: int, shape: Shape, *, unequal: bool, length: int) -> Prompts:
    """Prompts of random ids: ``length`` for each, or of 1/8 to 8 times as many, evenly on a logarithmic scale."""
    generator = torch.Generator().manual_seed(batch)
    lengths = [length] * batch
    if unequal:
        lengths = [round(length * 8 ** (2 * number / max(1, batch - 1) - 1)) for number in range(batch)]
    return [torch.randint(shape.vocabulary, (each,), generator=generator).tolist() for each in lengths]


def report(turns: dict[str, Turns], tokens: int) -> dict[str, float]:
    """Print a table; the result is our rate as ratios to those of others, by median."""
    ratios: dict[str, float] = {}
    first, *_ = turns.values()
    middle, best = statistics.median(first.seconds), min(first.seconds)
    for name, each in turns.items():
        median, least = statistics.median(each.seconds), min(each.seconds)
        same = sum(a == b for mine, theirs in zip(first.answers, each.answers) for a, b in zip(mine, theirs)) / tokens
        ratio = "" if each is first else f"{median / middle:>8.2f}{least / best:>7.2f}"
        print(f"  {name:<24}{tokens / median:>9.0f}{tokens / least:>9.0f}{same:>8.0%}{ratio}")
        ratios |= {} if each is first else {name: median / middle}
    return ratios


def parts(model: GPTModel, shape: Shape, *, rounds: int, count: int, length: int) -> None:
    """Print reading of prompts, sampling, and the cache's memory."""
    runner = runner_of(model, shape, requests=8)
    prompt = prompts_of(1, shape, unequal=False, length=length)[0]
    row = PlanRow(
        slot=0, start=0, tokens=tuple(prompt), blocks=tuple(range(1, 2 + length // BLOCK)), logits_from=length - 1
    )
    tokens, read, trained, shares = torch.tensor([prompt]), list[float](), list[float](), list[float]()
    for _ in range(rounds + 1):
        began = now()
        runner.start(StepPlan((row,))).logits()
        read.append(now() - began)
        began = now()
        model(tokens)
        trained.append(now() - began)
    ratio = statistics.median(trained[1:]) / statistics.median(read[1:])
    print(f"reading {length} tokens: {ratio:.2f} of the rate of the forward pass of training, without its loss")
    for _ in range(rounds + 1):
        runner.seconds, began = 0.0, now()
        run(runner, prompts_of(8, shape, unequal=False, length=16), count, Sampling(top_p=0.9))
        shares.append(1 - runner.seconds / (now() - began))
    print(f"8 rows sampled with top-p 0.9: {statistics.median(shares[1:]):.0%} of a step is not the model")
    print(
        f"cache: {runner.cache_bytes} bytes; {runner.limits.num_blocks * BLOCK} tokens x 2 x layers x width x size are "
        f"{runner.limits.num_blocks * BLOCK * 2 * shape.layers * shape.hidden * next(model.parameters()).itemsize}"
    )


def main() -> None:
    """Print tables."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=64, help="of prompts (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones for each prompt (default 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = results.parse(parser, length=8, tokens=4, rounds=1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    shape = Shape(2, 64, 4, 512, 256) if options.quick else Shape()
    length, count, rounds = options.length, options.tokens, options.rounds
    ratios: dict[str, float] = {}
    model = build(shape, DTYPES[options.dtype])
    contenders = {
        "transformers, dynamic": transformers(model, shape, cache="dynamic"),
        "transformers, static": transformers(model, shape, cache="static"),
        "by hand": hand_loop(model, shape),
    }
    int8_refusal = INT8.refusal(next(model.parameters()))
    if options.dtype == "bf16" and int8_refusal is not None:
        print(f"int8 weights are left out: {int8_refusal}")
    for batch in options.batches:
        unequal = batch >= 32
        prompts = prompts_of(batch, shape, unequal=unequal, length=length)
        print(f"{options.dtype}, {batch} {'unequal ' * unequal}prompts, {count} tokens each, {options.threads} threads")
        print(f"  {'':<24}{'tokens/s':>9}{'best':>9}{'same':>8}{'ratio':>8}{'best':>7}")
        mine = {"megatron": ours(model, shape, requests=batch)}
        if options.dtype == "bf16" and int8_refusal is None:
            mine["megatron, int8"] = ours(model, shape, requests=batch, form=INT8)
        found = report(take_turns(mine | contenders, prompts, count, rounds=rounds), batch * count)
        ratios |= {f"{options.dtype}, {batch} prompts, {name}": ratio for name, ratio in found.items()}
    parts(model, shape, rounds=rounds, count=count, length=8 * length)
    results.save(options, ratios, watched=[name for name in ratios if name.endswith("int8")])


if __name__ == "__main__":
    main()
