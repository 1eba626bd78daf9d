"""Pieces of the input, encoded by any machine: each becomes a file beside the output, once.

``plan.json`` beside them holds the settings and the input that they are of. A machine with others is refused.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.journal import Totals
from megatron.core.files.durable import put_text, write_errors
from megatron.core.files.remote_path import path_of
from megatron.core.tokenizers.encode import EncodedBatch, encode_in_order
from megatron.core.tokenizers.input_files import PARQUET_ENDING, list_inputs
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.text_files import BadLine, read_batches
from megatron.errors import DataError
from megatron.preprocessing.division import Division, Piece, divide, lines_before
from megatron.preprocessing.piece_files import PieceFolder, PieceRecord, PieceWriter
from megatron.preprocessing.preparation import Preparation, prepare
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.reporting import bad_line_error, count_batch
from megatron.preprocessing.settings import PreprocessConfig
from megatron.small_files import read_json


@dataclass(frozen=True)
class Plan:
    """The pieces of a data set: of which input, by which settings, and where their files are."""

    config: PreprocessConfig
    prepared: Preparation
    division: Division
    folder: PieceFolder

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same for all machines."""
        facts = self.prepared.settings(self.config) | {
            "input": self.division.digest,
            "piece_bytes": self.division.piece_bytes,
        }
        found: dict[str, Any] = json.loads(json.dumps(facts))
        return found

    @property
    def digest(self) -> str:
        """A short name of ``facts``."""
        return sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def sources(self) -> dict[str, str]:
        """Name of the source by file."""
        return {each.path: each.source for each in self.division.files}

    def missing(self) -> list[int]:
        """Numbers of the pieces that have no file yet."""
        finished = self.folder.finished()
        return [number for number in range(self.division.count) if number not in finished]


def make_plan(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Plan:
    """Divide the input and write the plan beside the output. Raises DataError where the pieces there have another."""
    size = None if config.piece_megabytes is None else max(1, int(config.piece_megabytes * (1 << 20)))
    files = list_inputs(config.input)
    division = divide(files, piece_bytes=size)
    folder = PieceFolder(path_of(f"{config.output_prefix}_pieces"))
    plan = Plan(config, prepare(config, tokenizer_config, files), division, folder)
    path = folder.root / "plan.json"
    with write_errors(path):
        try:
            known = read_json(path, dict[str, Any], error=DataError)
        except FileNotFoundError:
            known = plan.facts
            if not config.merge_shards:
                folder.root.mkdir(parents=True, exist_ok=True)
                put_text(path, json.dumps(known, indent=2) + "\n")
    if known != plan.facts:
        raise DataError(
            f"{folder.root} holds pieces of another run: {_difference(known, plan.facts)}; give the "
            "settings and input of that run, or delete the folder to start again"
        )
    return plan


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """What two plans say differently."""
    flags = {"keys": "--json-keys", "append_eod": "--append-eod", "on_bad_line": "--on-bad-line"}
    words = {
        "input": "the input has changed, or --input names it in another way",
        "tokenizer": "the tokenizer is another one",
        "sentences": "sentences are cut in another way",
        "piece_bytes": "--piece-megabytes is another",
    }
    said = []
    for key in (key for key in here if there.get(key) != here[key]):
        if key in flags:
            values = [json.dumps(each.get(key)) for each in (there, here)]
            said.append(f"{flags[key]} is {values[0]} there and {values[1]} here")
        else:
            said.append(words[key])
    return ", ".join(said) or "it is of another version of this program"


class _Step(NamedTuple):
    """What comes out next: a batch of ``piece``, or its end."""

    piece: Piece
    is_end: bool


def encode_pieces(plan: Plan, numbers: Sequence[int], *, maker: str, progress: Progress | None = None) -> Totals:
    """Write the files of some pieces, with the workers that the settings ask for; what they hold together.

    Raises DataError for input or output that fails, and for a bad line unless these are skipped; then the pieces that
    are finished stay.
    """
    done, steps = Totals(), deque[_Step]()
    with ExitStack() as running:
        encoded = encode_in_order(_batches(plan, numbers, steps), plan.prepared.encoding, workers=plan.config.workers)
        running.callback(encoded.close)
        current = running.enter_context(ExitStack())
        writer: PieceWriter | None = None
        results = iter(encoded)
        batch = next(results, None)
        while steps:
            piece, is_end = steps.popleft()
            if writer is None:
                record = PieceRecord(plan.digest, piece.number, piece.start, maker, plan.prepared.engine.name)
                writer = current.enter_context(plan.folder.new(record))
            if is_end:
                done.add(writer.record.totals)
                writer = None
                current.close()  # the file appears
                if progress is not None:
                    progress.update(done, 0)
                continue
            assert batch is not None, "each step that is no end has a batch"
            _add(plan, piece, batch, writer)
            batch = next(results, None)
    return done


def _batches(plan: Plan, numbers: Sequence[int], steps: deque[_Step]) -> Iterator[LineBatch]:
    """The lines of the pieces; ``steps`` gets what is read."""
    paths = [each.path for each in plan.division.files]
    for number in numbers:
        piece = plan.division.piece(number)
        for batch in read_batches(paths, keys=plan.config.json_keys, start=piece.start, stop=piece.stop):
            steps.append(_Step(piece, is_end=False))
            yield batch
        steps.append(_Step(piece, is_end=True))


def _add(plan: Plan, piece: Piece, batch: EncodedBatch, writer: PieceWriter) -> None:
    record, file = writer.record, batch.end.file
    inside = file == piece.start.file and piece.start.offset > 0
    if batch.bad and plan.config.on_bad_line == "error":
        before = lines_before(batch.path, piece.start) if inside else 0
        first = batch.bad[0]
        raise bad_line_error(BadLine(first.path, before + first.line, first.reason))
    for bad in batch.bad:
        record.add_bad(file, bad.line, bad.reason)
    if not batch.path.endswith(PARQUET_ENDING):  # whose rows have their numbers
        record.add_lines(file, batch.num_lines)
    count_batch(record.totals, batch, plan.sources[batch.path])
    writer.add(batch.texts)


def encode_share(plan: Plan, numbers: Sequence[int], *, maker: str) -> Totals:
    """Encode pieces in this process and its workers, with progress on standard error."""
    size = None if not numbers else len(numbers) * plan.division.piece_bytes
    progress = Progress(size, log_interval=plan.config.log_interval, stream=sys.stderr)
    try:
        return encode_pieces(plan, numbers, maker=maker, progress=progress)
    finally:
        progress.bar.clear()
