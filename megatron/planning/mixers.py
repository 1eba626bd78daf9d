"""Which backends compute a run's mixers other than attention, such as scans of state-space layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.errors import ConfigError
from megatron.planning.model import whole_model


@runtime_checkable
class HasBackend(Protocol):
    """A mixer that one of several backends computes."""

    def describe_backend(self, device: torch.device) -> tuple[str, str]:
        """What it computes by a backend, and the one that serves on ``device``, in words; ConfigError for none."""
        ...


def mixer_backends(run: RunConfig, train_spec: TrainSpec, device: torch.device) -> dict[str, str]:
    """By what mixers of a kind compute, the backend on ``device`` in words; nothing for a model with attention alone.

    Raises ConfigError where the backend that a flag names can't serve.
    """
    mixers = (each for each in whole_model(run, train_spec).modules() if isinstance(each, HasBackend))
    return dict(each.describe_backend(device) for each in mixers)


def mixer_lines(run: RunConfig, train_spec: TrainSpec) -> list[str]:
    """A line for each kind of mixer: its backend on a GPU, whatever is installed there, and on a CPU.

    Raises ConfigError where the backend that a flag names serves on neither.
    """
    found, refusals = dict[str, dict[str, str]](), list[ConfigError]()
    for where, device in (("a GPU", "meta"), ("a CPU", "cpu")):
        try:
            for what, words in mixer_backends(run, train_spec, torch.device(device)).items():
                found.setdefault(what, {})[where] = words.partition(" ")[0]
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]
    return [f"{what}: {_on_both(by)}" for what, by in found.items()]


def _on_both(names: Mapping[str, str]) -> str:
    """One backend for both devices, or that of each."""
    if len(names) == 2 and len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} on {where}" for where, name in names.items())
