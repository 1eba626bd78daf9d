"""Predictions of a fine-tuned model in GLUE's format, also for test sets without labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.files.durable import write_errors
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from tasks.fine_tuning.files import ANSWERS, LabelledTexts
from tasks.settings import TaskConfig


class Predictions:
    """Answers by the number of the text; each rank has those that it has computed, and 0 for the others."""

    def __init__(self, task: TaskConfig, sets: Mapping[str, LabelledTexts], device: torch.device) -> None:
        assert task.predictions_dir is not None
        self._folder, self._answers, self._sets = Path(task.predictions_dir), ANSWERS[task.task], sets
        self._found = torch.zeros(sum(len(texts.texts) for texts in sets.values()), dtype=torch.int64, device=device)

    def note(self, numbers: Tensor, logits: Tensor) -> None:
        """Store the most probable answer of each sample, plus 1; padding of a batch has none."""
        self._found[numbers[numbers >= 0]] = logits.argmax(dim=1)[numbers >= 0] + 1

    def write(self, context: ParallelContext) -> tuple[str, ...]:
        """Write ``NAME.tsv`` of each set on the last rank; a line about each. A collective.

        Raises DataError on that rank when a file cannot be written.
        """
        mesh = context.mesh
        found = (all_reduce(self._found, mesh, "pp", "dp", "cp") - 1).tolist()
        assert all(0 <= each < len(self._answers) for each in found), "every text is answered once"
        lines, begin = [], 0
        for name, texts in self._sets.items():
            path, end = self._folder / f"{name}.tsv", begin + len(texts.texts)
            if mesh.world_rank == mesh.world_size - 1:
                rows = (f"{text.index}\t{self._answers[each]}\n" for text, each in zip(texts.texts, found[begin:end]))
                with write_errors(path, remedy="name another --predictions-dir"):
                    path.write_text("".join(["index\tprediction\n", *rows]), encoding="utf-8")
            lines.append(f" > predictions for {name}: {end - begin} in {path}")
            begin = end
        return tuple(lines)
