"""All faults, and why those may survive that do."""

from __future__ import annotations

from tests.faults.catalogue import (
    adapters,
    calibration,
    data,
    delta_nets,
    distillation,
    gguf,
    guards,
    images,
    launch,
    mamba,
    model,
    onnx,
    optimizers,
    preferences,
    pruning,
    public_reports,
    quantized,
    ranks,
    rewards,
    service,
    sharding_stages,
    state_space,
    storage,
    tensorrt_llm,
    training,
    two_levels,
)
from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *ranks.FAULTS,
    *sharding_stages.FAULTS,
    *two_levels.FAULTS,
    *model.FAULTS,
    *mamba.FAULTS,
    *delta_nets.FAULTS,
    *data.FAULTS,
    *service.FAULTS,
    *training.FAULTS,
    *optimizers.FAULTS,
    *quantized.FAULTS,
    *gguf.FAULTS,
    *images.FAULTS,
    *launch.FAULTS,
    *onnx.FAULTS,
    *public_reports.FAULTS,
    *state_space.FAULTS,
    *adapters.FAULTS,
    *distillation.FAULTS,
    *calibration.FAULTS,
    *tensorrt_llm.FAULTS,
    *preferences.FAULTS,
    *pruning.FAULTS,
    *rewards.FAULTS,
    *guards.FAULTS,
    *storage.FAULTS,
)
"""Their numbers on the command line count from 1 in this order."""

SURVIVORS: dict[str, str] = {}
"""Faults that the default tier does not notice, each with the reason."""
