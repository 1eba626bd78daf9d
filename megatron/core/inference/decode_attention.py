"""Attention of a decoding step, one query for each text: texts share a call where that is faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUCKET = 64  # keys: where bits may depend on the batch, short texts share a call if their counts differ by less


@dataclass(frozen=True)
class OneQuery:
    """A text's query at ``position``, and its keys from position ``first_key`` to ``stop_key - 1``, which the cache
    has at ``places``.
    """

    position: int
    first_key: int
    stop_key: int
    places: slice | np.ndarray

    @property
    def keys(self) -> int:
        """Number of keys, those after the query included."""
        return self.stop_key - self.first_key


@dataclass(frozen=True)
class SharedCall:
    """A call for the texts ``rows`` of a step (None: all, in order), each with ``keys`` keys.

    ``places``: of all their keys, text by text; or, where texts are at equal distances in the cache, the first place of
    the first text and that distance. ``visible`` ``[texts]``: how many of its keys each text sees, None: all.
    ``chosen`` ``[texts]``: which of the equal queries of a call is the text's own, a number where it is the same for
    all.
    """

    texts: int
    keys: int
    rows: Tensor | None
    places: Tensor | tuple[int, int]
    visible: Tensor | None
    chosen: int | Tensor

    def view_of(self, table: Tensor) -> Tensor:
        """Keys or values ``[texts, groups, keys, width]`` of texts at equal distances, a view of a table ``[groups,
        places, width]``.
        """
        assert not isinstance(self.places, Tensor), "keys that lie anywhere are copied"
        groups, _, width = table.shape
        of_group, of_place, of_channel = table.stride()
        first, apart = self.places
        shape, strides = (self.texts, groups, self.keys, width), (apart * of_place, of_group, of_place, of_channel)
        return table.as_strided(shape, strides, table.storage_offset() + first * of_place)

    def by_text(self, copied: Tensor) -> Tensor:
        """Copied keys or values ``[groups, texts * keys, width]`` as ``[texts, groups, keys, width]``."""
        return copied.view(len(copied), self.texts, self.keys, -1).transpose(0, 1)

    def bias(self, like: Tensor) -> Tensor | None:
        """``[texts, 1, 1, keys]``: hides keys that a text doesn't see."""
        if self.visible is None:
            return None
        hidden = torch.arange(self.keys, device=like.device) >= self.visible[:, None]
        return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]


def shared_calls(
    queries: Sequence[OneQuery], *, fewest: int, is_exact: bool, is_alone: bool, most_copied: int, device: torch.device
) -> list[SharedCall]:
    """The calls of a step's texts. ``is_exact``: texts share a call only if they have the same number of keys, and
    always have a bias, so that bits don't depend on the other texts. ``is_alone``: each text has a call of its own.
    ``fewest``: how often a text's query is repeated in a call. ``most_copied``: texts of more keys share a call only
    where these lie so that none is copied, or are scattered and so copied in any case.
    """
    groups = defaultdict[tuple[bool, int], list[int]](list)
    for number, query in enumerate(queries):
        by_keys = is_exact or query.keys > most_copied
        key = number if is_alone else query.keys if by_keys else -(-query.keys // BUCKET)
        groups[by_keys, key].append(number)
    together = list[tuple[list[int], tuple[int, int] | None]]()
    for members in groups.values():
        regular = _regular(members, queries)
        if regular is not None:
            together.append(regular)
        elif queries[members[0]].keys <= most_copied:
            together.append((members, None))
        else:
            starts = {number: at.start for number in members if isinstance(at := queries[number].places, slice)}
            together += [([number], (start, 0)) for number, start in starts.items()]
            if scattered := [number for number in members if number not in starts]:
                together.append((scattered, None))
    return [_shared(*each, queries, fewest, is_exact, device, is_all=len(together) == 1) for each in together]


def _shared(
    members: list[int],
    regular: tuple[int, int] | None,
    queries: Sequence[OneQuery],
    fewest: int,
    is_exact: bool,
    device: torch.device,
    *,
    is_all: bool,
) -> SharedCall:
    keys = max(queries[number].keys for number in members)
    places: Tensor | tuple[int, int]
    if regular is not None:
        places = regular
    else:
        table = np.zeros((len(members), keys), dtype=np.int64)
        for row, number in zip(table, members):
            at = queries[number].places
            row[: queries[number].keys] = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        places = torch.from_numpy(table.reshape(-1)).to(device)
    visible = [queries[number].position + 1 - queries[number].first_key for number in members]
    in_call = [queries[number].position % fewest for number in members]
    is_in_order = is_all and members == list(range(len(members)))
    return SharedCall(
        texts=len(members),
        keys=keys,
        rows=None if is_in_order else torch.tensor(members, device=device),
        places=places,
        visible=torch.tensor(visible, device=device) if is_exact or min(visible) < keys else None,
        chosen=in_call[0] if len({*in_call}) == 1 else torch.tensor(in_call, device=device),
    )


def _regular(members: Sequence[int], queries: Sequence[OneQuery]) -> tuple[list[int], tuple[int, int]] | None:
    """The texts by their places, the first place and the distance from one to the next; None where they have different
    numbers of keys, or distances, or keys that aren't in consecutive places.
    """
    starts = dict[int, int]()
    for number in members:
        places = queries[number].places
        if not isinstance(places, slice) or queries[number].keys != queries[members[0]].keys:
            return None
        starts[number] = places.start
    ordered = sorted(members, key=lambda number: starts[number])
    first, last = starts[ordered[0]], starts[ordered[-1]]
    apart = (last - first) // max(1, len(ordered) - 1)
    is_regular = [starts[number] for number in ordered] == [first + apart * n for n in range(len(ordered))]
    return (ordered, (first, apart)) if is_regular else None
