"""Packed documents as separate calls, for backends without a mask: cheaper than one, and no [s, s] tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# By the tensor of document numbers, which every layer of a microbatch is given: a device is waited for in one of them.
_known_run_lengths = WeakIdKeyDictionary()


def each_document(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor
) -> Tensor:
    """``call`` on the q, k, v of every document, put together; a document is a run of one number."""
    assert q.shape[0] == k.shape[0], "documents need equally long queries and keys"
    samples = []
    for sample, lengths in enumerate(_run_lengths(document_ids)):
        parts = (torch.split(x[:, sample : sample + 1], lengths) for x in (q, k, v))
        samples.append(torch.cat([call(*part) for part in zip(*parts)]))
    return torch.cat(samples, dim=1)


def _run_lengths(document_ids: Tensor) -> list[list[int]]:
    known: list[list[int]] | None = _known_run_lengths.get(document_ids)  # type: ignore[no-untyped-call]
    if known is None:
        known = [_lengths_of_runs(row) for row in document_ids.tolist()]
        _known_run_lengths[document_ids] = known
    return known


def _lengths_of_runs(row: list[int]) -> list[int]:
    starts = [i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
    return [stop - start for start, stop in zip(starts, [*starts[1:], len(row)])]
