"""Turn conversations into token files for fine-tuning with --sft: loss on the answers only.

Reads JSON lines of {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}. Turns are
written as --turn-start and --turn-end say, or by a Jinja template (--chat-template). Writes
PREFIX.bin, .idx and .meta.json with a document for each line, and PREFIX_targets.bin and .idx, which mark each token
that is trained on: the turns of the assistant with their ends, and completions. Train with --data-path PREFIX --sft
--packing best-fit, so that attention stays within each conversation.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.conversations import ChatFormat, ChatTemplate, encode, encode_spans, load_template
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.core.tokenizers.text_files import BadLine, find_inputs, read_batches, read_record
from megatron.errors import ConfigError, DataError, run_command


class SftConfig(Settings):
    """Conversations in, tokens and targets out."""

    input: tuple[str, ...] = flag("JSON lines (.gz, .bz2, .xz, .zst too): files, folders, globs in quotes, or -.")
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
    """What was written."""

    conversations: int = 0
    tokens: int = 0
    targets: int = 0
    bad: int = 0


def main(argv: Sequence[str]) -> int:
    """Convert, and print counts."""
    config, tokenizer_config = parse_groups(
        argv, SftConfig, TokenizerConfig, prog="preprocess_sft.py", about=__doc__ or ""
    )
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    counts = convert(config, build_tokenizer(tokenizer_config), _template(config, tokenizer_config.tokenizer_model))
    print(f"conversations  {counts.conversations:,}" + (f" ({counts.bad:,} bad lines left out)" if counts.bad else ""))
    print(f"tokens         {counts.tokens:,}, of which {counts.targets:,} have a loss")
    print(f"wrote          {config.output_prefix}.{{bin,idx,meta.json}} and {targets_prefix(config.output_prefix)}.*")
    return 0


def _template(config: SftConfig, tokenizer_model: str | None) -> ChatTemplate | None:
    if config.chat_template is None:
        return None
    both = [name for name in ("turn_start", "turn_end") if getattr(config, name) != getattr(SftConfig, name)]
    if both:
        raise ConfigError(
            f"--{both[0].replace('_', '-')} and --chat-template both describe the format of turns; give one"
        )
    return load_template(config.chat_template, tokenizer_model, learned=config.learned_role)


def convert(config: SftConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> Counts:
    """Write the files; raises DataError for bad lines (unless they are skipped) and without any conversation."""
    counts, stamp = Counts(), TokenizerStamp.of(tokenizer)
    with ExitStack() as stack:
        documents = stack.enter_context(
            IndexedDatasetWriter(config.output_prefix, token_dtype(tokenizer.vocab_size), tokenizer=stamp)
        )
        targets = stack.enter_context(IndexedDatasetWriter(targets_prefix(config.output_prefix), np.uint8))
        for ids, learned in _encoded(config, tokenizer, template, counts):
            documents.add_document(ids)
            targets.add_document(np.array(learned, np.uint8))
            counts.conversations += 1
            counts.tokens += len(ids)
            counts.targets += sum(learned)
        if not counts.conversations:
            raise DataError(f"--input {' '.join(config.input)} holds no conversation; nothing is written.")
    return counts


def _encoded(
    config: SftConfig, tokenizer: Tokenizer, template: ChatTemplate | None, counts: Counts
) -> Iterator[tuple[list[int], list[bool]]]:
    encode_record = _encoder(config, tokenizer, template)
    for batch in read_batches(find_inputs(config.input, endings=(".jsonl", ".json"))):
        for number, line in enumerate(batch.data.removesuffix(b"\n").split(b"\n"), batch.first_line):
            try:
                encoded = encode_record(read_record(line))
            except DataError as error:
                bad = BadLine(batch.path, number, str(error))
                if config.on_bad_line == "error":
                    raise DataError(f"{bad}; fix the line, or skip such lines with --on-bad-line skip.") from None
                print(f"skipped {bad}", file=sys.stderr)
                counts.bad += 1
            else:
                yield encoded


def _encoder(
    config: SftConfig, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Callable[[dict[str, Any]], tuple[list[int], list[bool]]]:
    """The function that gives a record's ids, and for each whether it is trained on."""
    chat = ChatFormat(_unescaped(config.turn_start), _unescaped(config.turn_end), config.learned_role)
    if template is None:
        return lambda record: encode(chat.parts(record), tokenizer)
    if not isinstance(tokenizer, RustTokenizer):
        raise ConfigError(
            f"--chat-template needs a tokenizer that reports positions in the text, which {tokenizer.name} does not"
        )

    def by_template(record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        if "messages" in record:
            return encode_spans(*template.render(record), tokenizer)
        return encode(chat.parts(record), tokenizer)

    return by_template


def _unescaped(text: str) -> str:
    """The text with line ends in place of \\n, as typed in a shell."""
    return text.replace("\\n", "\n")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
