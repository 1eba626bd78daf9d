"""Model arguments of lm-evaluation-harness, which are flags without their dashes, as settings of a run."""

from __future__ import annotations

from typing import Any

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.training.pretrain import parse
from tasks.registry import DEFAULTS, family_to_evaluate
from tasks.settings import HarnessConfig


def run_of(flags: dict[str, Any], *, batch_size: int | str | None, device: str | None) -> RunConfig:
    """The run that the harness's arguments describe; raises ConfigError for unknown flags.

    ``batch_size``: samples of a forward pass unless ``micro_batch_size`` is given; ``auto``: the default. ``device``:
    ``cpu``, even if there is a GPU, or ``cuda``, which the launcher chooses among.
    """
    defaults: dict[str, Any] = {**DEFAULTS, "skip_train": True}
    if device == "cpu":
        defaults["distributed_backend"] = "gloo"
    elif device is not None and not device.startswith("cuda"):
        raise ConfigError(f"--device {device}: ranks compute on the GPUs that are there, or on cpu; leave it out")
    if batch_size is not None and str(batch_size).partition(":")[0] != "auto":
        defaults["micro_batch_size"] = int(batch_size)
    words = words_of(flags)
    groups = (HarnessConfig, *family_to_evaluate(words, HarnessConfig).groups)
    return parse(words, prog="tasks/lm_eval.py", groups=groups, defaults=defaults)


def words_of(flags: dict[str, Any]) -> list[str]:
    """The arguments as a command line: ``x=True`` is ``--x``, ``x=False`` is ``--no-x``, a list is several values."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words
