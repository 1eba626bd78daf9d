"""Preprocessing in the way that the flags ask for: here, a share of it, joining shares, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.journal import Totals
from megatron.core.files.remote_path import RemotePath, path_of
from megatron.errors import MegatronError, kept_on_interrupt
from megatron.preprocessing import ray_cluster
from megatron.preprocessing.conversion import preprocess_here
from megatron.preprocessing.merging import merge
from megatron.preprocessing.pieces import Plan, encode_share, make_plan
from megatron.preprocessing.settings import PreprocessConfig, check_settings, share_of


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Totals:
    """Write the token files of every key, or a share of their pieces; the counts of what was written.

    Raises ConfigError for settings that cannot work, DataError for failing input or output; then no token file appears.
    """
    check_settings(config)
    at_url = isinstance(path_of(config.output_prefix), RemotePath)
    if not (config.shard or config.merge_shards or config.ray or at_url):
        return preprocess_here(config, tokenizer_config)
    if config.ray:
        ray_cluster.check_cluster(config.ray)
    plan = make_plan(config, tokenizer_config)
    for remark in plan.prepared.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if config.merge_shards:
        return merge(plan)
    with _kept_pieces_mentioned(plan):
        if config.shard:
            return _encode_share(plan, config.shard)
        if config.ray:
            ray_cluster.encode_on_ray(plan, tokenizer_config)
        else:
            encode_share(plan, _missing(plan), maker="one machine")
    return merge(plan)


@contextmanager
def _kept_pieces_mentioned(plan: Plan) -> Iterator[None]:
    """On Ctrl-C and errors in the block, say what is kept."""

    def kept() -> str:
        there = plan.division.count - len(plan.missing())
        return f"{there:,} of {plan.division.count:,} pieces are finished and kept; the same command encodes the others"

    try:
        with kept_on_interrupt(kept):
            yield
    except MegatronError:
        with suppress(MegatronError):  # what has failed may fail here, too
            print(kept(), file=sys.stderr)
        raise


def _missing(plan: Plan) -> list[int]:
    missing = plan.missing()
    if len(missing) < plan.division.count:
        kept = plan.division.count - len(missing)
        print(f"{kept:,} of {plan.division.count:,} pieces are finished: the others are encoded", file=sys.stderr)
    return missing


def _encode_share(plan: Plan, word: str) -> Totals:
    """Encode what is missing of a share, and say what is there then."""
    share, count = share_of(word), plan.division.count
    mine = range(share.index - 1, count, share.count)
    missing = [number for number in plan.missing() if number in mine]
    totals = encode_share(plan, missing, maker=str(share))
    left = plan.missing()
    before = f", {len(mine) - len(missing):,} of them by an earlier run" if len(missing) < len(mine) else ""
    print(f"shard {share}: {len(mine):,} of {count:,} pieces are encoded{before} ({totals.documents:,} documents)")
    if left:
        print(f"{len(left):,} pieces of other shards are missing; then give the same flags with --merge-shards")
    else:
        print("all pieces are there; join them: the same flags with --merge-shards in place of --shard")
    return totals
