"""The Triton kernels of the package mamba-ssm 2, for GPUs."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from megatron.core.ops.documents import numbered
from megatron.core.ops.state_space.request import ScanInputs

_MODULE = "mamba_ssm.ops.triton.ssd_combined"


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module(_MODULE)
    except (ImportError, OSError):  # without the package, or with one that was built for another torch
        return None


def supports(device: torch.device, dtype: torch.dtype) -> str | None:
    """None, or why the kernels cannot compute a scan of ``dtype`` on ``device``."""
    if device.type == "cpu":
        return "mamba-ssm's kernels run on GPUs only"
    if dtype == torch.float64:
        return "mamba-ssm's kernels do not support float64"
    if device.type != "meta" and _kernels() is None:  # a dry run may be on another machine
        return "the package mamba-ssm is not installed"
    return None


def scan(inputs: ScanInputs, initial_state: Tensor | None, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The result of ``state_space.scan``."""
    kernels, document_ids = _kernels(), inputs.document_ids
    assert kernels is not None, "the registry asks first"
    # The kernels pass the initial state on to document 0 alone.
    numbers = None if document_ids is None else numbered(document_ids).to(torch.int32)
    y, state = kernels.mamba_chunk_scan_combined(
        *inputs.tensors, chunk_size, initial_states=initial_state, seq_idx=numbers, return_final_states=True
    )
    return y, state
