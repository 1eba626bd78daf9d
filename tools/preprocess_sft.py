"""Turn conversations into token files for fine-tuning with --sft: loss on the answers only.

Reads JSON lines, a JSON list or Parquet of {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ...,
"completion": ...} (texts, or lists of messages), of ShareGPT's "conversations" and of Alpaca's "instruction", "input"
and "output", and says what it found. Turns are written as --turn-start and --turn-end say, or by a Jinja template
(--chat-template). Writes PREFIX.bin, .idx and .meta.json with a document for each, and PREFIX_targets.bin and .idx,
which mark each token that is trained on: the turns of the assistant with their ends, but for those with "weight": 0,
and completions. Train with --data-path PREFIX --sft --packing best-fit, so that attention stays within each
conversation. The metadata keep the format of turns and the tokens that end answers, for checkpoints.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron.config.flags import Settings, flag, plural_s
from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import IMAGE, OWN, ChatFormat, Writer, load_template, own_template
from megatron.core.tokenizers.input_files import find_inputs
from megatron.core.tokenizers.json_records import read_records
from megatron.core.tokenizers.records import FIELDS, Conversation, read_sample
from megatron.core.tokenizers.targets import Sample, SampleEncoder, leading_text
from megatron.core.tokenizers.text_files import BadLine
from megatron.errors import ConfigError, DataError, run_command


class SftConfig(Settings):
    """Conversations in, tokens and targets out."""

    input: tuple[str, ...] = flag(
        "JSON lines, JSON lists (.gz, .bz2, .xz, .zst too) or .parquet: files, folders, globs in quotes, or -."
    )
    output_prefix: str = flag("Prefix of all files written.")
    turn_start: str = flag(
        "Text at the start of a turn; {role} is replaced by the speaker's role.", default="<|im_start|>{role}\\n"
    )
    turn_end: str = flag("Text at the end of a turn.", default="<|im_end|>\\n")
    chat_template: str | None = flag(
        "Jinja template that writes conversations: a file, or the word tokenizer for the tokenizer's own.", default=None
    )
    learned_role: str = flag("Role whose turns are trained on.", default="assistant")
    on_bad_line: Literal["error", "skip"] = flag(
        "For lines that hold no conversation: stop at the first, or report, count and skip them.",
        default="error",
    )


@dataclass
class Counts:
    """What was read and written. ``samples``: records, whatever their form. ``forms``: how many of each form."""

    samples: int = 0
    conversations: int = 0
    tokens: int = 0
    targets: int = 0
    bad: int = 0
    forms: Counter[str] = field(default_factory=Counter)


@dataclass
class SftCounts(Counts):
    """What was read and written for instruction tuning. ``unlearned``: turns with weight 0."""

    unlearned: int = 0


def main(argv: Sequence[str]) -> int:
    """Convert, and print counts."""
    config, tokenizer_config = parse_groups(
        argv, SftConfig, TokenizerConfig, prog="preprocess_sft.py", about=__doc__ or ""
    )
    tokenizer, encoder = encoder_of(config, tokenizer_config)
    counts = convert(config, tokenizer, encoder)
    print(
        "\n".join([*report(config, counts, encoder, tokenizer), *remark_on_template(config, tokenizer_config, counts)])
    )
    return 0


def encoder_of(
    config: SftConfig, tokenizer_config: TokenizerConfig, *, marker: str | None = None, image: str = IMAGE
) -> tuple[Tokenizer, SampleEncoder]:
    """The tokenizer, and what writes conversations with it. ``marker``: as of ``SampleEncoder``; ``image``: as of
    ``ChatTemplate``.
    """
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    tokenizer = build_tokenizer(tokenizer_config)
    for remark in getattr(tokenizer, "remarks", ()):
        print(f"note: {remark}", file=sys.stderr)
    writer = writer_of(config, tokenizer, tokenizer_config.tokenizer_model, image=image)
    return tokenizer, SampleEncoder(tokenizer, writer, marker=marker)


def convert(config: SftConfig, tokenizer: Tokenizer, encoder: SampleEncoder) -> SftCounts:
    """Write the files; raises DataError for bad lines (unless they are skipped) and without any conversation."""
    counts = SftCounts()

    def encode(record: Any) -> Encoded:
        found = read_sample(record)
        sample, is_conversation = encoder.encode(found), isinstance(found, Conversation)
        if isinstance(found, Conversation):
            counts.unlearned += sum(
                message["role"] == config.learned_role and not weight
                for message, weight in zip(found.messages, found.weights)
            )
        return Encoded(found.form, is_conversation, (sample,))

    write(config, counts, tokenizer, encoder, encode, columns=FIELDS, what="conversation")
    return counts


@dataclass(frozen=True)
class Encoded:
    """A record as the sequences of one document. ``form``: of the record, in words."""

    form: str
    is_conversation: bool
    samples: tuple[Sample, ...]


def write(
    config: SftConfig,
    counts: Counts,
    tokenizer: Tokenizer,
    encoder: SampleEncoder,
    encode: Callable[[Any], Encoded],
    *,
    columns: Collection[str],
    what: str,
) -> None:
    """Write a document for each record of ``--input``, and count them. ``columns``: what is read of Parquet files.

    Raises DataError for records that ``encode`` raises it for, unless they are skipped, and without any ``what``.
    """
    stamp = TokenizerStamp.of(tokenizer)
    with ExitStack() as stack:
        documents = stack.enter_context(
            IndexedDatasetWriter(config.output_prefix, token_dtype(tokenizer.vocab_size), tokenizer=stamp)
        )
        targets = stack.enter_context(IndexedDatasetWriter(targets_prefix(config.output_prefix), np.uint8))
        for path, line, record in read_records(find_inputs(config.input), columns=columns):
            try:
                if isinstance(record, DataError):
                    raise record
                found = encode(record)
            except DataError as error:
                bad = BadLine(path, line, str(error))
                if config.on_bad_line == "error":
                    raise DataError(f"{bad}; fix the line, or skip such lines with --on-bad-line skip.") from None
                print(f"skipped {bad}", file=sys.stderr)
                counts.bad += 1
                continue
            documents.add_document(*(each.ids for each in found.samples))
            targets.add_document(*(np.array(each.learned, np.uint8) for each in found.samples))
            counts.samples += 1
            counts.forms[found.form] += 1
            counts.conversations += found.is_conversation
            counts.tokens += sum(len(each.ids) for each in found.samples)
            counts.targets += sum(sum(each.learned) for each in found.samples)
        if not counts.samples:
            raise DataError(f"--input {' '.join(config.input)} holds no {what}; nothing is written.")
        documents.chat = ChatSettings(
            template=encoder.source if counts.conversations else None,
            end_tokens=tuple(each for each in encoder.end_tokens if each != tokenizer.eod),
        )


def writer_of(config: SftConfig, tokenizer: Tokenizer, tokenizer_model: str | None, *, image: str = IMAGE) -> Writer:
    """The format of turns."""
    if config.chat_template is None:
        return ChatFormat(
            _unescaped(config.turn_start),
            _unescaped(config.turn_end),
            learned=config.learned_role,
            begin=leading_text(tokenizer),
        )
    both = [name for name in ("turn_start", "turn_end") if getattr(config, name) != getattr(SftConfig, name)]
    if both:
        raise ConfigError(
            f"--{both[0].replace('_', '-')} and --chat-template both describe the format of turns; give one"
        )
    return load_template(config.chat_template, tokenizer_model, learned=config.learned_role, image=image)


def remark_on_template(config: SftConfig, tokenizer_config: TokenizerConfig, counts: Counts) -> Iterator[str]:
    """A remark where turns are written in another format than the tokenizer's own."""
    own = None if config.chat_template else own_template(tokenizer_config.tokenizer_model)
    if counts.conversations and own is not None:
        yield (
            f"remark: the tokenizer has a chat template of its own, which --chat-template {OWN} would use; turns are "
            "written as --turn-start and --turn-end say"
        )


def report(config: SftConfig, counts: SftCounts, encoder: SampleEncoder, tokenizer: Tokenizer) -> Iterator[str]:
    """What was written, and what may surprise the user of it, in lines."""
    ends = encoder.endings
    bad = f" ({counts.bad:,} bad lines left out)" if counts.bad else ""
    yield f"conversations  {counts.samples:,}{bad}"
    yield f"read as        {', '.join(f'{form} ({count:,})' for form, count in counts.forms.items())}"
    yield f"tokens         {counts.tokens:,}, of which {counts.targets:,} have a loss"
    last = [f"{count:,} end with {_named(token, tokenizer)}" for token, count in ends.last.most_common()]
    yield f"answers        {ends.answers:,}: {', '.join(last) or 'none has an end'}"
    if counts.unlearned:
        turns = f"turn{plural_s(counts.unlearned)} of the {config.learned_role}"
        yield f"not trained    {counts.unlearned:,} {turns} with weight 0"
    yield f"wrote          {config.output_prefix}.{{bin,idx,meta.json}} and {targets_prefix(config.output_prefix)}.*"
    for remark in remarks_on_format(encoder, tokenizer):
        yield f"remark: {remark}"


def _named(token: int, tokenizer: Tokenizer) -> str:
    return f"{json.dumps(tokenizer.detokenize([token]), ensure_ascii=False)} (id {token})"


def remarks_on_format(encoder: SampleEncoder, tokenizer: Tokenizer) -> Iterator[str]:
    """What would keep a model from ending its answers."""
    ends = encoder.endings
    never, all_answers = "answers never learn to stop", f"{ends.answers:,}"
    if ends.next_marks:
        yield (
            f"the format has no end of an answer: {ends.next_marks:,} of {all_answers} answers are trained to end with "
            "the mark of the next turn"
        )
    if ends.documents:
        yield (
            f"the format has no end of an answer: {ends.documents:,} of {all_answers} answers are trained to end with "
            f"{_named(tokenizer.eod, tokenizer)}, which is put behind the conversation"
        )
    if ends.unmarked:
        yield (
            f"{ends.unmarked:,} of {all_answers} {never}: between {{% generation %}} and {{% endgeneration %}} the "
            "chat template writes no special token behind them; move the end of the turn in there"
        )
    if ends.none:
        yield (
            f"{ends.none:,} of {all_answers} {never}: what follows them is ordinary text; end turns with a single token"
        )
    ambiguous = [token for token in ends.last if token not in encoder.end_tokens]
    for token in ambiguous:
        yield (
            f"{_named(token, tokenizer)} ends {ends.last[token]:,} answers and is {ends.within[token]:,} times within "
            "one, so it is no end token; end turns with another one"
        )
    if encoder.cut_marks:
        cut = ", ".join(f"{mark} ({count} tokens)" for mark, count in encoder.cut_marks.items())
        yield (f"the tokenizer cuts marks of turns into pieces, which answers will show: {cut}")
    if ends.none or ambiguous or encoder.cut_marks:
        yield f"to end turns with a single token, give {_single_marks(tokenizer)}"


def _single_marks(tokenizer: Tokenizer) -> str:
    """Flags that make turns end with a single token, for the user."""
    end = tokenizer.detokenize([tokenizer.eod])
    try:
        knows = tokenizer.tokenize_parts([end])[0] == [tokenizer.eod]
    except DataError:
        knows = False
    if knows:
        return f"--turn-start '{{role}}:\\n' --turn-end '{end}\\n', or a tokenizer that has marks of turns"
    return (
        "--tokenizer-type HuggingFaceTokenizer and the folder of a tokenizer.json that has marks of turns "
        "(tools/train_tokenizer.py --special-tokens makes one)"
    )


def _unescaped(text: str) -> str:
    """The text with line ends in place of \\n, as typed in a shell."""
    return text.replace("\\n", "\n")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
