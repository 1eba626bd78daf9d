"""Perplexity and bits per byte of a trained model on held-out text: plain text files, or JSON lines of documents."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.flags import check_flags, flag
from megatron.config.parse import parse_groups
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.parallel.environment import launch_environment, told_once_a_node
from megatron.errors import ConfigError, DataError, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from torch import Tensor

    from megatron.core.inference.scoring import TextScore
    from megatron.training.trained_model import TrainedModel


@check_flags
@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """What is scored, and how."""

    input: tuple[str, ...] = flag("Files of held-out text: .jsonl, one document a line, or anything else, one a file.")
    json_key: str = flag("Field of a JSON line that holds the text.", default="text")
    stride: int | None = flag(
        "Tokens by which windows over long documents advance; half the model's length unless given.",
        default=None,
        at_least=1,
    )
    batch_size: int = flag("Windows evaluated at a time.", default=8, at_least=1)


def main(argv: Sequence[str]) -> int:
    """Score the documents and print one table."""
    with told_once_a_node():
        config, choice = parse_groups(
            argv, PerplexityConfig, TrainedModelConfig, prog="evaluate_perplexity.py", about=__doc__ or ""
        )
        documents = [text for path in config.input for text in read_documents(Path(path), key=config.json_key)]
        if not any(documents):
            raise DataError(f"--input {' '.join(config.input)} holds no text")
    from megatron.training.recipes.gpt import GPTRecipe
    from megatron.training.trained_model import trained_model

    with trained_model(choice, {"gpt": GPTRecipe()}, launch_environment()) as trained:
        started = time.monotonic()
        score = evaluate(trained, documents, config)
        if trained.context.mesh.world_rank == 0:
            print(table(score, documents, trained, seconds=time.monotonic() - started))
    return 0


def read_documents(path: Path, *, key: str) -> Iterator[str]:
    """Texts of a file; raises DataError that names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--input {path} is not UTF-8 (byte {error.start}); convert it first") from None
    if path.suffix not in (".jsonl", ".json"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _document(line, key, where=f"{path}:{number}")


def _document(line: str, key: str, *, where: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get(key), str):
        raise DataError(f"{where} has no text under {key!r}; --json-key names the field")
    return str(document[key])


def evaluate(trained: TrainedModel, documents: list[str], config: PerplexityConfig) -> TextScore:
    """Score every token of every document, the first one given an end of document, as in training."""
    from megatron.core.inference.scoring import TextScore, score_texts

    length = trained.config.data.seq_length
    stride = config.stride or max(1, length // 2)
    if stride > length:
        raise ConfigError(f"--stride {stride} is beyond the model's length of {length} tokens: give at most {length}")
    tokenizer = trained.tokenizer
    texts = [[tokenizer.eod, *ids] for ids in tokenizer.tokenize_batch(documents)]

    def token_losses(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = trained.model(tokens).token_losses(labels)
        return losses

    total = TextScore()
    for part in score_texts(
        token_losses,
        texts,
        length=length,
        stride=stride,
        batch_size=config.batch_size,
        device=trained.context.device,
    ):
        total = TextScore(total.nats + part.nats, total.tokens + part.tokens)
    return total


def table(score: TextScore, documents: list[str], trained: TrainedModel, *, seconds: float) -> str:
    """The figures, one a line."""
    num_bytes = sum(len(text.encode()) for text in documents)
    rows = {
        "checkpoint": str(trained.folder.path),
        "text": f"{len(documents):,} documents, {num_bytes:,} bytes, {score.tokens:,} tokens",
        "loss": f"{score.loss:.4f} nats per token",
        "perplexity": f"{score.perplexity:.2f} per token",
        "bits per byte": f"{score.bits_per_byte(num_bytes):.4f}",
        "time": f"{seconds:.1f} s, {score.tokens / seconds:,.0f} tokens/s",
    }
    return "\n".join(f"{name + ':':<15}{text}" for name, text in rows.items())


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
