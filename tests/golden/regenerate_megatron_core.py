"""Record what the megatron-core package makes of --data-path weights and --split.

Needs ``MEGATRON_CORE_PATH`` (see tests/harness/megatron_core.py): ``python -m tests.golden.regenerate_megatron_core``.
The file names the version. 0.12.3 and 0.16.1 give the same values.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tests.harness.megatron_core import run_megatron_core

RECORDED = Path(__file__).with_name("blends_megatron_core.json")

BLENDS = (
    *(".6 .3 .1", ".7 .2 .1", ".3 .6 .1", "1 4 1", "4 1 1", "1 6 2", "2 3 1", "3 2 2", ".6 .6 .3", ".3 .7"),
    *("30 70", "50.5 30 19.5", "0.969 0.03 0.001", "1 1 1", "1 1 1 1 1 1", "0.5 0.25 0.25", "1e-3 2e-3 3e-3", "7"),
    *(".1 .2 .3 .4", "3 1 4 1 5 9 2 6", ".1 .1 .1 .1 .1 .1 .1 .1 .1 .1", "1 2 3 4 5 6 7 8 9 10", "0.1 99.9"),
)
SIZES = (300, 41, 7)
SPLIT_COUNTS = (1, 2, 7, 100, 999, 1000, 12345, 10_000_001, 1_000_000_007)

SCRIPT = """
import importlib.metadata
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix, parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset


class Tokenizer:
    eod, pad, vocab_size, unique_identifiers = 0, -1, 9, {"class": "Tokenizer"}


class Counted(MegatronDataset):
    built_anew_on_cache_miss = False
    requests = []

    def __init__(self, data, path, indices, num_samples, split, config):
        super().__init__(data, path, indices, num_samples, split, config)
        self.requests.append((split.value, num_samples))

    build_low_level_dataset = staticmethod(lambda path, config: None)
    numel_low_level_dataset = staticmethod(lambda data: 1000)
    __len__ = lambda self: self.num_samples
    __getitem__ = lambda self, index: {}


def blend(weights, per_split):
    given = utils.get_blend_from_list([word for weight in weights.split() for word in (weight, "data")])
    how = {"blend_per_split": [given] * 3} if per_split else {"blend": given, "split": "8,1,1"}
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=1, tokenizer=Tokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, num_dataset_builder_threads=1, **how,
    )
    Counted.requests = []
    splits = BlendedMegatronDatasetBuilder(Counted, list(sizes), lambda: True, config).build()
    return {
        "weights": weights, "per_split": per_split,
        "requests": [[n for place, n in Counted.requests if place == split] for split in range(3)],
        "choices": ["".join(map(str, getattr(data, "dataset_index", []))) for data in splits],
    }


def split(text, count):
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    return [text, count, [each and [round(each[0] * float(count)), round(each[1] * float(count))] for each in matrix]]


answer({
    "version": importlib.metadata.version("megatron-core"),
    "sizes": sizes,
    "blends": [blend(weights, per_split) for weights in blends for per_split in (False, True)],
    "splits": [split(text, count) for text, count in splits],
})
"""


def splits() -> list[tuple[str, int]]:
    """253 pairs of a --split and a number of documents: usual ones, shares of nothing, tenths that add up to no 1."""
    drawn = random.Random(1234)
    usual = ["969,30,1", "949,50,1", "99,1,0", "1,1,1", "100", "98, 2", "0,1,0", "0.6,0.3,0.1", ".7,.2,.1", "0.1,0.7,0"]
    tenths = [f"0.{a},0.{b},0.{10 - a - b}" for a, b in itertools.product(range(1, 9), repeat=2) if a + b <= 9]
    pairs = [(text, count) for text in usual for count in SPLIT_COUNTS]
    pairs += [(text, drawn.choice(SPLIT_COUNTS)) for text in tenths]
    while len(pairs) < 253:
        shares = [str(drawn.choice((0, drawn.randint(1, 99), round(drawn.random(), 3)))) for _ in range(3)]
        if any(float(share) for share in shares):
            pairs.append((",".join(shares), drawn.choice(SPLIT_COUNTS)))
    return pairs


if __name__ == "__main__":
    recorded = run_megatron_core(SCRIPT, blends=BLENDS, sizes=SIZES, splits=splits())
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('{"weights', '\n{"weights') + "\n")
