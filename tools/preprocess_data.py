"""Turn JSON lines into the token files that training reads.

Every key of --json-keys becomes PREFIX_KEY_document.bin, .idx and .meta.json. The files appear when they are complete,
with the same bytes for any number of workers; memory does not grow with the input.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, TextIO

import numpy as np

from megatron.config.flags import check_flags, derive, flag
from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter, token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.encode import EncodedBatch, Encoding, encode_in_order, shared_tokenizer
from megatron.core.tokenizers.text_files import BadLine, find_inputs, read_batches, total_size
from megatron.errors import ConfigError, DataError, run_command

BAD_LINES_SHOWN = 20
SENTENCES = {
    "split_sentences": "sentences are split for BERT and T5, which are not available yet; GPT reads whole documents",
    "keep_newlines": "it belongs to --split-sentences, which comes with BERT and T5",
    "lang": "it belongs to --split-sentences, which comes with BERT and T5",
}


@check_flags
@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Text in, tokens out."""

    input: tuple[str, ...] = flag(
        "JSON lines, one object a line: files (.gz, .bz2, .zst too), folders of .jsonl and .json, globs in quotes, "
        "or - for standard input."
    )
    output_prefix: str = flag("Start of the names of all files written.")
    json_keys: tuple[str, ...] = flag(
        "Keys of each object whose text is tokenized, each into its own files.", default=("text",)
    )
    append_eod: bool = flag("End each document with the tokenizer's end-of-document id.", default=False)
    workers: int = flag("Processes that tokenize.", default=None, derived="one for each core", at_least=1)
    on_bad_line: Literal["error", "skip"] = flag(
        "What to do about a line that holds no document: stop at the first, or report, count and leave them out.",
        default="error",
    )
    log_interval: int = flag(
        "Documents between two lines of progress when no terminal shows it.", default=1000, at_least=1
    )
    keep_sequential_samples: bool = flag("Megatron-LM's; here documents always keep their order.", default=False)
    partitions: int = flag("Megatron-LM's; here all workers share all input.", default=1, at_least=1)
    split_sentences: bool = flag("Not available yet: comes with BERT and T5.", default=False)
    keep_newlines: bool = flag("Not available yet: comes with BERT and T5.", default=False)
    lang: str | None = flag("Not available yet: comes with BERT and T5.", default=None)

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        derive(self, "workers", cores or 1)


@dataclass
class Totals:
    """What has been done so far."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch."""
        first = next(iter(batch.lengths.values()))
        self.documents += len(first)
        self.empty += sum(int(np.count_nonzero(lengths == 0)) for lengths in batch.lengths.values())
        self.bad += len(batch.bad)
        self.text_bytes += batch.num_bytes
        for key, tokens in batch.tokens.items():
            self.tokens[key] = self.tokens.get(key, 0) + tokens.size


class Progress:
    """A bar on a terminal, a line every ``log_interval`` documents elsewhere."""

    def __init__(self, size: int | None, *, log_interval: int, stream: TextIO) -> None:
        self._size, self._interval, self._stream = size, log_interval, stream
        self._terminal = stream.isatty()
        self._start = self._last = time.monotonic()
        self._logged = 0

    def update(self, totals: Totals, bytes_read: int) -> None:
        """Show where things stand, if it is time to."""
        now = time.monotonic()
        if self._terminal:
            if now - self._last >= 0.2:
                self._last = now
                self._stream.write(f"\r{self._bar(totals, bytes_read, now - self._start)}\x1b[K")
                self._stream.flush()
        elif totals.documents // self._interval > self._logged:
            self._logged = totals.documents // self._interval
            print(f"Processed {totals.documents} documents ({self.rates(totals)}).", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Print a line without leaving half a bar before it."""
        self.clear()
        print(line, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def rates(self, totals: Totals) -> str:
        """Documents, text and tokens a second since the start."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        tokens = sum(totals.tokens.values())
        return (
            f"{totals.documents / seconds:.1f} docs/s, {totals.text_bytes / seconds / 1e6:.2f} MB/s, "
            f"{tokens / seconds:.0f} tokens/s"
        )

    def _bar(self, totals: Totals, bytes_read: int, seconds: float) -> str:
        text = f"{totals.documents:,} documents  {totals.text_bytes / seconds / 1e6:.1f} MB/s"
        if not self._size:
            return text
        share = min(bytes_read / self._size, 1.0)
        left = int(seconds / share - seconds) if share else 0
        filled = int(share * 24)
        return f"[{'#' * filled}{'-' * (24 - filled)}] {share:4.0%}  {text}  {left // 60}:{left % 60:02d} left"


def main(argv: Sequence[str]) -> int:
    """Tokenize what the command line names."""
    config, tokenizer_config = parse_groups(
        argv, PreprocessConfig, TokenizerConfig, prog="preprocess_data.py", about=" ".join((__doc__ or "").split())
    )
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    preprocess(config, tokenizer_config)
    return 0


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Totals:
    """Write the token files of every key.

    Raises ConfigError for settings that cannot work, DataError for input or output that fails; then no file appears.
    """
    _check(config)
    paths = find_inputs(config.input)
    tokenizer = shared_tokenizer(tokenizer_config)
    dtype = token_dtype(tokenizer.vocab_size)
    encoding = Encoding(tokenizer_config, config.json_keys, config.append_eod, dtype.name)
    totals = Totals()
    progress = Progress(total_size(paths), log_interval=config.log_interval, stream=sys.stderr)
    with ExitStack() as stack:
        stack.callback(progress.clear)
        writers = {
            key: stack.enter_context(
                IndexedDatasetWriter(
                    f"{config.output_prefix}_{key}_document", dtype, tokenizer=TokenizerStamp.of(tokenizer)
                )
            )
            for key in config.json_keys
        }
        encoded = encode_in_order(read_batches(paths), encoding, workers=config.workers)
        stack.callback(encoded.close)
        for batch in encoded:
            _report(batch.bad, config, progress, before=totals.bad)
            for key, writer in writers.items():
                _write(writer, batch, key)
            totals.add(batch)
            progress.update(totals, batch.bytes_read)
        if not totals.documents:
            raise DataError(
                f"--input {' '.join(config.input)} holds no documents ({totals.bad} bad lines); nothing is written."
            )
    _summarize(config, totals, progress, TokenizerStamp.of(tokenizer), dtype)
    return totals


def _check(config: PreprocessConfig) -> None:
    for name, reason in SENTENCES.items():
        if getattr(config, name):
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}; leave it out.")
    repeated = sorted({key for key in config.json_keys if config.json_keys.count(key) > 1})
    if repeated or not config.json_keys:
        raise ConfigError(f"--json-keys needs different keys, not {' '.join(config.json_keys) or 'none'}.")
    if config.partitions > 1:
        print(f"--partitions {config.partitions} has no effect: all workers share all input.", file=sys.stderr)


def _report(bad: Sequence[BadLine], config: PreprocessConfig, progress: Progress, *, before: int) -> None:
    if bad and config.on_bad_line == "error":
        raise DataError(
            f"{bad[0]}; mend the line, or leave such lines out with --on-bad-line skip. Nothing is written."
        )
    for count, line in enumerate(bad, before):
        if count < BAD_LINES_SHOWN:
            progress.say(f"skipped {line}")
        elif count == BAD_LINES_SHOWN:
            progress.say("further bad lines are only counted")


def _write(writer: IndexedDatasetWriter, batch: EncodedBatch, key: str) -> None:
    """Append a batch; an empty document has no sequence, as in Megatron-LM's files."""
    tokens, lengths = batch.tokens[key], batch.lengths[key]
    start = first_token = 0
    for empty in np.flatnonzero(lengths == 0).tolist():
        past = first_token + int(lengths[start:empty].sum())
        writer.add_documents(tokens[first_token:past], lengths[start:empty])
        writer.end_document()
        start, first_token = empty + 1, past
    writer.add_documents(tokens[first_token:], lengths[start:])


def _summarize(
    config: PreprocessConfig, totals: Totals, progress: Progress, stamp: TokenizerStamp, dtype: np.dtype
) -> None:
    print(f"documents    {totals.documents:,}" + (f" ({totals.empty:,} empty texts)" if totals.empty else ""))
    if totals.bad:
        print(f"bad lines    {totals.bad:,} left out")
    print(f"rate         {progress.rates(totals)}")
    print(f"tokenizer    {stamp.type}, {stamp.vocab_size:,} ids, end of document {stamp.eod}")
    print(f"fingerprint  {stamp.fingerprint}")
    for key, count in totals.tokens.items():
        print(
            f"wrote        {config.output_prefix}_{key}_document.{{bin,idx,meta.json}}: {count:,} tokens, {dtype.name}"
        )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that unfinished files are removed
    run_command(lambda: main(sys.argv[1:]))
