"""What DeepSpeed's configuration file asks for, as settings here: batch sizes, ZeRO stage, number format, clipping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron.errors import ConfigError
from megatron.small_files import Between, check_kinds

DEEPSPEED_CONFIG = ("--deepspeed-config", "--deepspeed_config")

# keys of the file, the fields they set, and the type of their values
_SAME_VALUE: Mapping[str, tuple[str, Any]] = {
    "train_batch_size": ("global_batch_size", int),
    "train_micro_batch_size_per_gpu": ("micro_batch_size", int),
    "gradient_clipping": ("clip_grad", float),
    "fp16.enabled": ("fp16", bool),
    "fp16.loss_scale": ("loss_scale", float),
    "fp16.loss_scale_window": ("loss_scale_window", int),
    "fp16.hysteresis": ("hysteresis", int),
    "fp16.min_loss_scale": ("min_loss_scale", float),
    "bf16.enabled": ("bf16", bool),
}
# sections that change training in ways that are not available
_REFUSED = (
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
    "progressive_layer_drop",
    "sparse_attention",
    "eigenvalue",
    "quantize_training",
)
_KINDS: Mapping[str, Any] = {
    **{key: kind for key, (_, kind) in _SAME_VALUE.items()},
    "fp16.initial_scale_power": Annotated[float, Between(0, 127)],
    "zero_optimization.stage": Literal[0, 1, 2, 3],
    "zero_optimization.mics_shard_size": int,
    "zero_optimization.zero_hpz_partition_size": int,
    "zero_optimization.offload_optimizer.device": str,
    "zero_optimization.offload_param.device": str,
    **{f"{name}.enabled": bool for name in _REFUSED},
}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What a DeepSpeed file asks for. ``asked``: key of the file, field and value, None for a field that must not be
    given. ``refused``: sentences. ``without_effect``: sections that have no effect.
    """

    asked: tuple[tuple[str, str, Any], ...]
    refused: tuple[str, ...]
    without_effect: tuple[str, ...]


def deepspeed_settings(config: Mapping[str, Any], *, where: str, ranks: int = 1) -> DeepSpeedSettings:
    """The settings that the mapping of a DeepSpeed configuration file asks for; ``"auto"`` asks for nothing.

    Raises ConfigError for values of a wrong type; ``where``: the file's name in messages. ``ranks``: those over which
    ZeRO divides, for a number of them that the file has.
    """
    entries = {key: value for key, value in _flat(config) if value not in ("auto", None)}
    check_kinds(entries, _KINDS, where=where, error=ConfigError)
    for half in ("fp16", "bf16"):
        if not entries.get(f"{half}.enabled"):
            entries = {key: value for key, value in entries.items() if not key.startswith(f"{half}.")}
    if entries.get("fp16.loss_scale") == 0:
        entries["fp16.loss_scale"] = None  # 0 means dynamic
    asked = [(key, field, entries.pop(key)) for key, (field, _) in _SAME_VALUE.items() if key in entries]
    if "fp16.initial_scale_power" in entries:
        power = entries.pop("fp16.initial_scale_power")
        asked.append(("fp16.initial_scale_power", "initial_loss_scale", 2.0**power))
    stage = entries.pop("zero_optimization.stage", 0)
    refused = list[str]()
    if stage == 1:
        asked.append(("zero_optimization.stage", "use_distributed_optimizer", True))
    elif stage in (2, 3):
        strategy = "optim_grads" if stage == 2 else "optim_grads_params"
        asked.append(("zero_optimization.stage", "data_parallel_sharding_strategy", strategy))
    if (device := entries.pop("zero_optimization.offload_optimizer.device", "none")) == "cpu":
        asked.append(("zero_optimization.offload_optimizer", "optimizer_cpu_offload", True))
    elif device != "none":
        refused.append(f"zero_optimization.offload_optimizer: to {device} is not available; give cpu")
    if entries.pop("zero_optimization.offload_param.device", "none") != "none":
        refused.append("zero_optimization.offload_param: weights stay on the device; leave it out")
    for key, size, over_copies in _copies(entries, stage):
        if ranks % size:
            refused.append(f"{key} {size} doesn't divide the {ranks} ranks with the same weights; use a divisor")
            continue
        asked.append((key, "num_distributed_optimizer_instances", ranks // size))
        if over_copies:
            asked.append((key, "outer_dp_sharding_strategy", over_copies))
    for name in _REFUSED:
        if entries.pop(f"{name}.enabled", False):
            refused.append(f"{name} is not available; leave it out")
    rest = dict.fromkeys(key.partition(".")[0] for key, value in entries.items() if value is not False)
    return DeepSpeedSettings(tuple(asked), tuple(refused), tuple(rest))


def _copies(entries: dict[str, Any], stage: int) -> Iterator[tuple[str, int, str | None]]:
    """Numbers of ranks that form a copy (MiCS, hpZ), taken out of ``entries``, with what is divided over copies."""
    key = "zero_optimization.mics_shard_size"
    if (size := entries.pop(key, -1)) > 0:
        yield key, size, None
    key = "zero_optimization.zero_hpz_partition_size"
    if stage == 3 and (size := entries.pop(key, 1)) > 1:
        yield key, size, "optim"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
