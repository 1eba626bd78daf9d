"""Turn pairs of answers into token files for training with --preference-loss (DPO and its variants).

Reads JSON lines, a JSON list or Parquet of {"prompt": ..., "chosen": ..., "rejected": ...}, which are texts, or lists
of {"role": ..., "content": ...}, or of "chosen" and "rejected" alone, whose common beginning is the prompt, and says
what it found. Texts are taken as they are; messages are written as --turn-start and --turn-end say, or by a Jinja
template (--chat-template), as tools/preprocess_sft.py writes them. Writes PREFIX.bin, .idx and .meta.json with a
document of two sequences for each pair, the chosen one first, and PREFIX_targets.bin and .idx, which mark the tokens of
the answers. Train with --data-path PREFIX --preference-loss dpo.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.json_records import read_records
from megatron.core.tokenizers.preferences import FIELDS, read_preference
from megatron.core.tokenizers.records import Conversation, Pair
from megatron.core.tokenizers.targets import Sample, SampleEncoder
from megatron.core.tokenizers.text_files import BadLine, find_inputs
from megatron.errors import DataError, run_command
from tools.preprocess_sft import SftConfig, remarks_on_format, writer_of


class PreferencesConfig(SftConfig):
    """Pairs of answers in, tokens and targets out."""


@dataclass
class Counts:
    """What was read and written. ``longest``: tokens of the longest pair as one sample."""

    pairs: int = 0
    tokens: int = 0
    targets: int = 0
    bad: int = 0
    conversations: int = 0
    longest: int = 0
    forms: Counter[str] = field(default_factory=Counter)


def main(argv: Sequence[str]) -> int:
    """Convert, and print counts."""
    config, tokenizer_config = parse_groups(
        argv, PreferencesConfig, TokenizerConfig, prog="preprocess_preferences.py", about=__doc__ or ""
    )
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    tokenizer = build_tokenizer(tokenizer_config)
    for remark in getattr(tokenizer, "remarks", ()):
        print(f"note: {remark}", file=sys.stderr)
    encoder = SampleEncoder(tokenizer, writer_of(config, tokenizer, tokenizer_config.tokenizer_model))
    counts = convert(config, tokenizer, encoder)
    print("\n".join(report(config, counts, encoder, tokenizer)))
    return 0


def convert(config: PreferencesConfig, tokenizer: Tokenizer, encoder: SampleEncoder) -> Counts:
    """Write the files; raises DataError for bad lines (unless they are skipped) and without any pair."""
    counts, stamp = Counts(), TokenizerStamp.of(tokenizer)
    with ExitStack() as stack:
        documents = stack.enter_context(
            IndexedDatasetWriter(config.output_prefix, token_dtype(tokenizer.vocab_size), tokenizer=stamp)
        )
        targets = stack.enter_context(IndexedDatasetWriter(targets_prefix(config.output_prefix), np.uint8))
        for pair in _encoded(config, encoder, counts):
            documents.add_document(*(each.ids for each in pair))
            targets.add_document(*(np.array(each.learned, np.uint8) for each in pair))
            counts.pairs += 1
            counts.tokens += sum(len(each.ids) for each in pair)
            counts.targets += sum(sum(each.learned) for each in pair)
            counts.longest = max(counts.longest, sum(len(each.ids) - 1 for each in pair))
        if not counts.pairs:
            raise DataError(f"--input {' '.join(config.input)} holds no pair of answers; nothing is written.")
        documents.chat = ChatSettings(
            template=encoder.source if counts.conversations else None,
            end_tokens=tuple(each for each in encoder.end_tokens if each != tokenizer.eod),
        )
    return counts


def _encoded(config: PreferencesConfig, encoder: SampleEncoder, counts: Counts) -> Iterator[tuple[Sample, Sample]]:
    for path, line, record in read_records(find_inputs(config.input), columns=FIELDS):
        try:
            if isinstance(record, DataError):
                raise record
            found = read_preference(record)
            chosen, rejected = _side(encoder, "chosen", found.chosen), _side(encoder, "rejected", found.rejected)
            if chosen == rejected:
                raise DataError("chosen and rejected have the same tokens, so there is nothing to prefer")
        except DataError as error:
            bad = BadLine(path, line, str(error))
            if config.on_bad_line == "error":
                raise DataError(f"{bad}; fix the line, or skip such lines with --on-bad-line skip.") from None
            print(f"skipped {bad}", file=sys.stderr)
            counts.bad += 1
        else:
            counts.forms[found.form] += 1
            counts.conversations += isinstance(found.chosen, Conversation)
            yield chosen, rejected


def _side(encoder: SampleEncoder, name: str, answer: Conversation | Pair) -> Sample:
    try:
        return encoder.encode(answer)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def report(config: PreferencesConfig, counts: Counts, encoder: SampleEncoder, tokenizer: Tokenizer) -> Iterator[str]:
    """What was written, and what may surprise the user of it, in lines."""
    bad = f" ({counts.bad:,} bad lines left out)" if counts.bad else ""
    yield f"pairs          {counts.pairs:,}{bad}"
    yield f"read as        {', '.join(f'{form} ({count:,})' for form, count in counts.forms.items())}"
    yield f"tokens         {counts.tokens:,}, of which {counts.targets:,} are answers"
    yield f"longest pair   {counts.longest:,} tokens, which --seq-length must hold"
    yield f"wrote          {config.output_prefix}.{{bin,idx,meta.json}} and {targets_prefix(config.output_prefix)}.*"
    for remark in remarks_on_format(encoder, tokenizer):
        yield f"remark: {remark}"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
