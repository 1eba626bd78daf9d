"""The proof at the end of a conversion: source and target give the same logits for the same tokens, in fp32.

The sides are computed by different code from different files: Hugging Face folders by transformers, our checkpoints by
our model (a layer in memory at a time), Megatron-LM's by a forward pass written for their shards as they lie on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of, saved_run
from megatron.core.models.stage import Stage
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from megatron.errors import CheckpointError, MegatronError

TOLERANCE = 1e-4
"""Largest difference allowed, as a part of the largest logit: fp32 leaves about 1e-6; a mapping that is wrong, 1."""


class ProofError(MegatronError):
    """Source and target of a conversion disagree."""


@dataclass(frozen=True)
class Proof:
    """``difference``: the largest of any logit. ``largest``: the largest logit of the source."""

    difference: float
    largest: float

    def __str__(self) -> str:
        return f"largest difference {self.difference:.3g} between logits of up to {self.largest:.3g}"


def compare(source: Answer, target: Answer) -> Proof:
    """The proof of two answers to a question; ProofError when logits of any kind differ by more than rounding."""
    assert source.keys() == target.keys(), "both were asked the same"
    proofs = {
        kind: Proof((source[kind] - target[kind]).abs().max().item(), source[kind].abs().max().item())
        for kind in source
    }
    for proof in proofs.values():
        if not proof.difference <= TOLERANCE * proof.largest:
            raise ProofError(
                f"source and target are different models: {proof}, where {TOLERANCE:g} of the largest is allowed. "
                "Nothing was written; please report the source"
            )
    return max(proofs.values(), key=lambda proof: proof.difference / (proof.largest or 1.0))


@torch.no_grad()
def native_answer(root: AnyPath, question: Question, *, step: int | None = None) -> Answer:
    """Logits of our checkpoint in ``root``, computed by our model with one layer in memory at a time."""
    folder = find_checkpoint(root, step=step, verify=False)
    saved = read_run_state(folder)
    run = saved_run(saved["config"], name=saved[MODEL_NAME], where=str(folder.path))
    build_model = family_of(run.extra).train_spec.build_model
    context = ParallelContext.single()
    handed: Mapping[str, Tensor] = {}
    for number in range(run.num_layers):
        stage = Stage(range(number, number + 1), is_first=number == 0, is_last=number == run.num_layers - 1)
        model = build_model(run.model, run.extra, context, stage=stage).eval().requires_grad_(False)
        state = [
            ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
            for name, parameter, sharding in sharded_parameters(model)
        ]
        load_checkpoint(folder, state, context.mesh, exhaust=())
        handed = question.ask_ours(model, handed)
    return handed


@torch.no_grad()
def huggingface_answer(folder: Path, question: Question) -> Answer:
    """Logits of a Hugging Face folder, computed by transformers with eager attention in fp32."""
    version = transformers_version()
    import transformers

    load: Any = getattr(transformers, question.auto_class).from_pretrained
    try:
        with _quiet_transformers():
            model, report = load(
                folder,
                **{"torch_dtype" if version.startswith("4.") else "dtype": torch.float32},
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises anything for folders that it doesn't like
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"transformers cannot load {folder}: {type(error).__name__}: {reason}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        raise CheckpointError(f"transformers misses tensors in {folder}: {sorted(report['missing_keys'])[:5]}")
    return {kind: logits.float() for kind, logits in question.ask_theirs(model.eval()).items()}


def transformers_version() -> str:
    """Its version; CheckpointError when it isn't installed."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            "the proof computes logits with transformers, which is not installed: pip install transformers, or skip "
            "the proof with --skip-proof"
        ) from None
    return transformers.__version__


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without progress bars and advice of transformers."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def memory_needed(portable: PortableModel, formats: set[str]) -> int:
    """Bytes that the proof holds at most: transformers needs the whole model in fp32, the others a few layers."""
    whole = 4 * portable.num_parameters
    return whole if "hf" in formats else whole // portable.num_layers * 2


def check_memory(needed: int) -> None:
    """Raise CheckpointError before any work when the proof can't fit in this machine's memory."""
    free = _free_memory()
    if free is not None and needed > free:
        raise CheckpointError(
            f"the proof needs about {needed / 1e9:.1f} GB of memory to compute logits in fp32, and {free / 1e9:.1f} "
            "GB are free: convert on a larger machine, or skip the proof with --skip-proof"
        )


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    amounts = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return amounts.get("MemAvailable")
