"""Counts of documents and lines, and the report of bad lines, which is the same however work was divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.datasets.journal import SourceCounts, Totals
from megatron.core.tokenizers.encode import EncodedBatch
from megatron.core.tokenizers.input_files import is_plain_text
from megatron.core.tokenizers.text_files import BadLine
from megatron.errors import DataError
from megatron.preprocessing.settings import PreprocessConfig

BAD_LINES_SHOWN = 20


def count_batch(totals: Totals, batch: EncodedBatch, source: str) -> None:
    """Count a batch of the file of ``source``."""
    tokens = {key: len(texts.tokens) for key, texts in batch.texts.items()}
    documents = len(next(iter(batch.texts.values())).sequences)
    totals.add_source(source, SourceCounts(documents, len(batch.bad), batch.num_bytes, tokens))
    for key, texts in batch.texts.items():
        totals.add_documents(key, texts.document_lengths)


def check_documents(config: PreprocessConfig, totals: Totals) -> None:
    """Raise DataError for an input without documents."""
    if not totals.documents:
        raise DataError(
            f"--input {' '.join(config.input)} holds no documents ({totals.bad} bad lines); nothing is written."
        )


def report_skipped(bad: Sequence[BadLine], before: int, say: Callable[[str], None]) -> None:
    """Name lines that are left out, of which ``before`` were before these; after some the others are only counted."""
    for count, line in enumerate(bad[: BAD_LINES_SHOWN + 1], before):
        if count < BAD_LINES_SHOWN:
            say(f"skipped {line}")
        elif count == BAD_LINES_SHOWN:
            say("further bad lines are only counted")


def bad_line_error(line: BadLine) -> DataError:
    """The error of a run that a bad line ends."""
    remedy = "fix the line, or skip such lines with --on-bad-line skip"
    if is_plain_text(line.path) and line.reason == "not JSON: Expecting value at column 1":
        remedy = (
            "the file is plain text, but each document must be a line of JSON; to make one of each line: "
            f"jq -Rc '{{text: .}}' {line.path} > {Path(line.path).stem}.jsonl"
        )
    return DataError(f"{line}; {remedy}. Nothing is written.")
