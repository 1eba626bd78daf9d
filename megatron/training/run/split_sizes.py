"""How many samples of each split a run reads."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.core.datasets.splits import SplitSizes


def split_sizes(config: RunConfig) -> SplitSizes:
    """Samples of each split that the run needs."""
    training = config.training
    return SplitSizes.of_run(
        train_samples=0 if training.skip_train else config.train_samples,
        train_iters=config.train_iters,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        global_batch_size=training.global_batch_size,
    )
