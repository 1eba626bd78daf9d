"""The output layer, split by vocabulary: losses and logits from hidden states."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.ops.matmul import linear
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.cross_entropy import (
    DEVICE_CHUNK,
    VocabularyPart,
    linear_cross_entropy,
    vocab_parallel_argmax,
    vocab_parallel_token_losses,
)
from megatron.core.tensor_parallel.distillation import (
    DistilledSums,
    Head,
    Mix,
    Target,
    TopOfDistribution,
    distilled_cross_entropy,
    top_of_distribution,
)
from megatron.core.tensor_parallel.entropy import token_losses_and_entropies
from megatron.core.tensor_parallel.initialize import Constant
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.tensor_parallel.linear import added_at_once, read_in_forward_alone
from megatron.core.tensor_parallel.regions import enter
from megatron.core.transformer.embedding import WORD_EMBEDDINGS
from megatron.core.transformer.initialization import table_init

_WORTH_CHOOSING = 0.9
"""Share of tokens with a loss up to which hidden states are copied to leave the others out."""


@dataclass(frozen=True)
class VocabularyOutput:
    """Logits before the product: hidden states ``[S, b, h]``, as wide as word embeddings, and this rank's rows of the
    output matrix.

    ``bias``: this rank's part of what is added to the logits. ``cap``: makes ``cap * tanh(logits / cap)`` of them.
    ``z_loss``: coefficient of a loss of the softmax's log Z, see ``linear_cross_entropy``.
    Losses and single logits are computed from it, and the ``[S, b, vocabulary]`` tensor never exists. ``mtp``:
    outputs for the tokens after the next one, where the model predicts several; ``coefficient``: of such a one's loss.
    ``given_loss``: what an objective takes in place of the cross entropy, with its gradient.
    """

    hidden: Tensor
    weight: Tensor
    vocab_size: int
    context: ModelContext
    bias: Tensor | None = None
    cap: float | None = None
    z_loss: float = 0.0
    mtp: tuple[VocabularyOutput, ...] = ()
    coefficient: float = 1.0
    given_loss: Tensor | None = None

    @property
    def _vocabulary(self) -> VocabularyPart:
        rows, mesh = self.weight.shape[0], self.context.mesh
        first = rows * mesh.rank("tp")
        return VocabularyPart(mesh=mesh, start=first, valid=max(0, min(rows, self.vocab_size - first)))

    def cross_entropy(self, labels: Tensor, loss_weights: Tensor, *, backward_scale: float = 1.0) -> Tensor:
        """Sum over ``[b, S]`` of weight times cross entropy, an fp32 scalar; gradients are made on the way, at the
        scale of the ``backward_scale`` from which the backward pass will start.
        """
        if self.given_loss is not None:
            return self.given_loss
        rows = (self.hidden.flatten(0, 1), labels.t().reshape(-1), loss_weights.t().reshape(-1))
        return self._cross_entropy(*rows, backward_scale)

    def cross_entropy_where_weighted(
        self, labels: Tensor, loss_weights: Tensor, *, backward_scale: float = 1.0
    ) -> Tensor:
        """``cross_entropy`` that multiplies out only what has a weight: for losses over few of the tokens.

        Where that is must be known to the host, so on a GPU it waits for the device.
        """
        weights = loss_weights.t().reshape(-1)
        weighted = weights.nonzero().squeeze(1)
        if len(weighted) == 0:  # a row at least, so that every gradient is made
            weighted = weighted.new_zeros(1)
        rows = (self.hidden.flatten(0, 1)[weighted], labels.t().reshape(-1)[weighted], weights[weighted])
        return self._cross_entropy(*rows, backward_scale)

    def masked_cross_entropy(self, labels: Tensor, loss_mask: Tensor, *, backward_scale: float = 1.0) -> Tensor:
        """``cross_entropy``, which on a CPU multiplies out only what the mask keeps where that is much less than all:
        answers of conversations, texts between images. On a GPU finding it would wait for the device.
        """
        if self.given_loss is None and self.hidden.device.type == "cpu":
            kept = int(loss_mask.count_nonzero())
            if kept <= _WORTH_CHOOSING * loss_mask.numel():
                return self.cross_entropy_where_weighted(labels, loss_mask, backward_scale=backward_scale)
        return self.cross_entropy(labels, loss_mask, backward_scale=backward_scale)

    def head(self) -> Head:
        """What makes a teacher's logits, without gradient."""
        bias = None if self.bias is None else self.bias.detach()
        return Head(hidden=self.hidden.flatten(0, 1).detach(), weight=self.weight.detach(), bias=bias, cap=self.cap)

    def top(self, count: int, *, temperature: float = 1.0) -> TopOfDistribution:
        """The ``count`` likeliest ids after each token, and all others together; rows are those of ``hidden``."""
        return top_of_distribution(self.head(), count, vocabulary=self._vocabulary, temperature=temperature)

    def distilled(
        self, labels: Tensor, loss_weights: Tensor, target: Target, *, mix: Mix, backward_scale: float = 1.0
    ) -> DistilledSums:
        """Cross entropy and the divergence from ``target``, whose rows are those of ``hidden``; other arguments as of
        ``cross_entropy``.
        """
        return distilled_cross_entropy(
            self.hidden.flatten(0, 1),
            added_at_once(read_in_forward_alone(self.weight), self.context.weight_gradients),
            labels.t().reshape(-1),
            loss_weights.t().reshape(-1),
            target,
            mix=dataclasses.replace(mix, z_loss=self.z_loss),
            vocabulary=self._vocabulary,
            bias=self.bias,
            cap=self.cap,
            backward_scale=backward_scale,
        )

    def _cross_entropy(self, hidden: Tensor, labels: Tensor, weights: Tensor, backward_scale: float) -> Tensor:
        return linear_cross_entropy(
            hidden,
            added_at_once(read_in_forward_alone(self.weight), self.context.weight_gradients),
            labels,
            weights,
            vocabulary=self._vocabulary,
            bias=self.bias,
            cap=self.cap,
            z_loss=self.z_loss,
            backward_scale=backward_scale,
        )

    @torch.no_grad()
    def token_losses(self, labels: Tensor) -> Tensor:
        """Cross entropy ``[b, S]`` of each token, without gradient."""
        length, batch, _ = self.hidden.shape
        losses = vocab_parallel_token_losses(
            self.hidden.flatten(0, 1),
            self.weight,
            labels.t().reshape(-1),
            vocabulary=self._vocabulary,
            bias=self.bias,
            cap=self.cap,
        )
        return losses.view(length, batch).t()

    @torch.no_grad()
    def token_losses_and_entropies(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy ``[b, S]`` of each token, and the entropy of its distribution in nats, without gradient."""
        length, batch, _ = self.hidden.shape
        found = token_losses_and_entropies(
            self.hidden.flatten(0, 1),
            self.weight,
            labels.t().reshape(-1),
            vocabulary=self._vocabulary,
            bias=self.bias,
            cap=self.cap,
        )
        losses, entropies = (each.view(length, batch).t() for each in found)
        return losses, entropies

    @torch.no_grad()
    def most_likely(self) -> Tensor:
        """The likeliest id ``[b, S]`` after each token, the lowest of several that are equal."""
        length, batch, _ = self.hidden.shape
        ids = vocab_parallel_argmax(
            self.hidden.flatten(0, 1),
            self.weight,
            vocabulary=self._vocabulary,
            bias=self.bias,
            cap=self.cap,
        )
        return ids.view(length, batch).t()

    def tempered(self, temperature: float) -> VocabularyOutput:
        """The output whose logits are divided by ``temperature``."""
        if temperature == 1.0:
            return self
        return dataclasses.replace(
            self,
            hidden=self.hidden / temperature,
            bias=None if self.bias is None else self.bias / temperature,
            cap=None if self.cap is None else self.cap / temperature,
        )

    def where(self, wanted: Tensor) -> VocabularyOutput:
        """The output at the positions that the mask ``[b, S]`` keeps, sample by sample, as a batch of one."""
        return dataclasses.replace(self, hidden=self.hidden.transpose(0, 1)[wanted].unsqueeze(1))

    @torch.no_grad()
    def logits(self, *, last_only: bool = False, positions: Tensor | None = None) -> Tensor:
        """Gathered logits without gradient: ``[b, S, vocabulary]``, or ``[b, vocabulary]`` at the last position or at
        ``positions`` ``[b]``.
        """
        hidden = self.hidden
        if positions is not None:
            hidden = hidden[positions, torch.arange(hidden.shape[1], device=hidden.device)]
        elif last_only:
            hidden = hidden[-1]
        local = linear(hidden, self.weight, self.bias, by=self.context.products.multiply)
        if self.cap is not None:
            local = torch.tanh(local / self.cap) * self.cap
        gathered = all_gather(local, self.context.mesh, "tp", dim=local.dim() - 1)[..., : self.vocab_size]
        return gathered if gathered.dim() == 2 else gathered.transpose(0, 1)

    def logits_with_gradient(self) -> Tensor:
        """Logits ``[b, S, vocabulary]`` of a model on one rank, for losses of a caller's own."""
        assert self.context.mesh.size("tp") == 1, "gathered logits have no gradient"
        logits = linear(self.hidden, self.weight, self.bias)
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits[..., : self.vocab_size].transpose(0, 1)


class OutputLayer(nn.Module):
    """Weights of the output layer.

    ``has_weight``: whether it has a matrix of its own, untied or a tied copy on a later stage; else the one of the word
    embeddings on the same stage serves.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, *, has_weight: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None
        split: Any = {"split": {0: "tp"}, "pad_multiple": config.make_vocab_size_divisible_by}
        tied = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
        matrix = Sharding((config.vocab_size, config.word_width), tied=tied, kind="table", **split)
        self.weight = make_parameter(matrix, table_init(config), context) if has_weight else None
        self.bias = make_parameter(Sharding((config.vocab_size,), **split), Constant(0.0), context) if bias else None


def vocabulary_costs(weight: Tensor, workload: Workload, config: ModelConfig) -> Costs:
    """Costs of ``vocabulary_output`` and its loss, which makes gradients on the way: those of hidden states and
    ``weight`` exist together, and logits by chunks, with the slopes of a soft cap.
    """
    rows, hidden = weight.shape
    wide = max(workload.itemsize, 4)
    each = workload.itemsize + wide * (workload.itemsize < 4) + wide * (config.final_logit_softcapping is not None)
    logits = min(DEVICE_CHUNK // workload.itemsize, rows * workload.tokens) * each
    flops = 2.0 * rows * workload.context.mesh.size("tp") * hidden * workload.predicted * workload.all_tokens
    of_weight = rows * hidden * workload.itemsize * weight.requires_grad
    working = 2 * workload.tokens * hidden * workload.itemsize + of_weight + logits
    return workload.with_unit(weight, Costs.of_product(weight, flops, working=working))


def vocabulary_output(
    x: Tensor, weight: Tensor, config: ModelConfig, context: ModelContext, *, bias: Tensor | None = None
) -> VocabularyOutput:
    """Final hidden states ``[s, b, h]`` as an output over the whole vocabulary. ``bias`` is added to the logits after
    they are multiplied.
    """
    assert config.vocab_size is not None
    if config.logits_multiplier != 1.0:  # a multiple of the hidden states is as good, and smaller than the logits
        x = x * config.logits_multiplier
    cap = config.final_logit_softcapping
    return VocabularyOutput(enter(x, context), weight, config.vocab_size, context, bias, cap, config.z_loss_coeff)


def distillation_bytes(rows: int, workload: Workload, *, tempered: bool) -> int:
    """Bytes that the divergence from a teacher needs beside the cross entropy: a chunk of the teacher's logits and
    their softmax, and with a temperature that of the student's. ``rows``: of the output matrix on this rank.
    """
    wide = max(workload.itemsize, 4)
    each = workload.itemsize + wide * (workload.itemsize < 4) + wide * (1 + tempered)
    return min(DEVICE_CHUNK // workload.itemsize, rows * workload.tokens) * each
