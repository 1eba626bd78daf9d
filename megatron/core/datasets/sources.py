"""Which data sets each split reads: from the data flags, or from the files that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.core.datasets.blend import BlendSpec, parse_blend
from megatron.core.datasets.splits import SPLITS, SplitName
from megatron.errors import ConfigError, DataError
from megatron.small_files import parse_json, read_text


@dataclass(frozen=True)
class SplitSources:
    """What one split reads: the words of ``flag``, and whether the splits share it and ``--split`` cuts it.

    ``has_names``: shared words may be NAME=PREFIX, for validation sets of their own.
    """

    words: tuple[str, ...]
    flag: str
    shared: bool
    has_names: bool = False

    def blend(self) -> BlendSpec:
        """Prefixes and weights; raises ConfigError for words that are neither."""
        words = [word.rpartition("=")[2] for word in self.words] if self.has_names else self.words
        return parse_blend(words, flag=self.flag)

    def named(self) -> dict[str, BlendSpec]:
        """Each data set by itself, under the name before its ``=`` or the last part of its prefix.

        Raises ConfigError for weights, which a set by itself can't have, and for a name that stands twice.
        """
        found: dict[str, BlendSpec] = {}
        if parse_blend(self.words, flag=self.flag).weights is not None:
            raise ConfigError(
                f"{self.flag} has weights, but with --multiple-validation-sets each data set is evaluated "
                "separately: leave out the weights, or that flag"
            )
        for word in self.words:
            given, _, prefix = word.rpartition("=")
            name = given or Path(prefix).name
            if name in found:
                raise ConfigError(f"{self.flag} has two data sets named {name}: write NAME={prefix} with another name")
            found[name] = BlendSpec((prefix,))
        return found


def read_sources(data: DataConfig) -> dict[SplitName, SplitSources]:
    """Sources by split, without the splits that have none; raises DataError for a file that can't be understood."""
    if data.data_path or data.data_args_path:
        flag = "--data-path" if data.data_path else f"--data-args-path {data.data_args_path}"
        words = data.data_path or tuple(_content(data.data_args_path or "", "--data-args-path").split())
        if not words:
            raise DataError(f"{flag} holds no data paths: write the values of --data-path, separated by spaces")
        has_names = data.multiple_validation_sets
        return {split: SplitSources(words, flag, shared=True, has_names=has_names) for split in SPLITS}
    if data.per_split_data_args_path:
        flag = f"--per-split-data-args-path {data.per_split_data_args_path}"
        given = _per_split(data.per_split_data_args_path, flag)
        return {
            split: SplitSources(words, f"{flag} ({split})", shared=False) for split, words in given.items() if words
        }
    per_split: Mapping[SplitName, tuple[str, ...]] = {
        "train": data.train_data_path,
        "valid": data.valid_data_path,
        "test": data.test_data_path,
    }
    return {
        split: SplitSources(words, f"--{split}-data-path", shared=False) for split, words in per_split.items() if words
    }


def _per_split(path: str, flag: str) -> dict[SplitName, tuple[str, ...]]:
    """Megatron-LM's file: JSON that maps train, valid and test to lists of words, or to words in one string."""
    text = _content(path, "--per-split-data-args-path")
    found = parse_json(text, dict[str, str | list[str | float]], where=flag, error=DataError)
    if unknown := sorted(found.keys() - set(SPLITS)):
        raise DataError(f"{flag} has data for {', '.join(unknown)}; splits are train, valid and test")
    return {split: tuple(each.split() if isinstance(each, str) else map(str, each)) for split, each in found.items()}


def _content(path: str, flag: str) -> str:
    try:
        return read_text(Path(path), where=f"{flag} {path}", error=DataError)
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}; give a text file of data paths") from None
