"""Pieces of a data set, joined to the files that one machine would have written."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.journal import Totals
from megatron.core.datasets.remote_writer import RemoteDatasetWriter
from megatron.core.files.durable import write_errors
from megatron.core.files.remote_path import RemotePath, path_of
from megatron.core.tokenizers.text_files import BadLine
from megatron.errors import DataError, kept_on_interrupt
from megatron.preprocessing.piece_files import PieceRecord
from megatron.preprocessing.pieces import Plan
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.reporting import BAD_LINES_SHOWN, check_documents, report_skipped
from megatron.preprocessing.summary import summarize

_NAMED = 5  # missing pieces that a sentence names


def merge(plan: Plan) -> Totals:
    """Write the token files of every key from the files of all pieces, which are deleted then.

    Raises DataError for pieces that are missing, damaged or of other settings, input or tokenizer; then no file of the
    output appears.
    """
    sizes = plan.folder.finished()
    totals = Totals()
    records = _checked(plan, sizes, totals)
    progress = Progress(totals.text_bytes, log_interval=plan.config.log_interval, stream=sys.stderr)
    report_skipped(list(_bad_lines(plan, records)), 0, progress.say)
    check_documents(plan.config, totals)
    config, keys, dtype = plan.config, plan.config.json_keys, plan.prepared.encoding.dtype
    kept = "the pieces are kept; the same command joins them from the beginning"
    with kept_on_interrupt(lambda: kept), ExitStack() as stack:
        stack.callback(progress.bar.clear)
        writers = {key: stack.enter_context(_writer(plan, key, totals.tokens.get(key, 0))) for key in keys}
        done = Totals()
        for number in range(plan.division.count):
            record = plan.folder.read_record(number, sizes[number])
            for texts in plan.folder.batches(record, sizes[number], keys=keys, dtype=dtype):
                for key, writer in writers.items():
                    writer.add_documents(texts[key].tokens, texts[key].lengths, texts[key].sequences)
            done.add(record.totals)
            progress.update(done, done.text_bytes)
    outputs = {key: writer.metadata() for key, writer in writers.items()}
    engines = sorted({record.engine for record in records})
    summarize(config, plan.prepared, totals, outputs, progress=progress, engines=engines)
    with write_errors(plan.folder.root, remedy="delete it by hand: the output is complete"):
        _delete(plan)
    return totals


def _checked(plan: Plan, sizes: Mapping[int, int], totals: Totals) -> list[PieceRecord]:
    """Records of all pieces without what is large of them, which is counted in ``totals``.

    Raises DataError for missing ones, with what makes them, and for those of another plan.
    """
    there = list[PieceRecord]()
    for number in sorted(sizes):
        record = plan.folder.read_record(number, sizes[number])
        totals.add(record.totals)
        there.append(replace(record, totals=Totals(), batches=[]))
        if record.plan != plan.digest or record.number not in range(plan.division.count):
            raise DataError(
                f"{plan.folder.path(number)} is of other settings, another input or another tokenizer: delete "
                f"it, and make it again with {_maker(record.maker)}"
            )
    missing = [number for number in range(plan.division.count) if number not in sizes]
    if missing:
        named = ", ".join(f"{number} ({plan.division.name(number)})" for number in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise DataError(
            f"{len(missing):,} of {plan.division.count:,} pieces are missing in {plan.folder.root}: {named}{more}; "
            f"{_remedy(missing, there)}"
        )
    return there


def _remedy(missing: Sequence[int], there: Sequence[PieceRecord]) -> str:
    """What makes the missing pieces: the shares that made the others, where those were of one number."""
    counts = {record.maker.partition("/")[2] for record in there}
    count = counts.pop() if len(counts) == 1 else ""
    if not there:
        return "make them with --shard 1/N to N/N"
    if not count.isdigit():
        return "run the command that made the others again, which leaves out what is finished"
    shares = sorted({number % int(count) + 1 for number in missing})
    shown = ", ".join(f"--shard {share}/{count}" for share in shares[:_NAMED])
    return f"run {shown}{' and others' if len(shares) > _NAMED else ''} again, which leaves out what is finished"


def _maker(maker: str) -> str:
    return f"--shard {maker}" if "/" in maker else "the command that made the others"


def _bad_lines(plan: Plan, records: Sequence[PieceRecord]) -> Iterator[BadLine]:
    """The first bad lines of the input, by the numbers that they have in their files."""
    file, lines, shown = -1, 0, 0
    for record in records:
        start = record.start
        before = lines if start.offset and start.file == file else 0
        for bad in record.bad:
            in_middle = bad.file == start.file and start.offset > 0
            yield BadLine(plan.division.files[bad.file].path, bad.line + (before if in_middle else 0), bad.reason)
            shown += 1
            if shown > BAD_LINES_SHOWN:
                return
        if record.last_file >= 0:
            continues = record.last_file == file and start.offset > 0 and start.file == file
            file, lines = record.last_file, (lines if continues else 0) + record.last_lines


def _writer(plan: Plan, key: str, num_tokens: int) -> IndexedDatasetWriter:
    prefix, dtype, stamp = plan.config.prefix(key), plan.prepared.encoding.dtype, plan.prepared.stamp
    if isinstance(path_of(prefix), RemotePath):
        return RemoteDatasetWriter(prefix, dtype, tokenizer=stamp, num_tokens=num_tokens)
    return IndexedDatasetWriter(str(path_of(prefix)), dtype, tokenizer=stamp)


def _delete(plan: Plan) -> None:
    root = plan.folder.root
    if isinstance(root, RemotePath):
        root.remove_tree()
    else:
        shutil.rmtree(root)
