"""Train a byte-level BPE like GPT-2's, or a WordPiece vocabulary like BERT's, on your own text.

A BPE is written as tokenizer.json for HuggingFaceTokenizer (and for transformers), and as vocab.json and merges.txt for
GPT2BPETokenizer; WordPiece as vocab.txt, for BertWordPieceLowerCase. The same text gives the same files.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.tokenizers.base import encoded_texts
from megatron.core.tokenizers.gpt2_bpe import END_OF_TEXT, byte_level
from megatron.core.tokenizers.input_files import JSON_ENDINGS, PARQUET_ENDING, TEXT_ENDINGS, find_inputs, is_plain_text
from megatron.core.tokenizers.text_files import read_batches, read_documents, read_plain_lines
from megatron.core.tokenizers.wordpiece import SPECIAL_TOKENS, UNKNOWN, words_pipeline
from megatron.errors import ConfigError, DataError, run_command
from megatron.training.reporting.progress import ProgressBar

NUM_BYTES = 256


class TrainTokenizerConfig(Settings):
    """Text in, vocabulary out."""

    input: tuple[str, ...] = flag(
        "JSON lines, or plain text in .txt (.gz, .bz2, .xz, .zst too), or .parquet: files, folders, globs in quotes, "
        "or - for JSON lines on standard input."
    )
    output_dir: str = flag(
        "Folder of tokenizer.json, tokenizer_config.json, vocab.json and merges.txt, or of WordPiece's vocab.txt."
    )
    vocab_size: int = flag("Tokens of the vocabulary, the 256 bytes and special tokens included.", at_most=10_000_000)
    kind: Literal["byte-level-bpe", "wordpiece"] = flag(
        "byte-level-bpe: GPT-2's kind; wordpiece: BERT's, in lower case.", default="byte-level-bpe"
    )
    json_key: str = flag("Key of each object whose text is used.", default="text")
    special_tokens: tuple[str, ...] = flag(f"Special tokens besides {END_OF_TEXT}, which ends documents.", default=())
    min_frequency: int = flag("Occurrences a pair needs to become a token.", default=2, at_least=1)
    on_bad_line: Literal["error", "skip"] = flag(
        "For lines that hold no document: stop at the first, or count and skip them.",
        default="error",
    )


def main(argv: Sequence[str]) -> int:
    """Train and write."""
    (config,) = parse_groups(argv, TrainTokenizerConfig, prog="train_tokenizer.py", about=__doc__ or "")
    pipeline = train(config)
    if config.kind == "wordpiece":
        write_files(Path(config.output_dir), {"vocab.txt": vocabulary_lines(pipeline, special_tokens(config))})
        print(f"{config.output_dir}: {pipeline.get_vocab_size():,} tokens in vocab.txt")
        return 0
    save(pipeline, Path(config.output_dir))
    print(
        f"{config.output_dir}: {pipeline.get_vocab_size():,} tokens in tokenizer.json, and in vocab.json + merges.txt"
    )
    return 0


def special_tokens(config: TrainTokenizerConfig) -> list[str]:
    """Special tokens that the kind needs, and those of the flag."""
    needed = SPECIAL_TOKENS if config.kind == "wordpiece" else (END_OF_TEXT,)
    return list(dict.fromkeys([*needed, *config.special_tokens]))


def train(config: TrainTokenizerConfig) -> tokenizers.Tokenizer:
    """The trained tokenizer; holds the words of the text in memory, not the text.

    Raises ConfigError when the vocabulary is too small for the bytes, DataError when the text is too little for it.
    """
    words = config.kind == "wordpiece"
    special = special_tokens(config)
    least = (0 if words else NUM_BYTES) + len(special)
    if config.vocab_size < least:
        held = f"{len(special)} special tokens" if words else f"the {NUM_BYTES} bytes and {len(special)} special tokens"
        raise ConfigError(f"--vocab-size {config.vocab_size} cannot hold {held}; give at least {least}.")
    word_pieces = models.WordPiece(unk_token=UNKNOWN)
    pipeline = words_pipeline(word_pieces, lower_case=True) if words else byte_level(models.BPE())
    texts = Texts(config)
    if words:
        if "-" in config.input:
            raise ConfigError("--kind wordpiece reads its text twice, so it can't come from standard input: name files")
        # Of pieces that occur equally often the trainer takes the one seen first, and it sees continuations (##x) in
        # random order unless they are given as special tokens.
        characters = {each for batch in texts for text in batch for each in pipeline.normalizer.normalize_str(text)}
        special = [*special, *(f"##{each}" for each in sorted(characters) if not each.isspace())]
        texts = Texts(config)
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "min_frequency": config.min_frequency,
        "special_tokens": special,
        "show_progress": False,  # the library's own bar has another style
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.WordPieceTrainer(**common) if words else trainers.BpeTrainer(**common, initial_alphabet=alphabet)
    pipeline.train_from_iterator(iter(texts), trainer)
    if texts.bad:
        print(f"left out {texts.bad:,} bad lines, the first: {texts.first_bad}", file=sys.stderr)
    if not texts.documents:
        raise DataError(f"--input {' '.join(config.input)} holds no documents ({texts.bad} bad lines).")
    if pipeline.get_vocab_size() < config.vocab_size:
        raise DataError(
            f"--vocab-size {config.vocab_size} is more than this text supports, which has only "
            f"{pipeline.get_vocab_size()} tokens that occur {config.min_frequency} times; "
            "give more text, a smaller vocabulary or a lower --min-frequency."
        )
    return pipeline


class Texts:
    """The texts of all input, a batch at a time, and the number of bad lines."""

    def __init__(self, config: TrainTokenizerConfig) -> None:
        self._config = config
        self._paths = find_inputs(config.input, endings=(*JSON_ENDINGS, PARQUET_ENDING, *TEXT_ENDINGS))
        self.bad = self.documents = 0
        self.first_bad = ""

    def __iter__(self) -> Iterator[list[str]]:
        bar = ProgressBar(None)
        for batch in read_batches(self._paths, keys=[self._config.json_key]):
            plain = is_plain_text(batch.path)
            documents = read_plain_lines(batch) if plain else read_documents(batch, [self._config.json_key])
            (texts,) = documents.texts.values()
            try:
                encoded_texts(texts)  # refuses lone surrogates
            except DataError:
                documents.drop_unless(lambda text: encoded_texts([text]))
            if documents.bad and self._config.on_bad_line == "error":
                raise DataError(f"{documents.bad[0]}; fix the line, or skip such lines with --on-bad-line skip.")
            self.first_bad = self.first_bad or "".join(map(str, documents.bad[:1]))
            self.bad += len(documents.bad)
            self.documents += len(texts)
            bar.show(self.documents, f"{self.documents:,} documents read")
            yield texts
        bar.clear()


def save(pipeline: tokenizers.Tokenizer, folder: Path) -> None:
    """Write the four files; raises DataError when the folder cannot be written."""
    model = json.loads(pipeline.to_str())["model"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    files = {
        "vocab.json": _json(dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))),
        "merges.txt": "".join(["#version: 0.2\n", *(" ".join(pair) + "\n" for pair in model["merges"])]),
        "tokenizer_config.json": _json(settings),
        "tokenizer.json": pipeline.to_str(pretty=True),
    }
    write_files(folder, files)


def vocabulary_lines(pipeline: tokenizers.Tokenizer, special: Sequence[str]) -> str:
    """A vocab.txt: one piece a line, ``special`` first. The library's order of the others changes from run to run."""
    pieces = sorted(pipeline.get_vocab().keys() - set(special))
    return "".join(f"{piece}\n" for piece in (*special, *pieces))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files by name; raises DataError when the folder cannot be written."""
    for name, text in files.items():
        path = folder / name
        with write_errors(path, remedy="give --output-dir another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            with replaced_file(path) as aside:
                aside.write_text(text, encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
