"""What preprocessing is asked for: the flags of tools/preprocess_data.py, and what contradicts itself among them."""

from __future__ import annotations

import os
import sys
from typing import Literal

from typing_extensions import override

from megatron.config.flags import Settings, derive, flag
from megatron.errors import ConfigError


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
    split_sentences: bool = flag("Make each sentence a separate sequence, for training on masked text.", default=False)
    keep_newlines: bool = flag("With --split-sentences: keep the whitespace after each sentence.", default=False)
    lang: str = flag("With --split-sentences: language of the rules in NLTK_DATA.", default="english")

    @override
    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        derive(self, "workers", cores or 1)

    def prefix(self, key: str) -> str:
        """Prefix of the data set of one key."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


def check_settings(config: PreprocessConfig) -> None:
    """Raise ConfigError for flags that contradict each other."""
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
