"""Text generation: a batch of prompts, one token each per step, until the end of the document or the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megatron.core.inference.sampling import Sampling, next_tokens
from megatron.core.parallel.rng import derive_seed
from megatron.errors import DataError

FinishReason = Literal["end of document", "stop", "length"]


class NextLogits(Protocol):
    """A model for generation."""

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``[b, vocabulary]`` of the token after the first ``lengths`` ``[b]`` of ``tokens`` ``[b, t]``."""
        ...


@dataclass(frozen=True)
class WholeText:
    """A :class:`NextLogits` that runs a causal language model over the whole text at every step.

    ``model(tokens)`` returns an output with ``logits(positions=…)``, as ``GPTModel`` does.
    """

    model: nn.Module

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits after each text."""
        logits: Tensor = self.model(tokens).logits(positions=lengths - 1)
        return logits


@dataclass(frozen=True)
class GenerationLimits:
    """``end_of_document``: the token that ends a text, or None. ``max_length``: prompt plus generated tokens."""

    end_of_document: int | None
    max_length: int


@dataclass
class Generation:
    """``tokens``: the prompt and the generated tokens, without the end-of-document token."""

    tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason = "length"

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass
class Engine:
    """Generates a batch of texts, one token each per call of ``next_logits``.

    With several ranks all call ``generate`` with the same arguments and draw the same tokens.
    """

    next_logits: NextLogits
    limits: GenerationLimits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokens_to_generate: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_token: Callable[[int, int], None] | None = None,
        stop: Callable[[Sequence[int]], bool] = lambda generated: False,
    ) -> list[Generation]:
        """Continue every prompt by up to ``tokens_to_generate`` tokens.

        ``seeds``: one per prompt; the same prompt, seed and sampling give the same text in any batch. ``on_token``:
        called with the prompt's number and each token as soon as it is drawn. ``stop``: called with the generated
        tokens after each token; true ends the text, which keeps that token. Raises DataError for a prompt that is empty
        or too long.
        """
        self._check(prompts, tokens_to_generate)
        results = [Generation(list(prompt), len(prompt)) for prompt in prompts]
        generators = [torch.Generator().manual_seed(derive_seed(seed, "generation")) for seed in seeds]
        running = list(range(len(prompts)))
        for _ in range(tokens_to_generate):
            if not running:
                break
            uniforms = torch.stack([torch.rand((), dtype=torch.float64, generator=generators[row]) for row in running])
            drawn = next_tokens(self._logits([results[row].tokens for row in running]), sampling, uniforms)
            still_running = []
            for row, token in zip(running, drawn.tolist(), strict=True):
                if token == self.limits.end_of_document:
                    results[row].finish_reason = "end of document"
                    continue
                results[row].tokens.append(token)
                if on_token is not None:
                    on_token(row, token)
                if stop(results[row].generated):
                    results[row].finish_reason = "stop"
                else:
                    still_running.append(row)
            running = still_running
        return results

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each text. Shorter ones are padded on the right, which a causal model never sees."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        return self.next_logits(tokens.to(self.device), lengths.to(self.device))

    def _check(self, prompts: Sequence[Sequence[int]], tokens_to_generate: int) -> None:
        for number, prompt in enumerate(prompts, start=1):
            if not prompt:
                raise DataError(f"prompt {number} has no tokens; a prompt needs at least one token")
            total = len(prompt) + tokens_to_generate
            if total > self.limits.max_length:
                raise DataError(
                    f"prompt {number} has {len(prompt)} tokens; with {tokens_to_generate} generated ones that makes "
                    f"{total}, and the model sees at most {self.limits.max_length}: shorten the prompt, or generate at "
                    f"most {max(0, self.limits.max_length - len(prompt))}"
                )
