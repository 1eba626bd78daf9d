"""Multi-token prediction: further layers, one after another, that each predict one token more ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.datasets.samples import TEXT_LENGTH
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.regions import enter
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.stack import StackConfig

TOKENS, LABELS, MASK, TEXT = "mtp_tokens", "mtp_labels", "mtp_loss_mask", "mtp_text_mask"
"""Fields of a batch: what each depth reads beside hidden states, what it predicts, where that counts for the loss, and
where both are of the position's own text.
"""


def loss_name(depth: int) -> str:
    """Megatron-LM's name of the loss of ``depth``, counted from 0."""
    return f"mtp_{depth + 1} loss"


def shifted_fields(batch: Mapping[str, Tensor], depths: int) -> dict[str, Tensor]:
    """``TOKENS``, ``LABELS``, ``MASK`` and ``TEXT`` ``[b, depths, S]`` of whole sequences: those of ``batch``
    ``[b, S]``, one position earlier at each depth. What would come from beyond the text or from another document
    doesn't count, and is no text.
    """
    found: dict[str, list[Tensor]] = {TOKENS: [], LABELS: [], MASK: [], TEXT: []}
    documents, is_text = batch.get("document_ids"), text_mask(batch)
    for shift in range(1, depths + 1):
        tokens, labels, mask = (_earlier(batch[name], shift) for name in ("tokens", "labels", "loss_mask"))
        text = _earlier(is_text, shift)
        if documents is not None:
            same = _earlier(documents, shift) == documents
            mask, text = mask * same, text & same
        for name, each in zip(found, (tokens, labels, mask, text)):
            found[name].append(each)
    return {name: torch.stack(each, dim=1) for name, each in found.items()}


def text_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Which positions of the sequences of ``batch`` are text, ``[b, S]``; the others are padding."""
    samples, length = batch["tokens"].shape
    lengths = batch.get(TEXT_LENGTH, torch.full((samples,), length))
    return torch.arange(length) < lengths.unsqueeze(1)


def _earlier(x: Tensor, shift: int) -> Tensor:
    """``x`` ``[b, S]`` from position ``shift`` on, and zeros."""
    return nn.functional.pad(x[:, shift:], (0, shift))


class MultiTokenLayer(nn.Module):
    """One depth (DeepSeek-V3, arXiv:2412.19437, section 2.2): hidden states of the depth before and the embedding of a
    future token, normalized and projected together, through a transformer layer and a norm.

    ``number``: of its layer, which comes after those of the model. A hybrid has several layers, of one mixer each.
    """

    def __init__(self, stack: StackConfig, context: ModelContext, *, number: int, recompute: RecomputePlan) -> None:
        super().__init__()
        model = stack.model
        self._context, self._stream_is_fp32 = context, model.fp32_residual_connection
        self._recompute, self._hidden_size = recompute.granularity == "full", model.hidden_size
        self.enorm = Norm(model.hidden_size, model, context)
        self.hnorm = Norm(model.hidden_size, model, context)
        init = input_init(model)
        self.eh_proj = RowParallelLinear(2 * model.hidden_size, model.hidden_size, context, init=init, bias=False)
        numbers, selected = range(number, number + stack.layers_per_depth), recompute.selected
        layers = [TransformerLayer(stack, context, number=each, recompute=selected) for each in numbers]
        if len(layers) == 1:
            (self.transformer_layer,) = layers
        else:
            self.layers = nn.ModuleList(layers)
        self.final_layernorm = Norm(model.hidden_size, model, context)

    @override
    def forward(self, hidden: Tensor, embedded: Tensor, inputs: LayerInputs) -> Tensor:
        """Hidden states of the depth before and embeddings, ``[s, b, h]`` each, to this depth's, normalized."""
        if self._recompute and self.training:
            return recomputed(self._run, hidden, embedded, inputs)
        return self._run(hidden, embedded, inputs)

    def _run(self, hidden: Tensor, embedded: Tensor, inputs: LayerInputs) -> Tensor:
        mesh = self._context.mesh
        both = enter(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1), self._context)
        mine = both.chunk(mesh.size("tp"), dim=-1)[mesh.rank("tp")].contiguous()
        x: Tensor = self.eh_proj(mine)
        if self._stream_is_fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        for layer in self._layers:
            x = layer(x, inputs)
        normed: Tensor = self.final_layernorm(x)
        return normed

    @property
    def _layers(self) -> Sequence[nn.Module]:
        return list(self.layers) if "layers" in self._modules else [self.transformer_layer]

    def costs(self, workload: Workload) -> Costs:
        """Costs of the parts. A recomputed layer keeps its two inputs."""
        own = (self.enorm, self.hnorm, self.eh_proj)
        found = total_of((*own, *self._layers, self.final_layernorm), workload)
        if not self._recompute:
            return found
        given = workload.rows * self._hidden_size * (workload.itemsize + workload.stream_itemsize)
        return found.recomputed(given, keeps_input=True)


class MultiTokenPrediction(nn.Module):
    """All depths, on the last stage. ``layers``: by depth, counted from 0."""

    def __init__(self, stack: StackConfig, context: ModelContext, *, recompute: RecomputePlan) -> None:
        super().__init__()
        first, size = stack.model.num_layers, stack.layers_per_depth
        self.layers = nn.ModuleDict(
            {
                str(depth): MultiTokenLayer(stack, context, number=first + depth * size, recompute=recompute)
                for depth in range(stack.model.mtp_num_layers)
            }
        )
