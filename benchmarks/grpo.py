"""CPU time of the parts of a GRPO step, beside transformers' Llama as trl takes it.

    python -m benchmarks.grpo [--rounds N]

A round generates answers to prompts, computes log-probabilities of the initial model (scoring), and takes a step. The
peer does what trl's GRPOTrainer does without vLLM: ``generate`` for all answers at once, logits of the answers'
positions, their entropies, the clipped loss, and AdamW. Both have the same sizes and take turns. Seconds are of the
processor on one thread, without the process of the reward function.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.training.rollouts.collecting import Rollouts, training_batches
from megatron.training.rollouts.rated import Rater
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step

GPT, PROMPTS, GROUP, MICROBATCH, PROMPT, BETA = FAMILIES["gpt"], 8, 8, 16, 16, 0.04
PARTS = ("generation", "scoring", "training")
REWARD = "def reward(completion_ids, **_):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
Found = TypeVar("Found")


class Clock:
    """Seconds of the processor that parts of rounds take, by part."""

    def __init__(self) -> None:
        self.parts = defaultdict[str, list[float]](list)

    def of(self, part: str, work: Callable[[], Found]) -> Found:
        """Do some work and add its seconds."""
        start = time.process_time()
        found = work()
        self.parts[part].append(time.process_time() - start)
        return found

    def wrapped(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method whose calls are counted."""

        def call(*args: Any, **named: Any) -> Any:
            return self.of(part, lambda: method(*args, **named))

        return call

    def medians(self) -> dict[str, float]:
        """Seconds of the middle round; the first warms up."""
        return {part: statistics.median(self.parts[part][1:]) for part in PARTS}


def our_run(folder: Path, options: Any) -> Run:
    """A Llama of random weights, prompts of random numbers, and a reward."""
    hidden = options.hidden
    draw = torch.Generator().manual_seed(0)
    lines = [
        json.dumps(
            {"prompt": " ".join(map(str, torch.randint(options.vocabulary - 1, (PROMPT,), generator=draw).tolist()))}
        )
        for _ in range(8 * PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    flags = (
        f"--num-layers {options.layers} --hidden-size {hidden} --ffn-hidden-size {4 * hidden} --swiglu "
        f"--num-attention-heads {hidden // 32} --position-embedding-type rope --normalization RMSNorm "
        f"--disable-bias-linear --untie-embeddings-and-output-weights --seq-length {PROMPT + options.tokens} "
        f"--tokenizer-type NullTokenizer --vocab-size {options.vocabulary - 1} --num-workers 0 --eval-iters 0 "
        f"--micro-batch-size {MICROBATCH} --global-batch-size {PROMPTS * GROUP} --train-iters 100 --lr 1e-5 "
        f"--load unread --perform-rl-step --grpo-prompts {folder}/prompts.jsonl --grpo-iterations 1 "
        f"--reward-function {folder}/rewards.py:reward --grpo-prompts-per-step {PROMPTS} --grpo-group-size {GROUP} "
        f"--grpo-max-new-tokens {options.tokens} --grpo-kl-beta {BETA}"
    )
    return build_run(parse_run(flags.split(), extra_groups=GPT.groups), GPT.train_spec, ParallelContext.single())


class Peer:
    """transformers' Llama of the same sizes, its copy from the start, and its optimizer."""

    def __init__(self, run: Run, options: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 32,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        self._model: Any = LlamaForCausalLM(config)
        self._initial: Any = LlamaForCausalLM(config)
        self._initial.load_state_dict(self._model.state_dict())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._tokens, self._draw = options.tokens, torch.Generator().manual_seed(1)
        self._words = options.vocabulary

    def round(self, clock: Clock) -> None:
        """Answers, scores and a step."""
        prompts = torch.randint(self._words, (PROMPTS, PROMPT), generator=self._draw).repeat_interleave(GROUP, 0)
        ids = clock.of("generation", partial(self._answers, prompts))
        scores = clock.of("scoring", partial(self._scores, ids))
        clock.of("training", partial(self._step, ids, scores))

    @torch.no_grad()
    def _answers(self, prompts: Tensor) -> Tensor:
        mask = torch.ones_like(prompts)
        found: Tensor = self._model.generate(
            input_ids=prompts, attention_mask=mask, do_sample=True, max_new_tokens=self._tokens, top_k=0
        )
        return found

    @torch.no_grad()
    def _scores(self, ids: Tensor) -> Tensor:
        return torch.cat([self._log_probs(self._initial, part)[0] for part in torch.split(ids, MICROBATCH)])

    def _log_probs(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the answers' tokens, and entropies."""
        logits = model(input_ids=ids, logits_to_keep=self._tokens + 1).logits[:, :-1]
        every = logits.log_softmax(-1)
        chosen = every.gather(2, ids[:, -self._tokens :].unsqueeze(2)).squeeze(2)
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(-1)
        return chosen, entropies

    def _step(self, ids: Tensor, scores: Tensor) -> None:
        rewards = ids[:, PROMPT:].sum(1).remainder(7).float().view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        for part, reference, advantage in zip(
            torch.split(ids, MICROBATCH), torch.split(scores, MICROBATCH), torch.split(advantages, MICROBATCH)
        ):
            each, _ = self._log_probs(self._model, part)
            ratio, apart = (each - each.detach()).exp(), reference - each
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = (BETA * (apart.exp() - apart - 1) - clipped).mean(1).sum() / len(ids)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def main(argv: Sequence[str] | None = None) -> None:
    """Take rounds in turns and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=8000)
    options = results.parse(parser, argv, rounds=1, hidden=64, layers=2, tokens=8, vocabulary=500)
    torch.set_num_threads(1)
    ours, theirs = Clock(), Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Rater, "rated", ours.wrapped("generation", Rater.rated)),
        mock.patch.object(Rollouts, "_with_scores", ours.wrapped("scoring", Rollouts._with_scores)),
    ):
        run = our_run(Path(folder), options)
        peer, batches = Peer(run, options), training_batches(run).batches
        for _ in range(options.rounds + 1):
            microbatches = next(batches)
            ours.of("training", partial(train_step, run, microbatches))
            peer.round(theirs)
    mine, other = ours.medians(), theirs.medians()
    print("| | ours, ms of the processor | transformers, as trl | ratio |\n|---|--:|--:|--:|")
    for name, one, two in [(part, mine[part], other[part]) for part in PARTS] + [
        ("a round", sum(mine.values()), sum(other.values()))
    ]:
        print(f"| {name} | {1000 * one:.0f} | {1000 * two:.0f} | {two / one:.2f} |")
    results.save(options, {"GRPO round": sum(other.values()) / sum(mine.values())})


if __name__ == "__main__":
    main()
