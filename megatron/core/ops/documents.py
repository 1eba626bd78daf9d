"""Documents within a sequence: runs of equal numbers in ``document_ids`` [b, l]."""

from __future__ import annotations

import torch
from torch import Tensor


def restarts(document_ids: Tensor, *, previous: Tensor | None = None) -> Tensor:
    """Whether a document begins at each token, [b, l].

    ``previous`` [b]: the document of the token before the first one. Without it the first token continues whatever
    came before.
    """
    before = document_ids[:, :1] if previous is None else previous.unsqueeze(1)
    return document_ids != torch.cat((before, document_ids[:, :-1]), dim=1)


def numbered(document_ids: Tensor, *, previous: Tensor | None = None) -> Tensor:
    """Documents numbered from 0 in the order of the sequence, [b, l]; 0 is the document that came before, or, without
    ``previous`` as in ``restarts``, the first.
    """
    return restarts(document_ids, previous=previous).cumsum(dim=1)
