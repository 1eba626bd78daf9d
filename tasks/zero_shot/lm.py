"""LM: perplexity and bits per byte of any text, comparable between tokenizers."""

from __future__ import annotations

from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import perplexity, samples_of
from megatron.core.parallel.context import ParallelContext
from megatron.errors import DataError
from tasks.result import TaskResult, framed
from tasks.settings import TaskConfig
from tasks.zero_shot.evaluation import load_evaluator, read_documents, score


def run(config: RunConfig, context: ParallelContext) -> TaskResult:
    """Score every token of every document, the first one given an end of document, as in training."""
    task = config.group(TaskConfig)
    paths = tuple(Path(path) for path in task.valid_data)
    documents = [text for path in paths for text in read_documents(path, key=task.json_key)]
    if not any(documents):
        raise DataError(f"--valid-data {' '.join(task.valid_data)} holds no text")
    evaluator, length = load_evaluator(config, context), config.data.seq_length
    stride = task.overlapping_eval or max(1, length // 2)
    tokenizer = evaluator.trained.tokenizer
    texts = [[tokenizer.eod, *ids] for ids in tokenizer.tokenize_batch(documents)]
    found = score(evaluator, [each for text in texts for each in samples_of(text, length=length, stride=stride)])

    num_bytes = sum(len(text.encode()) for text in documents)
    bits = found.bits_per_byte(num_bytes)
    line = (
        f" validation results on LM | avg loss: {found.loss:.4E} | ppl: {perplexity(found.loss):.4E} | "
        f"bits per byte: {bits:.4f} | documents: {len(documents)} | tokens: {found.tokens} | bytes: {num_bytes} |"
    )
    return TaskResult(
        lines=framed(line),
        metrics={
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "bits_per_byte": bits,
            "documents": len(documents),
            "tokens": found.tokens,
            "bytes": num_bytes,
        },
        data=paths,
        checkpoint=evaluator.trained.folder,
    )
