"""Training on a model's own answers: what is computed of a batch of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.training.run.run import Run, build_run
from megatron.training.step import forward_backward, update_weights
from tests.harness.runs import tiny_config

GPT = FAMILIES["gpt"].train_spec
GRPO = (
    "--perform-rl-step --grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-max-new-tokens 8 --load unread "
    "--grpo-clamp-eps-lower 0.5 --grpo-clamp-eps-upper 0.5 --position-embedding-type rope"
)


def gradients(run: Run) -> dict[str, torch.Tensor]:
    entries = ((buffer, entry) for buffer in run.buffers for bucket in buffer.buckets for entry in bucket.entries)
    return {entry.name: entry.span.of(buffer.grads) for buffer, entry in entries}


def expected(run: Run, tensors: Any, *, temperature: float, beta: float) -> torch.Tensor:
    """GRPO's loss of a batch from whole logits, which autograd differentiates."""
    [model] = run.models
    assert isinstance(model, GPTModel)
    output = model(
        tensors["tokens"], tensors["position_ids"], rng_key=StreamKey(0), document_ids=tensors["document_ids"]
    )
    logits = output.logits_with_gradient() / temperature
    found = logits.log_softmax(-1).gather(2, tensors["labels"].unsqueeze(2)).squeeze(2)
    ratios, advantages = (found - tensors["old_log_probs"].nan_to_num()).exp(), tensors["advantage"].unsqueeze(1)
    each = -torch.minimum(ratios * advantages, ratios.clamp(0.5, 1.5) * advantages)
    difference = tensors["reference_log_probs"] - found
    each = torch.where(tensors["loss_mask"] > 0, each + beta * (difference.exp() - difference - 1), 0.0)
    total: torch.Tensor = (each.sum(1) / tensors["loss_mask"].sum(1)).sum()
    return total


@pytest.mark.parametrize("bias", ["", "--add-output-layer-bias --final-logit-softcapping 2.0"])
def test_gradients_are_those_of_whole_logits(bias: str) -> None:
    """The loss is computed from log-probabilities without a gradient, whose slopes then weight a cross entropy; a
    temperature that divides only a part of the logits would train another model than the one that answers.
    """
    config = tiny_config(f"--mock-data {GRPO} --grpo-kl-beta 0.2 --rl-default-temperature 0.7 {bias} --dry-run")
    run = build_run(config, GPT, ParallelContext.single(dtype=torch.float64), started=0.0)
    batch = next(run.data.training_batches(0))
    sums = forward_backward(run, batch)
    ours = {name: gradient.clone() for name, gradient in gradients(run).items()}
    run.grad_sync.zero()
    total: Any = sum(expected(run, each.tensors, temperature=0.7, beta=0.2) for each in batch)
    total.backward()
    for name, gradient in gradients(run).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    record = update_weights(run, sums)
    assert record.losses["grpo"] == pytest.approx(total.item() / 8, rel=1e-9)
    assert 0 < record.losses["clip_ratio/region_mean"] < 1


def test_entropies_are_those_of_whole_logits() -> None:
    """The log's entropy tells when a model has stopped trying anything."""
    config = tiny_config(f"--mock-data {GRPO} --rl-default-temperature 1.5 --dry-run")
    run = build_run(config, GPT, ParallelContext.single(dtype=torch.float64), started=0.0)
    [model] = run.models
    assert isinstance(model, GPTModel)
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        output = model(tokens, None, rng_key=StreamKey(0)).tempered(1.5)
        losses, entropies = output.token_losses_and_entropies(tokens)
        logs = (model(tokens, None, rng_key=StreamKey(0)).logits() / 1.5).log_softmax(-1)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(-1))
    torch.testing.assert_close(losses, -logs.gather(2, tokens.unsqueeze(2)).squeeze(2))
