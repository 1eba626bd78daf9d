"""Recorded from megatron-core: what it makes of weights and ``--split``, and so does ``--data-order megatron``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from megatron.config.data import DataConfig
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.build import DatasetSplits, Part, Source, build_splits
from megatron.core.datasets.samples import Documents, SourceDataset
from megatron.core.datasets.splits import SPLITS, SplitSizes, parse_split
from tests.golden.regenerate_megatron_core import RECORDED
from tests.unit.datasets.conftest import FakeTokenizer, WriteDocuments

GOLDEN: dict[str, Any] = json.loads(RECORDED.read_text())


class Numbered:
    """A data set whose every sample is the data set's number in its blend."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, index: int) -> int:
        return self.number


@dataclass
class Counted:
    """A family that notes how many samples are asked of each source."""

    requests: dict[str, list[int | None]] = field(default_factory=dict)

    def mock(self) -> Source:
        raise NotImplementedError

    def count_units(self, documents: Documents) -> int:
        return len(documents.lengths)

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> SourceDataset:
        asked = self.requests.setdefault(part.split, [])
        asked.append(num_samples)
        return cast("SourceDataset", Numbered(len(asked) - 1))


def build(case: dict[str, Any], prefix: str) -> tuple[DatasetSplits, Counted]:
    words = tuple(word for weight in case["weights"].split() for word in (weight, prefix))
    if case["per_split"]:
        data = DataConfig(
            seq_length=1, train_data_path=words, valid_data_path=words, test_data_path=words, data_order="megatron"
        )
    else:
        data = DataConfig(seq_length=1, data_path=words, split="8,1,1", data_order="megatron")
    family = Counted()
    splits = build_splits(data, family, sizes=SplitSizes(*GOLDEN["sizes"]), tokenizer=FakeTokenizer(), vocab_size=51)
    return splits, family


def test_blends_ask_and_choose_as_recorded(write_documents: WriteDocuments) -> None:
    """Weights such as .6 .3 .1 drew 40 of 300 samples from another source than Megatron-LM does.

    It divides the weights by their sum twice, and what that does to the last bit decides ties. A single source of a
    split of its own isn't blended, whatever its weight: it was asked for 0.5 % more, and so ordered otherwise.
    """
    prefix = write_documents([[1, 50]] * 3)
    for case in GOLDEN["blends"]:
        splits, family = build(case, prefix)
        assert [family.requests[split] for split in SPLITS] == case["requests"], case["weights"]
        for split, choices in zip(SPLITS, case["choices"]):
            data = splits.named(split).get("")
            chosen = [data[i] for i in range(len(data))] if isinstance(data, BlendedDataset) else []
            assert "".join(map(str, chosen)) == choices, case["weights"]


def test_splits_cut_as_recorded() -> None:
    """253 pairs of proportions and lengths."""
    for text, count, recorded in GOLDEN["splits"]:
        shares = parse_split(text)
        cut = [share and [share.units(count).start, share.units(count).stop] for share in shares.values()]
        assert cut == recorded, (text, count)
