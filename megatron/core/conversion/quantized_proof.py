"""The proof of a quantized folder: transformers' dequantized weights are ours, bit for bit, and so are the logits."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.proof import (
    Proof,
    ProofError,
    answer_of,
    compare,
    loaded_by_transformers,
    portable_answer,
)
from megatron.core.conversion.questions import Answer, Question
from megatron.core.quantization.scheme import Scheme
from megatron.errors import CheckpointError

ACTIVATIONS_TOLERANCE = 0.5
"""Largest difference allowed of logits of activations in 8 bits, as a part of the logits' norm. Rounding leaves a few
hundredths, and a tenth in models with random weights; other activations, more than 1.
"""


def check_readers(scheme: Scheme) -> None:
    """Raise CheckpointError when a package is missing with which transformers reads folders of a scheme."""
    module, advice = ("compressed_tensors", "pip install compressed-tensors")
    if scheme.weights.block[0] > 1:
        module, advice = ("accelerate", "pip install accelerate")
    if find_spec(module) is None:
        raise CheckpointError(
            f"the proof of --quantize {scheme.name} loads the folder with transformers and {module}, which is not "
            f"installed: {advice}, or skip the proof with --skip-proof"
        )


def prove_quantized(
    model_in: Callable[..., PortableModel], folder: Path, question: Question, scheme: Scheme, say: Callable[[str], None]
) -> Proof:
    """The proof of a quantized ``folder``. ``model_in``: gives the model that its codes and scales stand for, made from
    the source; with ``in_fp32=True``, multiplied in fp32. ``say`` prints a line.

    Raises ProofError where transformers reads other weights, or computes other logits from the same ones.
    """
    read = model_in(in_fp32=False)
    ours = portable_answer(read, question)
    model = loaded_by_transformers(folder, question, dequantize=True)
    _compare_weights(read, model)
    proof = compare(ours, answer_of(model, folder, question))
    del model
    say(f"all {len(read.tensors)} tensors, as transformers dequantizes them, are bit-equal to this program's")
    if scheme.weights.block[0] > 1:
        return proof
    try:
        stored = answer_of(loaded_by_transformers(folder, question), folder, question)
    except CheckpointError:
        say(
            "note: transformers runs this model only with the weights dequantized: give from_pretrained "
            "quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
        return proof
    ours = portable_answer(model_in(in_fp32=True), question)
    if scheme.activations is None:
        compare(ours, stored)
    else:
        say(_rounded_activations(ours, stored))
    return proof


def _compare_weights(read: PortableModel, model: Any) -> None:
    model._weight_conversions = None  # that of a model which was dequantized can't be reversed; the type's own can
    theirs = from_transformers(model).tensors
    wrong = [
        name
        for name, tensor in read.tensors.items()
        if name in theirs and not torch.equal(theirs[name].make().float(), tensor.make().float())
    ]
    if wrong:
        raise ProofError(
            f"transformers dequantizes other weights than this program ({len(wrong)}, such as {wrong[0]}). Nothing was "
            "written; please report the source"
        )


def _rounded_activations(ours: Answer, stored: Answer) -> str:
    """What activations in 8 bits change; ProofError for more than rounding."""
    parts = [float((stored[kind] - ours[kind]).norm() / ours[kind].norm().clamp(min=1e-30)) for kind in ours]
    if not max(parts) <= ACTIVATIONS_TOLERANCE:
        raise ProofError(
            f"with activations in 8 bits, transformers' logits differ by {max(parts):.2g} of their norm, where "
            f"{ACTIVATIONS_TOLERANCE:g} is allowed; take a --quantize whose activations stay as they are (int8)"
        )
    return (
        f"with activations rounded to 8 bits as they come, transformers' logits differ by {max(parts):.2g} of their "
        f"norm (allowed: {ACTIVATIONS_TOLERANCE:g})"
    )
