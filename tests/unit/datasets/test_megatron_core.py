"""Against the megatron-core package itself: it reads our files, we read its files, and both train on the same samples.

tests/harness/megatron_core.py says how to run these tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from tests.harness.megatron_core import FOLDER, run_megatron_core
from tests.unit.datasets.conftest import FakeTokenizer

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="needs MEGATRON_CORE_PATH, a folder with the megatron-core package"
)
DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3], [4]], [], [[5] * 40], [[]], [[7, 8], [9], [10, 11]]]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("multimodal", [False, True])
def test_reads_what_we_write(tmp_path: Path, dtype: str, multimodal: bool) -> None:
    """Sequences, documents and modes arrive."""
    prefix = str(tmp_path / "ours")
    with IndexedDatasetWriter(prefix, dtype, multimodal=multimodal) as writer:
        for document in DOCUMENTS:
            writer.add_document(*document, modes=range(len(document)))
    read = run_megatron_core(
        """
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        data = IndexedDataset(prefix, multimodal=multimodal)
        items = [data[i] for i in range(len(data))]
        tokens = [item[0] if multimodal else item for item in items]
        modes = [int(item[1]) for item in items] if multimodal else None
        answer([[each.tolist() for each in tokens], data.document_indices.tolist(), modes])
        """,
        prefix=prefix,
        multimodal=multimodal,
    )
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    modes = [mode for document in DOCUMENTS for mode in range(len(document))]
    assert read == [sequences, [0, 2, 2, 3, 4, 7], modes if multimodal else None]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_writes_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    """Its files and ours are equal, so each reads the other's."""
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    run_megatron_core(
        """
        import numpy, torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64))
            builder.end_document()
        builder.finalize(prefix + ".idx")
        answer(None)
        """,
        prefix=theirs,
        dtype=dtype,
        documents=DOCUMENTS,
    )
    with IndexedDatasetWriter(ours, dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document(*document)
    for ending in (".bin", ".idx"):
        assert Path(theirs + ending).read_bytes() == Path(ours + ending).read_bytes()
    assert IndexedDataset(theirs).num_documents == len(DOCUMENTS)


def test_megatron_order_gives_its_samples(tmp_path: Path) -> None:
    """--data-order megatron continues a Megatron-LM run on the very samples it would have read, blended or not."""
    random = np.random.RandomState(0)
    for name in "abc":
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for length in random.randint(1, 60, 40):
                writer.add_document(random.randint(0, 50, length))
    blends = [
        [str(tmp_path / word) if word in "abc" else word for word in blend.split()]
        for blend in ("a", "1 a", "0.3 a 0.7 b", "5 a 3 b 2 c", ".6 a .3 b .1 c")
    ]
    cases = [
        {
            "prefixes": entries[1::2] or entries,
            "weights": [float(weight) for weight in entries[0::2]] if len(entries) > 1 else None,
            "num_samples": num_samples,
        }
        for entries in blends
        for num_samples in (37, 500)
    ]
    answers = run_megatron_core(
        """
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        class Tokenizer:
            eod, pad, unique_identifiers = 50, None, {"class": "Tokenizer"}

        def samples(prefixes, weights, num_samples):
            config = GPTDatasetConfig(
                random_seed=1234, sequence_length=16, blend=(prefixes, weights), split="8,1,1", tokenizer=Tokenizer(),
                reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
                create_attention_mask=False,
            )
            splits = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 8, 0], lambda: True, config).build()
            return [[data[i]["tokens"].tolist() for i in range(len(data))] for data in splits[:2]]

        answer([samples(**case) for case in cases])
        """,
        cases=cases,
    )
    for index, theirs in enumerate(answers):
        splits = build_gpt_splits(
            DataConfig(seq_length=16, data_path=tuple(blends[index // 2]), split="8,1,1", data_order="megatron"),
            seed=1234,
            sizes=SplitSizes((37, 500)[index % 2], 8, 0),
            tokenizer=FakeTokenizer(),
        )
        for dataset, expected in zip((splits.train, splits.valid), theirs):
            assert dataset is not None
            assert [dataset[number]["tokens"].tolist() for number in range(len(dataset))] == expected
