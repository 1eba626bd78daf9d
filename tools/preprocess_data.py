"""Turn text into the token files that training reads.

Every key of --json-keys becomes PREFIX_KEY_document.bin, .idx and .meta.json (PREFIX_KEY_sentence with
--split-sentences). The files appear when they are complete, with the same bytes for any number of workers; memory does
not grow with the input. After an interruption, the same command continues from its last finished shard.
"""

from __future__ import annotations

import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
import hashlib
import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from megatron.config.flags import Settings, derive, flag
from megatron.config.parse import parse_groups
from megatron.config.preprocessing_flags import PREPROCESSING_FLAGS
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.journal import Journal, Milestone, Totals
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.encode import EncodedBatch, Encoding, encode_in_order, shared_tokenizer
from megatron.core.tokenizers.engine import GIGATOKEN, OWN, PROBE_BYTES, EngineChoice, choose_engine
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.sentences import (
    LEARNED_FROM_BYTES,
    SentenceRules,
    installed_rules,
    learned_rules,
    needs_leading_space,
)
from megatron.core.tokenizers.text_files import (
    BadLine,
    find_inputs,
    is_plain_text,
    read_batches,
    read_documents,
    total_size,
)
from megatron.errors import ConfigError, DataError, kept_on_interrupt, run_command
from megatron.training.reporting.progress import ProgressBar

BAD_LINES_SHOWN = 20
SHARD_BYTES = 64_000_000  # of text, between two places from which an interrupted run can continue
PERCENTILES = (0, 10, 50, 90, 99, 100)


class PreprocessConfig(Settings):
    """Text in, tokens out."""

    input: tuple[str, ...] = flag(
        "JSON lines, one object a line (.gz, .bz2, .xz, .zst too), or .parquet files: files, folders, globs in quotes, "
        "or - for JSON lines on standard input."
    )
    output_prefix: str = flag("Prefix of all files written.")
    json_keys: tuple[str, ...] = flag(
        "Keys of each object whose text is tokenized, each into its own files.", default=("text",)
    )
    append_eod: bool = flag("End each document with the tokenizer's end-of-document id.", default=False)
    workers: int = flag("Processes that tokenize.", default=None, derived="one for each core", at_least=1, at_most=1024)
    on_bad_line: Literal["error", "skip"] = flag(
        "For lines that hold no document: stop at the first, or report, count and skip them.",
        default="error",
    )
    log_interval: int = flag(
        "Documents between two lines of progress when no terminal shows it.", default=1000, at_least=1
    )
    keep_sequential_samples: bool = flag(
        "Accepted for Megatron-LM's scripts: documents always keep their order.", default=False
    )
    partitions: int = flag("Accepted for Megatron-LM's scripts: all workers share all input.", default=1, at_least=1)
    tokenizer_engine: Literal["auto", "own", "gigatoken"] = flag(
        "Library that encodes; auto: gigatoken where it is installed and gives the tokenizer's own ids.", default="auto"
    )
    split_sentences: bool = flag("Make each sentence a separate sequence, for BERT and T5.", default=False)
    keep_newlines: bool = flag("With --split-sentences: keep the whitespace after each sentence.", default=False)
    lang: str = flag("With --split-sentences: language of the rules in NLTK_DATA.", default="english")

    @override
    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        derive(self, "workers", cores or 1)

    def prefix(self, key: str) -> str:
        """Prefix of the data set of one key."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


class Progress:
    """A bar on a terminal, a line every ``log_interval`` documents elsewhere.

    ``size``: bytes of input on disk, None when unknown. ``done`` and ``bytes_done``: progress of an earlier run that
    this one continues.
    """

    def __init__(
        self, size: int | None, *, log_interval: int, stream: TextIO, done: Totals | None = None, bytes_done: int = 0
    ) -> None:
        self._interval, self._stream = log_interval, stream
        self.bar = ProgressBar(size, initial=bytes_done, counted=False, stream=stream)
        self._start = time.monotonic()
        before = done or Totals()
        self._documents, self._text_bytes, self._tokens = before.documents, before.text_bytes, _tokens(before)
        self._logged = before.documents // log_interval

    def update(self, totals: Totals, bytes_read: int) -> None:
        """Show the progress: always on a bar, every ``log_interval`` documents as a line."""
        if self.bar.enabled:
            rate = (totals.text_bytes - self._text_bytes) / self.seconds / 1e6
            self.bar.show(bytes_read, f"{totals.documents:,} documents", f"{rate:.1f} MB/s")
        elif totals.documents // self._interval > self._logged:
            self._logged = totals.documents // self._interval
            facts = ", ".join(filter(None, (self.rates(totals), self.bar.time_left(bytes_read))))
            print(f"Processed {totals.documents} documents ({facts}).", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Print a line in place of the bar."""
        self.bar.clear()
        print(line, file=self._stream, flush=True)

    def rates(self, totals: Totals) -> str:
        """Documents, text and tokens per second since the start."""
        seconds = self.seconds
        return (
            f"{(totals.documents - self._documents) / seconds:.1f} docs/s, "
            f"{(totals.text_bytes - self._text_bytes) / seconds / 1e6:.2f} MB/s, "
            f"{(_tokens(totals) - self._tokens) / seconds:.0f} tokens/s"
        )

    @property
    def seconds(self) -> float:
        """Time since the start, above 0."""
        return max(time.monotonic() - self._start, 1e-9)


def _tokens(totals: Totals) -> int:
    return sum(totals.tokens.values())


def main(argv: Sequence[str]) -> int:
    """Tokenize the input that the command line names."""
    config, tokenizer_config = parse_groups(
        argv,
        PreprocessConfig,
        TokenizerConfig,
        prog="preprocess_data.py",
        about=__doc__ or "",
        legacy=PREPROCESSING_FLAGS,
    )
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    kind = tokenizer_config.tokenizer_type
    if tokenizer_config.vocab_size and not (kind or "").startswith(("Null", "Tik", "BertWordPiece")):
        print(f"--vocab-size has no effect: {kind} knows its own", file=sys.stderr)
    preprocess(config, tokenizer_config)
    return 0


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Totals:
    """Write the token files of every key.

    Raises ConfigError for settings that cannot work, DataError for failing input or output; then no file appears.
    """
    _check(config)
    paths = find_inputs(config.input)
    tokenizer = shared_tokenizer(tokenizer_config)
    dtype = token_dtype(tokenizer.vocab_size)
    head, batches = _head(read_batches(paths, keys=config.json_keys), config)
    rules = sentence_rules(config, head, tokenizer) if config.split_sentences else None
    with ThreadPoolExecutor(1) as pool:  # encoding the probe and computing the fingerprint take about equally long
        probe = list(itertools.islice(_texts(head, config.json_keys), 1000))
        choosing = pool.submit(_engine, config, tokenizer, probe, dtype.name)
        stamp, engine = TokenizerStamp.of(tokenizer), choosing.result()
    for remark in _remarks(config, tokenizer, probe):
        print(f"note: {remark}", file=sys.stderr)
    encoding = Encoding(tokenizer_config, config.json_keys, config.append_eod, dtype.name, rules, engine.name)
    journal = Journal(
        Path(f"{config.output_prefix}_unfinished.json"), settings=_settings(config, stamp, rules), inputs=paths
    )
    milestone = _with_parts(journal.read())
    if milestone is not None:
        batches = read_batches(paths, keys=config.json_keys, start=milestone.position)
        print(f"continuing after the {milestone.totals.documents:,} documents of an interrupted run", file=sys.stderr)
    else:
        journal.remove()
    run = Conversion(config, paths, milestone)
    with _kept_parts_mentioned(journal), ExitStack() as stack:
        stack.callback(run.progress.bar.clear)
        for key in config.json_keys:
            resume = milestone.outputs[config.prefix(key)] if milestone else None
            writer = IndexedDatasetWriter(config.prefix(key), dtype, tokenizer=stamp, resume=resume)
            run.writers[key] = stack.enter_context(writer)
        encoded = encode_in_order(batches, encoding, workers=config.workers)
        stack.callback(encoded.close)
        run.convert(encoded, journal)
    journal.remove()
    _summarize(run, stamp, dtype=dtype.name, engine=engine, rules=rules)
    return run.totals


def _remarks(config: PreprocessConfig, tokenizer: Tokenizer, probe: Sequence[str]) -> Iterator[str]:
    """What a user should know about the documents: a tokenizer that other files describe, and ends that come twice."""
    yield from getattr(tokenizer, "remarks", ())
    if config.split_sentences or tokenizer.name == "NullTokenizer":
        return
    around = tokenizer.tokenize_batch([""])[0]
    is_twice = config.append_eod and around[-1:] == [tokenizer.eod]
    if is_twice or (around and "" in probe):
        end = tokenizer.detokenize([tokenizer.eod])
        empty = tokenizer.detokenize([*around, *([tokenizer.eod] if config.append_eod else [])])
        twice = f"documents end with {end} twice, the tokenizer's own and that of --append-eod (leave it out for one); "
        yield f"{twice if is_twice else ''}an empty text becomes a document of {empty} alone"


def _engine(config: PreprocessConfig, tokenizer: Tokenizer, probe: Sequence[str], dtype: str) -> EngineChoice:
    """The engine that ``--tokenizer-engine`` asks for; ConfigError when it is not available."""
    if config.tokenizer_engine == "own":
        return EngineChoice(OWN, "as --tokenizer-engine says")
    found = choose_engine(tokenizer, probe, dtype, parts=config.split_sentences)
    if config.tokenizer_engine == "gigatoken" and found.name != GIGATOKEN:
        raise ConfigError(f"--tokenizer-engine gigatoken: {found.reason}; use auto or own")
    return found


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


def _check(config: PreprocessConfig) -> None:
    if not config.split_sentences:
        alone = [name for name, used in (("--keep-newlines", config.keep_newlines),) if used]
        alone += ["--lang"] * (config.lang != "english")
        if alone:
            raise ConfigError(f"{alone[0]} has an effect only with --split-sentences; give that too, or leave it out.")
    repeated = sorted({key for key in config.json_keys if config.json_keys.count(key) > 1})
    if repeated or not config.json_keys:
        raise ConfigError(f"--json-keys needs different keys, not {' '.join(config.json_keys) or 'none'}.")
    if config.partitions > 1:
        print(f"--partitions {config.partitions} has no effect: all workers share all input.", file=sys.stderr)


def _head(batches: Iterator[LineBatch], config: PreprocessConfig) -> tuple[list[LineBatch], Iterator[LineBatch]]:
    """The first batches, for the probe and the sentence rules, and all batches: a pipe can be read only once."""
    head, size = list[LineBatch](), 0
    for batch in batches:
        head.append(batch)
        size += len(batch.data)
        if size >= (LEARNED_FROM_BYTES if config.split_sentences else PROBE_BYTES):
            break
    return head, itertools.chain(head, batches)


def _texts(batches: Sequence[LineBatch], keys: Sequence[str]) -> Iterator[str]:
    """Texts of all keys in some batches, without bad lines, which are reported when they are encoded."""
    for batch in batches:
        for texts in read_documents(batch, keys).texts.values():
            yield from (text for text in texts if text.isascii() or _is_unicode(text))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def sentence_rules(config: PreprocessConfig, head: Sequence[LineBatch], tokenizer: Tokenizer) -> SentenceRules:
    """NLTK's rules of the language if they are installed, else rules that punkt learns from the first batches."""
    texts, keep_whitespace = _texts(head, config.json_keys), config.keep_newlines
    installed = installed_rules(config.lang, keep_whitespace=keep_whitespace)
    rules = installed or learned_rules(texts, language=config.lang, keep_whitespace=keep_whitespace)
    return dataclasses.replace(rules, leading_space=not keep_whitespace and needs_leading_space(tokenizer))


def _settings(config: PreprocessConfig, stamp: TokenizerStamp, rules: SentenceRules | None) -> dict[str, Any]:
    """The settings that must be the same for an interrupted run to continue."""
    return {
        "keys": config.json_keys,
        "append_eod": config.append_eod,
        "on_bad_line": config.on_bad_line,
        "tokenizer": stamp.fingerprint,
        "sentences": rules and hashlib.sha256(repr(rules).encode()).hexdigest(),
    }


def _with_parts(milestone: Milestone | None) -> Milestone | None:
    """The milestone, if the unfinished files that it describes exist."""
    if milestone is None:
        return None
    parts = [f"{prefix}.{name}.part" for prefix in milestone.outputs for name in ("bin", "lengths", "documents")]
    return milestone if all(Path(part).is_file() for part in parts) else None


def _summarize(
    run: Conversion, stamp: TokenizerStamp, *, dtype: str, engine: EngineChoice, rules: SentenceRules | None
) -> None:
    """Print what was written, and store it as JSON. ``dtype`` of the ids."""
    config, totals = run.config, run.totals
    print(f"documents    {totals.documents:,}" + (f" ({totals.empty:,} empty texts)" if totals.empty else ""))
    if totals.bad:
        print(f"bad lines    {totals.bad:,} left out")
    if rules:
        print(f"sentences    by {rules.origin}")
    print(f"rate         {run.progress.rates(totals)}, encoded by {engine.name} ({engine.reason})")
    print(f"tokenizer    {stamp.type}, {stamp.vocab_size:,} ids, end of document {stamp.eod}")
    print(f"fingerprint  {stamp.fingerprint}")
    outputs: dict[str, Any] = {}
    for key, writer in run.writers.items():
        percentiles = dict(zip(PERCENTILES, totals.lengths[key].percentiles(*PERCENTILES)))
        written = ", ".join(f"{share}% {length:,}" for share, length in percentiles.items())
        print(
            f"wrote        {config.prefix(key)}.{{bin,idx,meta.json}}: {totals.tokens[key]:,} tokens, {dtype}; "
            f"tokens per document: {written}"
        )
        outputs[config.prefix(key)] = _counts(writer.metadata()) | {"tokens_per_document": percentiles}
    path = Path(f"{config.output_prefix}_summary.json")
    content = {
        "documents": totals.documents,
        "empty_texts": totals.empty,
        "bad_lines": totals.bad,
        "text_bytes": totals.text_bytes,
        "seconds": round(run.progress.seconds, 3),
        "dtype": dtype,
        "engine": engine.name,
        "sentences": rules.origin if rules else None,
        "tokenizer": dataclasses.asdict(stamp),
        "outputs": outputs,
    }
    with write_errors(path), replaced_file(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _counts(metadata: DatasetMetadata) -> dict[str, Any]:
    return {"tokens": metadata.num_tokens, "sequences": metadata.num_sequences, "documents": metadata.num_documents}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished files are removed
    run_command(lambda: main(sys.argv[1:]))
