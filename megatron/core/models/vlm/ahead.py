"""How many later places each place of a text with images sees."""

from __future__ import annotations

import torch
from torch import Tensor

AHEAD = "image_ahead"
"""A field of batches: how many keys after its own position a place sees, int64 [b, S], of the whole sequence."""


def ahead_in_tiles(places: Tensor, features: int) -> Tensor:
    """Places of a tile see all of it (Gemma 3, arXiv:2503.19786). ``places`` [b, S]: of features, as in batches, of
    which a tile has ``features``.
    """
    tiles = torch.where(places >= 0, places.div(features, rounding_mode="floor"), -1)
    return _to_the_end_of_runs(tiles, tiles >= 0)


def ahead_in_prefixes(loss_mask: Tensor, document_ids: Tensor | None) -> Tensor:
    """Places up to the first with a loss in their document see each other (PaliGemma, arXiv:2407.07726); [b, S] all."""
    documents = torch.zeros_like(loss_mask, dtype=torch.long) if document_ids is None else document_ids
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = begins.long().cumsum(1)
    learned = (loss_mask > 0).long()
    before = learned.cumsum(1) - learned  # places with a loss before this one
    at_start = torch.where(begins, before, 0).cummax(1).values
    return _to_the_end_of_runs(number, before == at_start)


def _to_the_end_of_runs(number: Tensor, is_inside: Tensor) -> Tensor:
    """How many places of its own run follow each place; runs are neighbors with one ``number`` that are inside."""
    length = number.shape[1]
    places = torch.arange(length, device=number.device).expand_as(number)
    goes_on = torch.zeros_like(is_inside)
    goes_on[:, :-1] = (number[:, 1:] == number[:, :-1]) & is_inside[:, 1:] & is_inside[:, :-1]
    last = torch.where(goes_on, length, places).flip(1).cummin(1).values.flip(1)
    return last - places
