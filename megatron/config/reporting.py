"""What a run reports while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.flags import check_flags, flag


@check_flags
@dataclass(frozen=True, kw_only=True)
class ReportingConfig:
    """Log lines, timers, TensorBoard and Weights & Biases."""

    log_interval: int = flag("Iterations between log lines.", default=100, at_least=1)
    log_throughput: bool = flag("Show TFLOP/s per GPU in the log line.", default=False)
    log_params_norm: bool = flag("Show the norm of the parameters.", default=False)
    log_num_zeros_in_grad: bool = flag("Show how many gradient elements are zero.", default=False)
    log_progress: bool = flag("Append progress lines to progress.txt in the --save folder.", default=False)
    timing_log_level: Literal[0, 1, 2] = flag("Timers: 0 whole iterations, 1 their parts, 2 everything.", default=0)
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "Which timer values to show: the maximum over ranks, minimum and maximum, or those of all ranks.",
        default="minmax",
    )
    barrier_with_level_1_timing: bool = flag(
        "No barriers around the timers of level 1.", default=True, off="--no-barrier-with-level-1-timing"
    )
    tensorboard_dir: str | None = flag("Folder for TensorBoard events; none are written unless given.", default=None)
    tensorboard_log_interval: int = flag("Iterations between TensorBoard points.", default=1, at_least=1)
    tensorboard_queue_size: int = flag("TensorBoard events that are buffered before a write.", default=1000, at_least=1)
    log_timers_to_tensorboard: bool = flag("Write timers to TensorBoard.", default=False)
    log_loss_scale_to_tensorboard: bool = flag(
        "Do not write the loss scale to TensorBoard.", default=True, off="--no-log-loss-scale-to-tensorboard"
    )
    log_validation_ppl_to_tensorboard: bool = flag("Write validation perplexity to TensorBoard.", default=False)
    log_memory_to_tensorboard: bool = flag("Write memory use to TensorBoard.", default=False)
    log_world_size_to_tensorboard: bool = flag("Write the number of ranks to TensorBoard.", default=False)
    wandb_project: str | None = flag("Weights & Biases project; nothing is sent unless given.", default=None)
    wandb_entity: str | None = flag("Weights & Biases entity.", default=None)
    wandb_exp_name: str | None = flag("Weights & Biases run name.", default=None)
    wandb_save_dir: str | None = flag("Weights & Biases folder; beside --save unless given.", default=None)
