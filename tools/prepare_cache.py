"""Build the sample indices of a training run before it starts.

Give the flags of the run, and --model-type if it is not GPT.

The indices are stored where the run looks for them: in --data-cache-path, or beside the data. They depend only on the
data, the seed and --seq-length, so they serve any number of ranks, any batch size and longer runs, which build only
their further epochs; the folder can be read-only afterwards. Indices of small data sets are built faster than read,
and not stored.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import time
from collections.abc import Sequence
from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.datasets.splits import SPLITS
from megatron.core.models.registry import family_of
from megatron.errors import run_command
from megatron.training.pretrain import parse_any_family


def main(argv: Sequence[str]) -> int:
    """Build the indices, and print where they are stored."""
    config = parse_any_family(argv, prog="prepare_cache.py", about=__doc__ or "")
    from megatron.training.run.data import offline_splits

    splits, _ = offline_splits(config, family_of(config.extra).train_spec)
    for split in SPLITS:
        for name, dataset in splits.named(split).items():
            started = time.monotonic()
            dataset.prepare()
            label = f"{split} ({name})" if name else split
            print(f"{label}: {len(dataset):,} samples, {time.monotonic() - started:.1f} s")
    for folder in cache_folders(config):
        files = list(folder.glob("*.npy"))
        size = sum(file.stat().st_size for file in files) / 1e6
        stored = (
            f"{len(files)} files, {size:,.1f} MB" if files else "nothing, as small indices are built faster than read"
        )
        print(f"{folder}: {stored}")
    return 0


def cache_folders(config: RunConfig) -> list[Path]:
    """Folders of the run's indices."""
    from megatron.core.datasets.build import sources_read
    from megatron.training.run.split_sizes import split_sizes

    data = config.data
    if data.data_cache_path:
        return [Path(data.data_cache_path)]
    return [Path(f"{prefix}_index_cache") for prefix in sources_read(data, split_sizes(config))]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
