"""LAMBADA: whether the model predicts the last word of a sample that only its whole context gives away.

Paperno et al. 2016, https://arxiv.org/abs/1606.06031; the file is GPT-2's, JSON lines with ``text``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import Sample
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError
from tasks.result import TaskResult, framed
from tasks.settings import TaskConfig
from tasks.zero_shot.evaluation import json_lines, likelihoods, load_evaluator


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Greedy predictions of each sample's last token, or with ``--strict-lambada`` of all tokens of its last word."""
    task = config.group(TaskConfig)
    path = Path(task.valid_data[0])
    texts = list(json_lines(path, key="text"))
    if not texts:
        raise DataError(f"--valid-data {path} holds no passages")
    evaluator = load_evaluator(config, context)
    split = last_words if task.strict_lambada else last_tokens
    samples = [
        sample_of(context_ids, target, limit=config.data.seq_length, where=where)
        for (where, _), (context_ids, target) in zip(
            texts, split([text for _, text in texts], evaluator.trained.tokenizer)
        )
    ]
    table = likelihoods(evaluator, samples, compare=True)
    correct, total = int((table[:, 1] == 0).sum()), len(samples)
    line = (
        f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {total:.4E} | "
        f"avg accuracy: {correct / total:.4E}"
    )
    return TaskResult(
        lines=framed(line),
        metrics={
            "correct": correct,
            "total": total,
            "accuracy": correct / total,
            "loss": float(table[:, 0].sum()) / total,
        },
        data=(path,),
        checkpoint=evaluator.trained.folder,
    )


def last_tokens(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Context and target of each text: the last token, which may be a piece of a word."""
    return [(ids[:-1], ids[-1:]) for ids in tokenizer.tokenize_batch(texts)]


def last_words(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Context and target of each text: the last word, after a blank."""
    words = [(text.split() or [""])[-1] for text in texts]
    contexts = [text[: text.rfind(word)].strip() for text, word in zip(texts, words)]
    return list(zip(tokenizer.tokenize_batch(contexts), tokenizer.tokenize_batch([f" {word}" for word in words])))


def sample_of(context: list[int], target: list[int], *, limit: int, where: str) -> Sample:
    """The target after as much of its context as the model sees at once; DataError when one of the two is missing."""
    if not context or not target:
        raise DataError(f"{where} is not a passage with a last word to predict: it has no context, or no text at all")
    ids = (context + target)[-(limit + 1) :]
    return Sample(np.array(ids), first_scored=max(0, len(ids) - 1 - len(target)))
