"""The proof of a TensorRT-LLM checkpoint: a forward pass over the rank files as they lie gives the model's logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.proof import Proof, compare, portable_answer
from megatron.core.conversion.questions import question_for
from megatron.core.conversion.tensorrt_llm.cuts import Layout
from megatron.core.conversion.tensorrt_llm.forward import TensorRTModel
from megatron.core.conversion.tensorrt_llm.writing import as_computed, plan_for


@dataclass(frozen=True)
class RankFilesProof(Proof):
    """Result of comparing logits. ``quantized``: whether weights are in few bits."""

    quantized: bool = False

    @override
    def __str__(self) -> str:
        exact = ", activations not rounded" if self.quantized else ""
        return (
            f"a forward pass over the rank files as they lie{exact}: {super().__str__()}; never built by trtllm-build "
            "here, which needs a GPU"
        )


@torch.no_grad()
def prove_tensorrt_llm(
    portable: PortableModel, folder: Path, *, layout: Layout, rounding: Rounding | None
) -> RankFilesProof:
    """Compare the rank files in ``folder`` with the model that they were written from; ProofError where they differ."""
    plan = plan_for(portable, layout, rounding)
    source = as_computed(plan)
    question = question_for(source.model, source.groups)
    tokens: Tensor = question.tokens  # type: ignore[attr-defined]  # all architectures are decoders
    files = {"words": TensorRTModel(folder).logits(tokens)}
    words = source.model.vocab_size
    found = compare({"words": portable_answer(source, question)["words"][..., :words]}, files)
    return RankFilesProof(found.difference, found.largest, quantized=plan.few_bits is not None)
