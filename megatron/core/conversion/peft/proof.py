"""The proof of adapters in PEFT's format: the peft library reads them beside the published form of their base."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from megatron.config.lora import is_adapter, without_adapters
from megatron.core.conversion import proof
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.errors import CheckpointError

_SHARD = 5_000_000_000


def peft_is_there() -> None:
    """Raise CheckpointError where transformers or peft isn't installed."""
    proof.transformers_version()
    try:
        import peft  # noqa: F401
    except ImportError:
        raise CheckpointError(
            "the proof computes logits with peft, which is not installed: pip install peft, or skip the proof with "
            "--skip-proof"
        ) from None


def answer_beside(
    portable: PortableModel, folder: Path, question: Question, *, others: Collection[str] = frozenset()
) -> Answer:
    """Logits of a model by transformers, with the adapters of a PEFT folder by peft, in place of the model's own.
    ``others``: parameters that the folder holds whole; those of the model are zeros here, so that they aren't read.

    Raises CheckpointError where one of them can't load its part.
    """
    import peft

    tensors = {name: tensor for name, tensor in portable.tensors.items() if not is_adapter(name)}
    for name in others:
        shape, dtype = tensors[name].shape, tensors[name].dtype
        tensors[name] = LazyTensor(shape, dtype, partial(torch.zeros, shape, dtype=dtype))
    groups = without_adapters(portable.groups)
    plain = dataclasses.replace(portable, tensors=tensors, groups=groups, quantization=None)
    with tempfile.TemporaryDirectory(prefix="megatron-base-") as scratch:
        base = Path(scratch, "base")
        write_huggingface(plain, base, max_shard_size=_SHARD)
        model = proof.loaded_by_transformers(base, question, dequantize=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapted = peft.PeftModel.from_pretrained(model, str(folder)).eval()
        except Exception as error:  # it raises anything
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise CheckpointError(f"peft cannot load {folder} beside its base: {reason}") from error
        return proof.answer_of(adapted, base, question)
