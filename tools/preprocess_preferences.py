"""Turn pairs of answers, or rated ones, into token files for training with --preference-loss (DPO, its variants, KTO).

Reads JSON lines, a JSON list or Parquet of {"prompt": ..., "chosen": ..., "rejected": ...}; each value is a text or a
list of {"role": ..., "content": ...}. Without "prompt" the common beginning of both answers is the prompt. For KTO also
of {"prompt": ..., "completion": ..., "label": true or false}. Prints which form it found. Texts are taken as they are;
messages are written as --turn-start and --turn-end say, or by a Jinja template (--chat-template), as
tools/preprocess_sft.py writes them. Writes PREFIX.bin, .idx and .meta.json with a document of two sequences for each
pair, the chosen one first, and PREFIX_targets.bin and .idx, which mark the tokens of the answers; of an answer that is
rated alone the other sequence is empty. Train with --data-path PREFIX --preference-loss dpo, or kto.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.rated import describe_labels
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.preferences import FIELDS, Preference, RatedAnswer, read_preference
from megatron.core.tokenizers.records import Conversation, Pair
from megatron.core.tokenizers.targets import Sample, SampleEncoder
from megatron.errors import DataError, run_command
from tools.preprocess_sft import (
    Counts,
    Encoded,
    SftConfig,
    encoder_of,
    remark_on_template,
    remarks_on_format,
    write,
)

_NONE = Sample([], [])
"""The other answer of a line that has one."""


class PreferencesConfig(SftConfig):
    """The files of answers, how messages are written, and where the token files go."""


@dataclass
class PairCounts(Counts):
    """What was read and written of pairs or rated answers. ``longest``: tokens of the longest one as a sample of
    training. ``labels``: how many answers rated alone are desirable, and how many are not.
    """

    longest: int = 0
    labels: tuple[int, int] = (0, 0)


def main(argv: Sequence[str]) -> int:
    """Convert, and print counts."""
    config, tokenizer_config = parse_groups(
        argv, PreferencesConfig, TokenizerConfig, prog="preprocess_preferences.py", about=__doc__ or ""
    )
    tokenizer, encoder = encoder_of(config, tokenizer_config)
    counts = convert(config, tokenizer, encoder)
    print(
        "\n".join([*report(config, counts, encoder, tokenizer), *remark_on_template(config, tokenizer_config, counts)])
    )
    return 0


def convert(config: PreferencesConfig, tokenizer: Tokenizer, encoder: SampleEncoder) -> PairCounts:
    """Write the files; raises DataError for bad lines (unless they are skipped) and without any pair."""
    counts = PairCounts()

    def encode(record: Any) -> Encoded:
        found = read_preference(record)
        _check_same_kind(found, counts)
        if isinstance(found, RatedAnswer):
            answer = encoder.encode(found.answer)
            counts.longest = max(counts.longest, len(answer.ids) - 1)
            counts.labels = counts.labels[0] + found.is_desirable, counts.labels[1] + (not found.is_desirable)
            both = (answer, _NONE) if found.is_desirable else (_NONE, answer)
            return Encoded(found.form, isinstance(found.answer, Conversation), both)
        pair = _side(encoder, "chosen", found.chosen), _side(encoder, "rejected", found.rejected)
        if pair[0] == pair[1]:
            raise DataError("chosen and rejected have the same tokens, so there is nothing to prefer")
        counts.longest = max(counts.longest, sum(len(each.ids) - 1 for each in pair))
        return Encoded(found.form, isinstance(found.chosen, Conversation), pair)

    write(config, counts, tokenizer, encoder, encode, columns=FIELDS, what="pair of answers, and no rated one")
    return counts


def _check_same_kind(found: Preference | RatedAnswer, counts: PairCounts) -> None:
    """Raise DataError for a pair among rated answers, and for one of these among pairs."""
    is_rated = isinstance(found, RatedAnswer)
    if counts.samples and is_rated != any(counts.labels):
        kinds = ("a pair of answers", "an answer that is rated alone")
        raise DataError(
            f"the line holds {kinds[is_rated]}, and each line before it {kinds[not is_rated]}: give the two kinds to "
            "commands of their own"
        )


def _side(encoder: SampleEncoder, name: str, answer: Conversation | Pair) -> Sample:
    try:
        return encoder.encode(answer)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def report(
    config: PreferencesConfig, counts: PairCounts, encoder: SampleEncoder, tokenizer: Tokenizer
) -> Iterator[str]:
    """What was written, and what may surprise the user of it, in lines."""
    bad = f" ({counts.bad:,} bad lines left out)" if counts.bad else ""
    is_rated = any(counts.labels)
    yield f"{'rated answers ' if is_rated else 'pairs         '} {counts.samples:,}{bad}"
    yield f"read as        {', '.join(f'{form} ({count:,})' for form, count in counts.forms.items())}"
    if is_rated:
        yield f"labels         {describe_labels(counts.labels)}"
    yield f"tokens         {counts.tokens:,}, of which {counts.targets:,} are answers"
    what = "answer" if is_rated else "pair  "
    yield f"longest {what} {counts.longest:,} tokens, which --seq-length must hold"
    yield f"wrote          {config.output_prefix}.{{bin,idx,meta.json}} and {targets_prefix(config.output_prefix)}.*"
    for remark in remarks_on_format(encoder, tokenizer):
        yield f"remark: {remark}"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
