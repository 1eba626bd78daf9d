"""Megatron: pretrain language models with tensor, pipeline, data, context and expert parallelism."""

__version__ = "0.1.0"
