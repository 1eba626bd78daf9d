"""What preprocessing is asked for: the flags of tools/preprocess_data.py, and what contradicts itself among them."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from megatron.config.flags import Settings, derive, flag
from megatron.errors import ConfigError


class PreprocessConfig(Settings):
    """Text in, tokens out."""

    input: tuple[str, ...] = flag(
        "JSON lines, one object a line (.gz, .bz2, .xz, .zst too), or .parquet files: files, folders, globs in quotes, "
        "also at URLs such as s3://bucket/folder, or - for JSON lines on standard input."
    )
    output_prefix: str = flag("Prefix of all files written, on a disk or at a URL.")
    json_keys: tuple[str, ...] = flag(
        "Keys of each object whose text is tokenized, each into its own files.", default=("text",)
    )
    append_eod: bool = flag("End each document with the tokenizer's end-of-document id.", default=False)
    workers: int = flag(
        "Processes that tokenize.", default=None, derived="one for each core, with --ray one", at_least=1, at_most=1024
    )
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
    shard: str | None = flag(
        "Encode only shard I of N of the input, such as 3/8, or slurm: the shard of this task of a Slurm job array. "
        "All machines get the same other flags; --merge-shards writes the output.",
        default=None,
    )
    merge_shards: bool = flag("Write the output from what all runs with --shard have encoded.", default=False)
    ray: str | None = flag(
        "Encode on a Ray cluster: local, auto (the one that this machine belongs to) or an address.", default=None
    )
    piece_megabytes: float | None = flag(
        "Size of the pieces of input that --shard, --ray and an --output-prefix at a URL encode one by one. "
        "Unless given, a thousandth of the input, from 16 MiB to 1 GiB.",
        default=None,
        above=0,
        at_most=1 << 20,
    )
    lang: str = flag("With --split-sentences: language of the rules in NLTK_DATA.", default="english")

    @override
    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        derive(self, "workers", 1 if self.ray else cores or 1)

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
    ways = [name for name, used in _ways(config) if used]
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(ways)} contradict each other: give one of them.")
    if config.shard is not None:
        share_of(config.shard)
    if config.ray == "":
        raise ConfigError("--ray is empty; give local, auto or the address of a cluster")
    if config.partitions > 1:
        print(f"--partitions {config.partitions} has no effect: all workers share all input.", file=sys.stderr)


def _ways(config: PreprocessConfig) -> tuple[tuple[str, bool], ...]:
    return (
        ("--shard", config.shard is not None),
        ("--merge-shards", config.merge_shards),
        ("--ray", config.ray is not None),
    )


@dataclass(frozen=True)
class Share:
    """Share ``index``, counted from 1, of ``count``."""

    index: int
    count: int

    @override
    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def share_of(word: str) -> Share:
    """The share that ``--shard`` names. Raises ConfigError for one that doesn't exist, and outside of a job array."""
    if word == "slurm":
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT")
        words = [os.environ.get(name) or usual for name, usual in zip(names, ("", "0", "1", ""))]
        if not all(re.fullmatch(r"[0-9]{1,9}", each) for each in words) or "0" in words[2:]:
            raise ConfigError(
                "--shard slurm needs the variables of a job array, SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT: "
                "submit with sbatch --array, or give a share such as --shard 3/8"
            )
        task, first, step, count = map(int, words)
        index, between = divmod(task - first, step)
        if between or not 0 <= index < count:
            raise ConfigError(
                f"--shard slurm: SLURM_ARRAY_TASK_ID {task} is not one of {count} evenly spaced numbers from {first} "
                f"on; submit with sbatch --array 0-{count - 1}, which leaves out what is finished"
            )
        return Share(index + 1, count)
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", word)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard is {word!r}; give I/N with I from 1 to N, such as 3/8, or slurm in a job array")
    return Share(int(found[1]), int(found[2]))
