"""Typed settings: what you ask for. Standard library only, so that help and flag errors take milliseconds."""

from __future__ import annotations

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.flags import Settings, flag
from megatron.config.fp8 import Fp8Config
from megatron.config.inference import InferenceConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.profiling import ProfilingConfig
from megatron.config.reporting import ReportingConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "Fp8Config",
    "InferenceConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "ReportingConfig",
    "RunConfig",
    "Settings",
    "TokenizerConfig",
    "TrainingConfig",
    "flag",
]
