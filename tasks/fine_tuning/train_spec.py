"""Training of BERT with a classification or multiple-choice head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.models.bert.data import check_marks_texts
from megatron.core.models.bert.train_spec import TEXT_MASK, run_bert, with_text_mask
from megatron.core.models.stage_inputs import hidden_stage_inputs, workload_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.moe.balancing import router_counts
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import MaskingTokenizer, Tokenizer
from megatron.core.transformer.block import RecomputePlan
from tasks.fine_tuning.dataset import EpochsDataset, LabelledDataset, PairLayout
from tasks.fine_tuning.files import LabelledTexts
from tasks.fine_tuning.model import AnswerLogits, BertClassifier
from tasks.settings import AnswerShape, TaskConfig, fine_tuned_name

LOSS, ACCURACY = "lm loss", "accuracy"  # Megatron-LM's name of every loss, which log parsers know


@dataclass(frozen=True)
class LabelledData:
    """Texts to train on, None if nothing is trained, and sets to evaluate on, by name.

    The samples of the latter are numbered through, one set after the other.
    """

    train: LabelledTexts | None = None
    valid: Mapping[str, LabelledTexts] = field(default_factory=dict)


class ClassificationSpec(TrainSpec):
    """Cross entropy of the right answer, and how often it is the likeliest one.

    ``task``: part of the name, because a head belongs to one task. ``note``: called with the numbers of samples, −1 for
    padding of a batch, and their logits ``[b, answers]``, on the ranks that have them.
    """

    starts_from: Mapping[str, tuple[str, ...]] = {"bert": ("classification_head.", "multichoice_head.", "pooler.")}
    batch_fields: Mapping[str, int | None] = {
        "text": 2,
        "types": 2,
        "attention_mask": None,
        "label": None,
        "number": None,
        TEXT_MASK: 2,
    }

    def __init__(self, task: str, data: LabelledData, *, note: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self.name = fine_tuned_name(task)
        self._data, self._note = data, note

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The loss, the accuracy, and the losses of routers."""
        return (LOSS, ACCURACY, *run.part(MoEConfig).loss_names)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens and types for the embedding, label and number for the answer, and what is padding for every layer."""
        first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        return frozenset(
            {
                "attention_mask",
                *([TEXT_MASK] if run.part(MoEConfig).leaves_padding_out else []),
                *(["text", "types"] if first else []),
                *(["label", "number"] if last else []),
            }
        )

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Add which tokens are sent to experts: all but padding."""
        return with_text_mask(batch, run)

    @override
    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> dict[str, TensorSpec]:
        """Hidden states ``[s, b·choices, h]``."""
        return hidden_stage_inputs(run, stage, context, sequences=_answers(run.group(TaskConfig)).choices)

    @override
    def build_model(
        self,
        model: ModelConfig,
        groups: Sequence[object],
        context: ModelContext,
        *,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> BertClassifier:
        """The stage's part of the BERT."""
        classes = _answers(TaskConfig.among(groups)).classes
        return BertClassifier(
            model,
            context,
            classes=classes,
            token_types=TokenTypesConfig.among(groups).num_tokentypes,
            moe=MoEConfig.among(groups),
            lora=LoraConfig.among(groups),
            stage=stage,
            recompute=recompute,
            seed=seed,
        )

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        return run_bert(model, stage_inputs, microbatch)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the labelled samples, and the number of right answers."""
        assert isinstance(output, AnswerLogits)
        label, logits = microbatch.tensors["label"], output.values
        counted = _counted(label, output.context)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._note is not None and output.context.mesh.rank("cp") == 0:
            self._note(microbatch.tensors["number"], wide)
        losses = cross_entropy(wide, label.clamp(min=0), reduction="none")
        correct = (wide.argmax(dim=1) == label) & counted
        total, count = (losses * counted).sum(), counted.sum()
        parts = {LOSS: total.detach(), ACCURACY: correct.sum()}
        return LossSum(
            total,
            count,
            {name: torch.stack((each.to(total.dtype), count.to(total.dtype))) for name, each in parts.items()},
        )

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """Number of labelled samples, and of the tokens that routers' losses are means over."""
        if "label" not in microbatch.tensors:
            return {}
        tensors = microbatch.tensors
        found = dict.fromkeys((LOSS, ACCURACY), _counted(tensors["label"], context).sum())
        here = tensors["attention_mask"][..., : tensors["attention_mask"].shape[-1] // context.mesh.size("cp")]
        return found | router_counts(tensors.get(TEXT_MASK), here)

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Epochs of the training texts, and each validation set by its name."""
        check_marks_texts(tokenizer)
        layout = PairLayout(
            run.data.seq_length,
            cast("MaskingTokenizer", tokenizer),
            longest_first=_answers(run.group(TaskConfig)).longest_first,
        )
        train = None
        if self._data.train is not None and not run.training.skip_train:
            train = EpochsDataset(
                LabelledDataset(self._data.train, layout),
                epochs=run.group(TaskConfig).epochs or 0,
                batch=run.training.global_batch_size,
                seed=run.training.seed,
            )
        valid, number = {}, 0
        for name, texts in self._data.valid.items():
            valid[name] = LabelledDataset(texts, layout, first_number=number)
            number += len(texts.texts)
        return DatasetSplits(train, None, None, valid)

    @override
    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        """Padded texts, a sequence for each choice."""
        return workload_of(run, context, sequences=_answers(run.group(TaskConfig)).choices, has_padding=True)


def _answers(task: TaskConfig) -> AnswerShape:
    answers = task.answers
    assert answers is not None, "a rule refuses other tasks"
    return answers


def _counted(label: Tensor, context: ParallelContext) -> Tensor:
    """Labelled samples ``[b]``, on the context-parallel rank that has their first token."""
    return label >= 0 if context.mesh.rank("cp") == 0 else torch.zeros_like(label, dtype=torch.bool)
