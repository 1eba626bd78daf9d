"""What training, validation and test read: their sources, their shares of them, and how many samples."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron.config.data import DataConfig
from megatron.core.datasets.blend import BlendSpec, parse_blend
from megatron.errors import ConfigError, DataError
from megatron.small_files import parse_json, read_text

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


@dataclass(frozen=True)
class SplitSizes:
    """Samples asked for of each split; None: every sample once; 0: the split isn't needed."""

    train: int | None
    valid: int | None
    test: int | None

    @classmethod
    def of_run(
        cls, *, train_samples: int, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
    ) -> SplitSizes:
        """Sizes for a run: all training samples, one validation per interval and a last one, one test."""
        one_evaluation = eval_iters * global_batch_size
        evaluations = train_iters // eval_interval + 1
        return cls(train=train_samples, valid=evaluations * one_evaluation, test=one_evaluation)

    def of(self, split: SplitName) -> int | None:
        """Samples asked for of one split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


@dataclass(frozen=True)
class Share:
    """The part ``[low, high)`` of a data set, as fractions of its documents."""

    low: float
    high: float

    def units(self, count: int) -> range:
        """Which of ``count`` units belong to this share; halves round to even, as in Megatron-LM."""
        return range(round(self.low * count), round(self.high * count))


WHOLE = Share(0.0, 1.0)
MOCK_SPLIT = "1,1,1"


def parse_split(text: str) -> dict[SplitName, Share | None]:
    """Shares from ``--split``, e.g. ``969, 30, 1``: proportions in any unit; None for a share of nothing.

    Raises ConfigError when the text holds no proportions.
    """
    try:
        proportions = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        proportions = []
    if not 1 <= len(proportions) <= len(SPLITS) or sum(proportions) == 0:
        raise ConfigError(
            f"--split {text!r} must be one to three shares with a sum above 0: write train,valid,test, e.g. 969,30,1"
        )
    proportions += [0.0] * (len(SPLITS) - len(proportions))
    total = sum(proportions)
    bounds = itertools.accumulate((proportion / total for proportion in proportions), initial=0.0)
    shares = [Share(low, high) if low < high else None for low, high in itertools.pairwise(bounds)]
    return dict(zip(SPLITS, shares))


@dataclass(frozen=True)
class SplitSources:
    """What one split reads: the words of ``flag``; ``shared``: all splits read them, and ``--split`` cuts them.

    ``has_names``: shared words may be NAME=PREFIX, for separate validation sets.
    """

    words: tuple[str, ...]
    flag: str
    shared: bool
    has_names: bool = False

    def blends(self, *, by_name: bool = False) -> dict[str, BlendSpec]:
        """All data sets as one blend with the name ``""``, or ``by_name`` each separately.

        Their names are the words before ``=``, or the last parts of their prefixes. Raises ConfigError for words that
        are neither prefixes nor weights, for weights of separate sets, and for a name that occurs twice.
        """
        if not by_name:
            words = [word.rpartition("=")[2] for word in self.words] if self.has_names else self.words
            return {"": parse_blend(words, flag=self.flag)}
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
    """Sources of each split that has some, from the data flags or the files that they name.

    Raises DataError for a file that can't be read or understood.
    """
    if data.data_path or data.data_args_path:
        flag = "--data-path" if data.data_path else f"--data-args-path {data.data_args_path}"
        words = data.data_path or tuple(_content(data.data_args_path or "", "--data-args-path").split())
        if not words:
            raise DataError(f"{flag} holds no data paths: write the values of --data-path, separated by spaces")
        has_names = data.multiple_validation_sets
        return {split: SplitSources(words, flag, shared=True, has_names=has_names) for split in SPLITS}
    per_split: Mapping[SplitName, tuple[str, ...]]
    if data.per_split_data_args_path:
        flag = f"--per-split-data-args-path {data.per_split_data_args_path}"
        text = _content(data.per_split_data_args_path, "--per-split-data-args-path")
        found = parse_json(text, dict[str, str | list[str | float]], where=flag, error=DataError)
        if unknown := sorted(found.keys() - set(SPLITS)):
            raise DataError(f"{flag} has data for {', '.join(unknown)}; splits are train, valid and test")
        flags = {split: f"{flag} ({split})" for split in SPLITS}
        per_split = {
            split: tuple(each.split() if isinstance(each, str) else map(str, each)) for split, each in found.items()
        }
    else:
        flags = {split: f"--{split}-data-path" for split in SPLITS}
        per_split = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    return {split: SplitSources(words, flags[split], shared=False) for split, words in per_split.items() if words}


def _content(path: str, flag: str) -> str:
    try:
        return read_text(Path(path), where=f"{flag} {path}", error=DataError)
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}; give a text file of data paths") from None
