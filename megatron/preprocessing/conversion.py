"""One machine's run: text goes in order through the workers into the files, and continues after an interruption."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.journal import Journal, Milestone, Totals
from megatron.core.tokenizers.encode import EncodedBatch, encode_in_order
from megatron.core.tokenizers.text_files import BadLine, is_plain_text, read_batches, total_size
from megatron.errors import DataError, kept_on_interrupt
from megatron.preprocessing.preparation import prepare
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.settings import PreprocessConfig, check_settings
from megatron.preprocessing.summary import summarize

BAD_LINES_SHOWN = 20
SHARD_BYTES = 64_000_000  # of text, between two places from which an interrupted run can continue


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Totals:
    """Write the token files of every key.

    Raises ConfigError for settings that cannot work, DataError for failing input or output; then no file appears.
    """
    check_settings(config)
    prepared = prepare(config, tokenizer_config)
    for remark in prepared.remarks:
        print(f"note: {remark}", file=sys.stderr)
    journal = Journal(
        Path(f"{config.output_prefix}_unfinished.json"), settings=prepared.settings(config), inputs=prepared.paths
    )
    batches, milestone = prepared.batches, _with_parts(journal.read())
    if milestone is not None:
        batches = read_batches(prepared.paths, keys=config.json_keys, start=milestone.position)
        print(f"continuing after the {milestone.totals.documents:,} documents of an interrupted run", file=sys.stderr)
    else:
        journal.remove()
    run = Conversion(config, prepared.paths, milestone)
    with _kept_parts_mentioned(journal), ExitStack() as stack:
        stack.callback(run.progress.bar.clear)
        for key in config.json_keys:
            resume = milestone.outputs[config.prefix(key)] if milestone else None
            prefix, dtype = config.prefix(key), prepared.encoding.dtype
            writer = IndexedDatasetWriter(prefix, dtype, tokenizer=prepared.stamp, resume=resume)
            run.writers[key] = stack.enter_context(writer)
        encoded = encode_in_order(batches, prepared.encoding, workers=config.workers)
        stack.callback(encoded.close)
        run.convert(encoded, journal)
    journal.remove()
    outputs = {key: writer.metadata() for key, writer in run.writers.items()}
    summarize(config, prepared, run.totals, outputs, progress=run.progress)
    return run.totals


@contextmanager
def _kept_parts_mentioned(journal: Journal) -> Iterator[None]:
    kept = "the finished shards are kept; the same command continues from there"
    try:
        with kept_on_interrupt(lambda: kept if journal.path.exists() else "nothing is kept, no shard was finished"):
            yield
    except BaseException as error:
        if journal.path.exists() and not isinstance(error, KeyboardInterrupt):
            print(kept, file=sys.stderr)
        raise


class Conversion:
    """A run in progress: batches of documents go to the writers, and are counted."""

    def __init__(self, config: PreprocessConfig, paths: Sequence[str], milestone: Milestone | None) -> None:
        self.config = config
        self.writers: dict[str, IndexedDatasetWriter] = {}
        self.totals = milestone.totals if milestone else Totals()
        self._bytes_done = milestone.bytes_read if milestone else 0
        self.progress = Progress(
            total_size(paths),
            log_interval=config.log_interval,
            stream=sys.stderr,
            done=self.totals,
            bytes_done=self._bytes_done,
        )

    def convert(self, encoded: Iterator[EncodedBatch], journal: Journal) -> None:
        """Write all batches, with a milestone after every ``SHARD_BYTES`` of text."""
        lasting = self.totals.text_bytes
        for batch in encoded:
            self._report(batch.bad)
            self._write(batch)
            self.progress.update(self.totals, batch.bytes_read)
            if journal.possible and self.totals.text_bytes - lasting >= SHARD_BYTES:
                outputs = {self.config.prefix(key): writer.sync() for key, writer in self.writers.items()}
                journal.write(Milestone(batch.end, batch.bytes_read, outputs, self.totals))
                lasting = self.totals.text_bytes
        if not self.totals.documents:
            raise DataError(
                f"--input {' '.join(self.config.input)} holds no documents ({self.totals.bad} bad lines); "
                "nothing is written."
            )

    def _write(self, batch: EncodedBatch) -> None:
        for key, writer in self.writers.items():
            texts = batch.texts[key]
            writer.add_documents(texts.tokens, texts.lengths, texts.sequences)
            self.totals.add_documents(key, texts.document_lengths)
        self.totals.documents += len(batch.texts[self.config.json_keys[0]].sequences)
        self.totals.bad += len(batch.bad)
        self.totals.text_bytes += batch.num_bytes

    def _report(self, bad: Sequence[BadLine]) -> None:
        if bad and self.config.on_bad_line == "error":
            remedy = "fix the line, or skip such lines with --on-bad-line skip"
            if is_plain_text(bad[0].path) and bad[0].reason == "not JSON: Expecting value at column 1":
                remedy = (
                    "the file is plain text, but each document must be a line of JSON; to make one of each line: "
                    f"jq -Rc '{{text: .}}' {bad[0].path} > {Path(bad[0].path).stem}.jsonl"
                )
            raise DataError(f"{bad[0]}; {remedy}. Nothing is written.")
        for count, line in enumerate(bad, self.totals.bad):
            if count < BAD_LINES_SHOWN:
                self.progress.say(f"skipped {line}")
            elif count == BAD_LINES_SHOWN:
                self.progress.say("further bad lines are only counted")


def _with_parts(milestone: Milestone | None) -> Milestone | None:
    """The milestone, if the unfinished files that it describes exist."""
    if milestone is None:
        return None
    parts = [f"{prefix}.{name}.part" for prefix in milestone.outputs for name in ("bin", "lengths", "documents")]
    return milestone if all(Path(part).is_file() for part in parts) else None
