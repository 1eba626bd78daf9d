"""Decoders as GGUF files: their architectures in llama.cpp, and their settings as keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.gguf.architecture import Architecture, Metadata
from megatron.core.models.gpt.gguf.architectures import ARCHITECTURES
from megatron.core.models.gpt.gguf.settings import read_settings, written_settings


class DecoderFiles:
    """The files of decoders."""

    architectures: Sequence[Architecture] = ARCHITECTURES

    def written(self, model: ModelConfig, groups: Sequence[object], architecture: Architecture) -> dict[str, Any]:
        """Keys of a model, without its architecture's name in front."""
        return written_settings(model, groups, architecture)

    def read(
        self, keys: Metadata, tensors: Collection[str], architecture: Architecture
    ) -> tuple[ModelConfig, tuple[object, ...]]:
        """The settings of a model and of its family's groups; CheckpointError for keys that are missing."""
        return read_settings(keys, tensors, architecture)


FORMAT = DecoderFiles()
