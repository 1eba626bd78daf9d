"""Packed documents as separate calls, for backends without a mask: cheaper than one, and no [s, s] tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def each_document(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, segments: Tensor
) -> Tensor:
    """``call`` on the q, k, v of every document, put together; a document is a run of one number in ``segments``."""
    assert q.shape[0] == k.shape[0], "documents need equally long queries and keys"
    samples = []
    for sample, lengths in enumerate(_run_lengths(segments)):
        parts = (torch.split(x[:, sample : sample + 1], lengths) for x in (q, k, v))
        samples.append(torch.cat([call(*part) for part in zip(*parts)]))
    return torch.cat(samples, dim=1)


def _run_lengths(segments: Tensor) -> list[list[int]]:
    lengths = []
    for row in segments.tolist():
        starts = [i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
        lengths.append([stop - start for start, stop in zip(starts, [*starts[1:], len(row)])])
    return lengths
