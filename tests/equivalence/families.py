"""What the table's rows train: families of models with batches of their own, in which samples differ in all ways."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.run import RunConfig
from megatron.config.vision import VisionConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.samples import Sample
from megatron.core.datasets.splits import SplitSizes
from megatron.core.images.expansion import ROW_END
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.models.bert.train_spec import BertSpec
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.train_spec import T5Spec
from megatron.core.models.train_spec import TrainSpec
from megatron.core.models.vlm.fields import IMAGES, PLACES
from megatron.core.models.vlm.train_spec import VLMSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, Branch, StackConfig
from tasks.fine_tuning.train_spec import ClassificationSpec, LabelledData
from tasks.settings import FINE_TUNING, FineTunedBertConfig, TaskConfig
from tests.selection import STEPS_OF_THE_TABLE

GLOBAL_BATCH, LENGTH, VOCABULARY = 8, 16, 67
"""The vocabulary is prime, so that it divides at no layout."""
STEPS = int(os.environ.get(STEPS_OF_THE_TABLE, "2"))
"""The second one sees what the first one leaves: weights, moments, biases, scales. The whole tier takes a third."""


class Batches:
    """The samples of the table's global batches, one batch after the other: a :class:`SourceDataset`."""

    digest = prefix = "the equivalence table"

    def __init__(self, batch: Callable[[int], Mapping[str, Sequence[Any] | Tensor]]) -> None:
        self._batches = [batch(step) for step in range(STEPS)]

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int | None) -> Sample:
        step, sample = divmod(index or 0, GLOBAL_BATCH)
        return {name: np.asarray(each[sample]) for name, each in self._batches[step].items()}

    def origin(self, index: int) -> str:
        """The table."""
        return self.prefix

    def describe(self) -> list[str]:
        """The table."""
        return [self.prefix]

    def prepare(self) -> None:
        """Does nothing: samples are in memory."""

    def with_samples(self, num_samples: int) -> Batches:
        """The same samples, of which there is one number."""
        assert num_samples == len(self)
        return self


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


def image_batch(step: int, *, size: int, features: int, row_ends: bool = False) -> dict[str, Sequence[Any] | Tensor]:
    """The causal batch with images of ``size`` pixels a side in some samples, one or two, at its beginning, end or
    middle; two samples of a microbatch have none. ``row_ends``: some places are those of the vector at ends of rows.
    """
    generator = torch.Generator().manual_seed(400 + step)
    found: dict[str, Sequence[Any] | Tensor] = {**causal_batch(step)}
    places, images = torch.full((GLOBAL_BATCH, LENGTH), -1), list[Tensor]()
    starts: tuple[list[int], ...] = ([0], [], [1, LENGTH // 2], [LENGTH - features], [], [], [5], [LENGTH // 2, 0])
    for sample, runs in enumerate(starts[step:] + starts[:step]):
        for tile, start in enumerate(runs):
            places[sample, start : start + features] = tile * features + torch.arange(features)
            if row_ends:
                places[sample, start + 1] = ROW_END
        images.append(torch.randint(256, (len(runs), 3, size, size), dtype=torch.uint8, generator=generator))
    return found | {PLACES: places, IMAGES: images}


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
        "dec_mask": spoken.long(),
    }


class GatedFeedForward(nn.Module):
    """A feed-forward network scaled token by token, whose gate has a loss of its own, as a router's is."""

    def __init__(self, place: BranchPlace) -> None:
        super().__init__()
        config, self._context = place.stack.model, place.context
        self.gate = ReplicatedLinear(config.hidden_size, 4, place.context, init=input_init(config))
        self.inner = MLP(place)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        shares = self.gate(x).softmax(-1)
        total, tokens = 4 * shares.square().sum(), shares[..., 0].numel()
        out = self.inner(x, inputs) * shares[..., :1]
        return inputs.side_losses.add(out, GATE, total, tokens, context=self._context, coefficient=0.7)


GATE = "gate loss"
GATED = Branch("gated_mlp", "pre_gate_layernorm", "gated mlp", GatedFeedForward)


PLAIN, GATED_LAYERS = (SELF_ATTENTION, FEED_FORWARD), (GATED,)


class CausalSpec(GPTSpec):
    """GPT on the table's batches."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        return DatasetSplits(Batches(causal_batch), None, None)


class PatternSpec(CausalSpec):
    """GPT with a pattern of layers of its own."""

    pattern: tuple[tuple[Branch, ...], ...]

    @override
    def build_model(
        self, model: ModelConfig, groups: Sequence[object], context: ModelContext, **options: Any
    ) -> nn.Module:
        return GPTModel(model, context, stack=StackConfig(model, causal=True, pattern=self.pattern), **options)


class GatedSpec(PatternSpec):
    """Layers of two kinds in turn, a plain one and a gated one alone, whose side loss is a mean over all tokens."""

    pattern = (PLAIN, GATED_LAYERS)

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        return ("lm loss", GATE)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        found, labels = super().counts(microbatch, context), microbatch.tensors.get("labels")
        return found if labels is None else found | {GATE: torch.tensor(labels.numel())}


class ArrangedSpec(PatternSpec):
    """Layers with norms before and after, only after, and in parallel behind one norm or two, with a scale."""

    pattern = (
        (
            replace(SELF_ATTENTION, norm_after="post_self_attn_layernorm"),
            replace(FEED_FORWARD, norm_after="post_mlp_layernorm"),
        ),
        (
            replace(SELF_ATTENTION, norm=None, norm_after="post_self_attn_layernorm"),
            replace(FEED_FORWARD, norm=None, norm_after="post_mlp_layernorm"),
        ),
        (replace(SELF_ATTENTION, scale=0.5), replace(FEED_FORWARD, norm="input_layernorm", parallel=True, scale=0.5)),
        (SELF_ATTENTION, replace(FEED_FORWARD, parallel=True)),
    )


class MaskedSpec(BertSpec):
    """BERT on the table's batches."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        return DatasetSplits(Batches(masked_batch), None, None)


class SpanSpec(T5Spec):
    """T5 on the table's batches."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        return DatasetSplits(Batches(span_batch), None, None)


class ImageSpec(VLMSpec):
    """A vision-language model on the table's batches."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        vision = run.part(VisionConfig)
        batch = functools.partial(
            image_batch, size=vision.img_h, features=vision.features_per_tile, row_ends=bool(vision.image_grids)
        )
        return DatasetSplits(Batches(batch), None, None)


class AnswerSpec(ClassificationSpec):
    """A BERT that answers, on the table's batches."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        answers = FINE_TUNING[run.group(TaskConfig).task]
        batch = functools.partial(labelled_batch, choices=answers.choices, answers=answers.choices * answers.classes)
        return DatasetSplits(Batches(batch), None, None)


@dataclass(frozen=True)
class Family:
    """A kind of run. ``groups``: of its flags, ``flags``: those of every row; ``settings``: of its command, which has
    rules about files.
    """

    train_spec: TrainSpec
    groups: tuple[type, ...] = FAMILIES["gpt"].groups
    flags: str = ""
    settings: tuple[object, ...] = ()


def fine_tuning(task: Literal["MNLI", "RACE"]) -> Family:
    """A BERT that learns to answer."""
    groups = (FineTunedBertConfig, TokenTypesConfig, MoEConfig)
    return Family(AnswerSpec(task, LabelledData()), groups, settings=(TaskConfig(task=task, epochs=1),))


ROW_FAMILIES: Mapping[str, Family] = {
    "gpt": Family(CausalSpec()),
    "gated": Family(GatedSpec()),
    "arranged": Family(ArrangedSpec()),
    "bert": Family(MaskedSpec(), FAMILIES["bert"].groups),
    "classes": fine_tuning("MNLI"),
    "choices": fine_tuning("RACE"),
    "vlm": Family(
        ImageSpec(),
        FAMILIES["vlm"].groups,
        "--vision-num-layers 2 --vision-hidden-size 16 --vision-num-attention-heads 4 --vision-ffn-hidden-size 24 "
        "--img-h 8 --img-w 8 --patch-dim 4",
    ),
    "t5": Family(
        SpanSpec(),
        FAMILIES["t5"].groups,
        f"--decoder-seq-length {LENGTH // 2} --decoder-num-layers 3",
    ),
}
"""By the word that begins a row."""
