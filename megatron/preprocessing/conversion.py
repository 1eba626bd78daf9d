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
from megatron.core.tokenizers.input_files import InputFile, list_inputs
from megatron.core.tokenizers.text_files import read_batches
from megatron.errors import kept_on_interrupt
from megatron.preprocessing.preparation import prepare
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.reporting import bad_line_error, check_documents, count_batch, report_skipped
from megatron.preprocessing.settings import PreprocessConfig
from megatron.preprocessing.summary import summarize

SHARD_BYTES = 64_000_000  # of text, between two places from which an interrupted run can continue


def preprocess_here(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Totals:
    """Write the token files of every key.

    Raises ConfigError for settings that cannot work, DataError for failing input or output; then no file appears.
    """
    prepared = prepare(config, tokenizer_config, list_inputs(config.input))
    for remark in prepared.remarks:
        print(f"note: {remark}", file=sys.stderr)
    settings = prepared.settings(config) | {"input": config.input}
    paths = [each.path for each in prepared.files]
    journal = Journal(Path(f"{config.output_prefix}_unfinished.json"), settings=settings, inputs=paths)
    batches, milestone = prepared.batches, _with_parts(journal.read())
    if milestone is not None:
        batches = read_batches(paths, keys=config.json_keys, start=milestone.position)
        print(f"continuing after the {milestone.totals.documents:,} documents of an interrupted run", file=sys.stderr)
    else:
        journal.remove()
    run = Conversion(config, prepared.files, milestone)
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

    def __init__(self, config: PreprocessConfig, files: Sequence[InputFile], milestone: Milestone | None) -> None:
        self.config = config
        self._sources = {each.path: each.source for each in files}
        self.writers: dict[str, IndexedDatasetWriter] = {}
        self.totals = milestone.totals if milestone else Totals()
        self._bytes_done = milestone.bytes_read if milestone else 0
        self.progress = Progress(
            None if any(each.size is None for each in files) else sum(each.size or 0 for each in files),
            log_interval=config.log_interval,
            stream=sys.stderr,
            done=self.totals,
            bytes_done=self._bytes_done,
        )

    def convert(self, encoded: Iterator[EncodedBatch], journal: Journal) -> None:
        """Write all batches, with a milestone after every ``SHARD_BYTES`` of text."""
        lasting = self.totals.text_bytes
        for batch in encoded:
            if batch.bad and self.config.on_bad_line == "error":
                raise bad_line_error(batch.bad[0])
            report_skipped(batch.bad, self.totals.bad, self.progress.say)
            self._write(batch)
            self.progress.update(self.totals, batch.bytes_read)
            if journal.possible and self.totals.text_bytes - lasting >= SHARD_BYTES:
                outputs = {self.config.prefix(key): writer.sync() for key, writer in self.writers.items()}
                journal.write(Milestone(batch.end, batch.bytes_read, outputs, self.totals))
                lasting = self.totals.text_bytes
        check_documents(self.config, self.totals)

    def _write(self, batch: EncodedBatch) -> None:
        for key, writer in self.writers.items():
            texts = batch.texts[key]
            writer.add_documents(texts.tokens, texts.lengths, texts.sequences)
        count_batch(self.totals, batch, self._sources[batch.path])


def _with_parts(milestone: Milestone | None) -> Milestone | None:
    """The milestone, if the unfinished files that it describes exist."""
    if milestone is None:
        return None
    parts = [f"{prefix}.{name}.part" for prefix in milestone.outputs for name in ("bin", "lengths", "documents")]
    return milestone if all(Path(part).is_file() for part in parts) else None
