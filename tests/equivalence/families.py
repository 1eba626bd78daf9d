"""The families of models in the equivalence table: how each is built and what it learns from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import experts_of
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.conversion.portable import PortableModel
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.bert.model import BertModel
from megatron.core.models.bert.train_spec import ORDER, WORDS, BertSpec
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.registry import family_of
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.models.t5.train_spec import T5Spec
from megatron.core.models.train_spec import TrainSpec
from megatron.core.moe.layer import layer_metrics
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import Microbatch, TensorSpec
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, Branch, StackConfig
from tasks.fine_tuning.model import BertClassifier
from tasks.fine_tuning.train_spec import ACCURACY, LOSS, ClassificationSpec, LabelledData

GLOBAL_BATCH, LENGTH, VOCABULARY = 8, 16, 67
"""The vocabulary is prime, so that it divides at no layout."""


@dataclass(frozen=True)
class Family:
    """``batch``: the global batch of a step. ``losses``: their names; ``optional``: fields that only some variants use;
    ``sequences``: of a sample.

    ``build``: the model from its config, context, and keywords ``stage``, ``recompute`` and ``seed``. ``stage_inputs``:
    of a stage that isn't the first, for a function from length to hidden states. ``more_layers``: those that the
    model has besides its config's. ``layer_metrics``: what its layers count.
    """

    train_spec: TrainSpec
    build: Callable[..., nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    losses: tuple[str, ...]
    optional: tuple[str, ...] = ()
    sequences: int = 1
    stage_inputs: Callable[[ModelConfig, Stage, Callable[[int], TensorSpec]], dict[str, TensorSpec]] = (
        lambda config, stage, hidden: {"hidden": hidden(LENGTH)}
    )
    more_layers: int = 0
    layer_metrics: Callable[[ModelConfig], dict[str, int]] = lambda model: {}


def causal_batch(step: int) -> dict[str, Tensor]:
    """Tokens, labels, a random loss mask with one sample masked out whole, documents, and samples of many lengths, one
    of which is all padding.
    """
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(GLOBAL_BATCH, LENGTH, generator=generator) > 0.3).double()
    mask[3] = 0.0
    if step == 1:  # a context-parallel rank, of two, without a token to learn from
        mask[:, : LENGTH // 4] = mask[:, -LENGTH // 4 :] = 0.0
    boundary = torch.rand(GLOBAL_BATCH, LENGTH, generator=generator) < 0.15
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "document_ids": boundary.int().cumsum(1).int(),
        "text_mask": torch.arange(LENGTH) < torch.tensor([16, 3, 9, 12, 16, 0, 7, 15]).unsqueeze(1),
    }


MASKS = ("document_ids", "text_mask", "mtp_text_mask")
"""Fields of a causal batch that only some variants use."""


def later_batch(step: int) -> dict[str, Tensor]:
    """``causal_batch`` with two future tokens, position by position: none from beyond the sequence or the document."""
    batch = causal_batch(step)
    found = {name: torch.zeros(GLOBAL_BATCH, 2, LENGTH, dtype=torch.int64) for name in ("mtp_tokens", "mtp_labels")}
    found["mtp_text_mask"] = torch.zeros(GLOBAL_BATCH, 2, LENGTH, dtype=torch.bool)
    found["mtp_loss_mask"] = torch.zeros(GLOBAL_BATCH, 2, LENGTH, dtype=torch.float64)
    for sample, depth, place in itertools.product(range(GLOBAL_BATCH), range(2), range(LENGTH)):
        source = place + depth + 1
        if source < LENGTH:
            at = (sample, depth, place)
            found["mtp_tokens"][at] = batch["tokens"][sample, source]
            found["mtp_labels"][at] = batch["labels"][sample, source]
            documents = batch["document_ids"][sample]
            if documents[source] == documents[place]:
                found["mtp_text_mask"][at] = batch["text_mask"][sample, source]
                found["mtp_loss_mask"][at] = batch["loss_mask"][sample, source]
    return batch | found


def masked_batch(step: int) -> dict[str, Tensor]:
    """Samples of many lengths, few words of them hidden; one counts for nothing, in text or order.

    Some samples are so short that a context-parallel rank holds nothing of them but padding.
    """
    generator = torch.Generator().manual_seed(200 + step)
    shape = (GLOBAL_BATCH, LENGTH)
    positions, lengths = torch.arange(LENGTH), torch.tensor([16, 3, 9, 12, 16, 4, 7, 15]).unsqueeze(1)
    real = positions < lengths
    hidden = (torch.rand(*shape, generator=generator) < 0.3) & real
    hidden[3] = False
    if step == 1:
        hidden[:, LENGTH // 4 : -LENGTH // 4] = False
    exchanged = torch.randint(2, (GLOBAL_BATCH,), generator=generator)
    exchanged[3] = -1
    return {
        "text": torch.randint(VOCABULARY, shape, generator=generator) * real,
        "types": ((positions >= lengths // 2) & real).long(),
        "labels": torch.where(hidden, torch.randint(VOCABULARY, shape, generator=generator), -1),
        "loss_mask": hidden.long(),
        "attention_mask": real.long(),
        "is_random": exchanged,
    }


def labelled_batch(step: int, *, choices: int, answers: int) -> dict[str, Tensor]:
    """Samples of ``choices`` sequences of many lengths, some of which count for nothing."""
    generator = torch.Generator().manual_seed(300 + step)
    shape = (GLOBAL_BATCH, choices, LENGTH)
    positions, lengths = torch.arange(LENGTH), torch.randint(3, LENGTH + 1, (*shape[:2], 1), generator=generator)
    real = positions < lengths
    label = torch.randint(answers, (GLOBAL_BATCH,), generator=generator)
    label[3] = label[6] = -1
    return {
        "text": torch.randint(VOCABULARY, shape, generator=generator) * real,
        "types": ((positions >= lengths // 2) & real).long(),
        "attention_mask": real.long(),
        "label": label,
    }


def answering(*, choices: int, classes: int) -> Family:
    """A BERT that answers."""
    return Family(
        ClassificationSpec("a task", LabelledData()),
        functools.partial(BertClassifier, classes=classes),
        functools.partial(labelled_batch, choices=choices, answers=choices * classes),
        (LOSS, ACCURACY),
        sequences=choices,
    )


T5_SETTINGS: dict[str, Any] = {"decoder_seq_length": LENGTH // 2, "relative_attention_max_distance": 12}
T5_SETTINGS |= {"relative_attention_num_buckets": 8, "decoder_num_layers": 3}


def span_batch(step: int) -> dict[str, Tensor]:
    """Texts of many lengths, and answers, half as long; one sample counts for nothing."""
    generator = torch.Generator().manual_seed(300 + step)
    shape, answers = (GLOBAL_BATCH, LENGTH), (GLOBAL_BATCH, LENGTH // 2)
    real = torch.arange(LENGTH) < torch.tensor([16, 3, 9, 12, 16, 4, 7, 15]).unsqueeze(1)
    spoken = torch.arange(LENGTH // 2) < torch.tensor([8, 2, 6, 8, 5, 3, 4, 7]).unsqueeze(1)
    mask = spoken.clone()
    mask[3] = False
    if step == 1:  # a context-parallel rank, of two, without a token to learn from
        mask[:, : LENGTH // 8] = mask[:, -LENGTH // 8 :] = False
    return {
        "text_enc": torch.randint(VOCABULARY, shape, generator=generator) * real,
        "enc_mask": real.long(),
        "text_dec": torch.randint(VOCABULARY, answers, generator=generator) * spoken,
        "labels": torch.where(spoken, torch.randint(VOCABULARY, answers, generator=generator), -1),
        "loss_mask": mask.long(),
    }


def t5_model(config: ModelConfig, context: ParallelContext, **options: Any) -> T5Model:
    """A decoder of three layers; with relative positions its output is scaled where it is tied, as the original's."""
    tied = not config.untie_embeddings_and_output_weights
    scale = tied and config.position_embedding_type == "relative"
    return T5Model(config, T5Config(**T5_SETTINGS, scale_output=scale), context, **options)


def t5_wires(config: ModelConfig, stage: Stage, hidden: Callable[[int], TensorSpec]) -> dict[str, TensorSpec]:
    """Hidden states of the encoder, or those of the decoder and what the encoder made."""
    if stage.layers.start <= config.num_layers:
        return {"hidden": hidden(LENGTH)}
    return {"hidden": hidden(LENGTH // 2), "encoder_hidden_states": hidden(LENGTH)}


class GatedFeedForward(nn.Module):
    """A feed-forward network scaled token by token, whose gate has a loss of its own, as a router's is."""

    def __init__(self, place: BranchPlace) -> None:
        super().__init__()
        config, self._context = place.stack.model, place.context
        self.gate = ReplicatedLinear(config.hidden_size, 4, place.context, init=input_init(config))
        self.inner = MLP(config, place.context)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        shares = self.gate(x).softmax(-1)
        total, tokens = 4 * shares.square().sum(), shares[..., 0].numel()
        out = self.inner(x, inputs) * shares[..., :1]
        return inputs.side_losses.add(out, GATE, total, tokens, context=self._context, coefficient=0.7)


GATE = "gate loss"
GATED = Branch("gated_mlp", "pre_gate_layernorm", "gated mlp", GatedFeedForward)


class GatedSpec(GPTSpec):
    """GPT with a side loss, a mean over all tokens in every second layer."""

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The gates', too."""
        return ("lm loss", GATE)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """All tokens have a gate."""
        found, labels = super().counts(microbatch, context), microbatch.tensors.get("labels")
        return found if labels is None else found | {GATE: torch.tensor(labels.numel())}


def gated_model(config: ModelConfig, context: ParallelContext, **options: Any) -> GPTModel:
    """Layers of two kinds in turn: attention with a plain feed-forward network, and a gated one alone."""
    stack = StackConfig(config, causal=True, pattern=((SELF_ATTENTION, FEED_FORWARD), (GATED,)))
    return GPTModel(config, context, stack=stack, **options)


def arranged_model(config: ModelConfig, context: ParallelContext, **options: Any) -> GPTModel:
    """Layers with norms before and after, only after, and in parallel behind one norm or two, with a scale."""
    attention, mlp = functools.partial(replace, SELF_ATTENTION), functools.partial(replace, FEED_FORWARD)
    after_attention, after_mlp = "post_self_attn_layernorm", "post_mlp_layernorm"
    pattern = (
        (attention(norm_after=after_attention), mlp(norm_after=after_mlp)),
        (attention(norm=None, norm_after=after_attention), mlp(norm=None, norm_after=after_mlp)),
        (attention(scale=0.5), mlp(norm="input_layernorm", parallel=True, scale=0.5)),
        (SELF_ATTENTION, mlp(parallel=True)),
    )
    return GPTModel(config, context, stack=StackConfig(config, causal=True, pattern=pattern), **options)


FAMILIES = {
    "arranged": Family(GPTSpec(), arranged_model, causal_batch, ("lm loss",), optional=MASKS),
    "gated": Family(GatedSpec(), gated_model, causal_batch, ("lm loss", GATE), optional=MASKS),
    "gpt, future tokens": Family(
        GPTSpec(), GPTModel, later_batch, ("lm loss", "mtp_1 loss", "mtp_2 loss"), optional=MASKS
    ),
    "gpt": Family(GPTSpec(), GPTModel, causal_batch, ("lm loss",), optional=MASKS),
    "bert": Family(BertSpec(), BertModel, masked_batch, (WORDS, ORDER)),
    "classes": answering(choices=1, classes=3),
    "choices": answering(choices=4, classes=1),
    "t5": Family(
        T5Spec(),
        t5_model,
        span_batch,
        ("lm loss",),
        stage_inputs=t5_wires,
        more_layers=T5_SETTINGS["decoder_num_layers"],
    ),
}


def family_of_published(portable: PortableModel) -> Family:
    """That of a published model, which is built with its own settings and has its losses."""
    groups, spec = portable.groups, family_of(portable.groups).train_spec
    family = FAMILIES[family_of(groups).name]
    has_order = any(group.bert_binary_head for group in groups if isinstance(group, BertConfig))
    return replace(
        family,
        build=lambda model, context, **options: spec.build_model(model, groups, context, **options),
        losses=tuple(name for name in family.losses if name != ORDER or has_order),
        more_layers=portable.num_layers - portable.model.num_layers,
    )


def family_with_groups(family: Family, groups: tuple[FamilyConfig, ...]) -> Family:
    """``family`` with settings of its own, such as those of experts, and the losses that follow from them."""
    if not groups:
        return family
    return replace(
        family,
        build=lambda model, context, **options: family.train_spec.build_model(
            model, [group.resolved(model, NO_DATA) for group in groups], context, **options
        ),
        losses=(*family.losses, *experts_of(groups).loss_names),
        layer_metrics=lambda model: layer_metrics(experts_of(groups), model),
    )


NO_DATA = DataConfig(seq_length=LENGTH)
