"""WIKITEXT103: perplexity of a corpus as one text, per token and per word; the latter compares tokenizers."""

from __future__ import annotations

from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import perplexity, samples_of
from megatron.core.parallel.context import ParallelContext
from megatron.errors import DataError
from tasks.result import TaskResult, framed
from tasks.settings import TaskConfig
from tasks.zero_shot.detokenize import detokenizer_for
from tasks.zero_shot.evaluation import load_evaluator, read_text, score

_OVERLAP = 32


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Score every token but the first in overlapping windows. Words are what single blanks separate in the file."""
    task = config.group(TaskConfig)
    path = Path(task.valid_data[0])
    detokenize, original = detokenizer_for(path), read_text(path)
    words = len(original.strip().split(" "))
    if words < 2:
        raise DataError(f"--valid-data {path} holds {words} word; perplexity needs at least two")
    evaluator, length = load_evaluator(config, context), config.data.seq_length
    stride = task.overlapping_eval or min(_OVERLAP, length)
    found = score(
        evaluator,
        list(samples_of(evaluator.trained.tokenizer.tokenize(detokenize(original)), length=length, stride=stride)),
    )

    ratio = found.tokens / (words - 1)
    adjusted = perplexity(found.loss * ratio)
    line = (
        f" validation results on {task.task} | avg loss: {found.loss:.4E} | ppl: {perplexity(found.loss):.4E} | "
        f"adjusted ppl: {adjusted:.4E} | token ratio: {ratio} |"
    )
    return TaskResult(
        lines=framed(line),
        metrics={
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "adjusted_perplexity": adjusted,
            "token_ratio": ratio,
            "tokens": found.tokens,
            "words": words - 1,
        },
        data=(path,),
        checkpoint=evaluator.trained.folder,
    )
