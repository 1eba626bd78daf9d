"""The flags of tasks/main.py and tasks/lm_eval.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from megatron.config.eval_tasks import OF_IMAGES as OF_IMAGES
from megatron.config.eval_tasks import ZERO_SHOT as ZERO_SHOT
from megatron.config.family import FamilyConfig, Purpose, Rule
from megatron.config.flags import flag
from megatron.core.models.bert.config import RULES as BERT_RULES
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.sentences import tokenizer_can_mask


@dataclass(frozen=True)
class AnswerShape:
    """The answers of a fine-tuning task: one of ``classes`` for a pair of texts or, with 1 class, one of ``choices``.

    ``longest_first``: maximum number of tokens of the first text.
    """

    choices: int
    classes: int
    longest_first: int | None = None


FINE_TUNING = {
    "RACE": AnswerShape(choices=4, classes=1, longest_first=128),
    "MNLI": AnswerShape(choices=1, classes=3),
    "QQP": AnswerShape(choices=1, classes=2),
}
_RETRIEVAL = "retrieval models are outside this project"


def fine_tuned_name(task: str) -> str:
    """The name in checkpoints of a BERT with a head for ``task``."""
    return f"bert-{task.lower()}"


class OwnDataConfig(Purpose):
    """Base of the settings of commands whose samples don't come from ``--data-path``."""

    @property
    @override
    def reads_own_data(self) -> bool:
        """Whether samples are the task's own: always, from ``--train-data`` and ``--valid-data`` or the harness."""
        return True

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of every task."""
        from tasks.rules import tasks_read_their_own_data

        return (tasks_read_their_own_data,)


class HarnessConfig(OwnDataConfig):
    """Settings of lm-evaluation-harness's model alone; tasks/lm_eval.py."""

    max_gen_toks: int = flag("Tokens to generate for tasks that set no limit.", default=256, at_least=1)
    add_bos_token: bool = flag("Begin texts with the tokenizer's first token.", default=False)


class TaskConfig(OwnDataConfig):
    """Flags of tasks/main.py alone."""

    task: Literal["WIKITEXT103", "LAMBADA", "LM", "CAPTION", "VQA", "RACE", "MNLI", "QQP"] = flag(
        "Task to run.",
        refused_values={
            "ICT-ZEROSHOT-NQ": _RETRIEVAL,
            "RETRIEVER-EVAL": _RETRIEVAL,
            "RET-FINETUNE-NQ": _RETRIEVAL,
        },
    )
    train_data: tuple[str, ...] = flag("Files or folders to train on, for tasks that train.", default=())
    valid_data: tuple[str, ...] = flag("Files or folders to measure on.", default=())
    epochs: int | None = flag(
        "Passes over --train-data, for tasks that train; 0 only evaluates.", default=None, at_least=0
    )
    keep_last: bool = flag(
        "RACE, MNLI and QQP: also train on the samples that don't fill a batch, which always happens here. "
        "--keep-last-checkpoints sets how many checkpoints are kept.",
        default=False,
    )
    overlapping_eval: int | None = flag(
        "WIKITEXT103 and LM: stride of the windows over the text, in tokens; a smaller stride gives scored tokens "
        "more context. Unless given: 32 for WIKITEXT103, half of --seq-length for LM.",
        default=None,
        at_least=1,
    )
    strict_lambada: bool = flag("LAMBADA: the whole last word, not its last token, must be predicted.", default=False)
    json_key: str = flag("LM: field of a JSON line that holds the text.", default="text")
    image_folder: str | None = flag(
        "CAPTION and VQA: folder that names of images are relative to, and don't leave; unless given, that of each "
        "file of --valid-data.",
        default=None,
    )
    without_images: bool = flag(
        "CAPTION and VQA: also ask without the images; both scores are printed side by side.", default=False
    )
    tokens_to_generate: int = flag("CAPTION and VQA: maximum number of tokens of an answer.", default=32, at_least=1)
    chat_template: str | None = flag(
        "CAPTION and VQA: file of the Jinja template that writes questions, in place of the one that the checkpoint "
        "keeps.",
        default=None,
    )
    predictions_dir: str | None = flag(
        "RACE, MNLI and QQP with --epochs 0: folder for the predictions, one NAME.tsv in GLUE's format for each "
        "set of --valid-data; the sets may be test sets without labels. CAPTION and VQA: one NAME.jsonl for each file.",
        default=None,
    )
    result_file: str | None = flag("JSON file for the result, with its data, checkpoint and settings.", default=None)

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about the flags of the task; for fine-tuning also those about BERT's samples."""
        from tasks.rules import FINE_TUNING_RULES, IMAGE_RULES, TASK_RULES, ZERO_SHOT_RULES

        if self.task in OF_IMAGES:
            return (*TASK_RULES, *IMAGE_RULES)
        if self.answers is None:
            return (*TASK_RULES, *ZERO_SHOT_RULES)
        return (*TASK_RULES, *FINE_TUNING_RULES, *BERT_RULES, tokenizer_can_mask)

    @override
    def remarks(self) -> Sequence[Rule]:
        """Remarks about flags of training that fine-tuning doesn't read."""
        from tasks.rules import epochs_set_the_pace

        return () if self.answers is None else (epochs_set_the_pace,)

    @property
    def answers(self) -> AnswerShape | None:
        """The answers that a BERT is fine-tuned for; None for a task that trains nothing."""
        return FINE_TUNING.get(self.task)

    @property
    @override
    def only_evaluates(self) -> bool:
        """Whether nothing is trained: no fine-tuning, or no epochs of it."""
        return self.only_reads or not self.epochs

    @property
    @override
    def only_reads(self) -> bool:
        """Whether nothing is fine-tuned."""
        return self.answers is None

    @property
    @override
    def trains_in_epochs(self) -> bool:
        """Whether the run trains in epochs, as all fine-tuning does."""
        return self.answers is not None

    @property
    @override
    def sequences_per_sample(self) -> int:
        """One for each choice."""
        return 1 if self.answers is None else self.answers.choices


class FineTunedBertConfig(FamilyConfig):
    """Facts about a BERT with a head for answers in place of its own."""

    name: ClassVar[str] = BertConfig.name
    title: ClassVar[str] = BertConfig.title
    position_embedding_types: ClassVar[tuple[str, ...]] = BertConfig.position_embedding_types
    window_sides: ClassVar[int] = BertConfig.window_sides
    usual_tokenizer: ClassVar[str | None] = BertConfig.usual_tokenizer
    fields_of_others: ClassVar[tuple[str, ...]] = BertConfig.fields_of_others
