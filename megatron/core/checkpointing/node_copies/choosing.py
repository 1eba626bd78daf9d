"""Which copy to go on from: the newest of which every file is somewhere. No files are touched here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


def partners_of(rank: int, *, jump: int, factor: int) -> tuple[int, ...]:
    """The ranks that hold each other's files, ``rank`` among them: ``factor`` of them, ``jump`` apart (Megatron-LM's
    ``--replication-jump`` and ``--replication-factor``).
    """
    block, within = divmod(rank, jump * factor)
    return tuple(block * jump * factor + within % jump + number * jump for number in range(factor))


@dataclass(frozen=True)
class FoundCopy:
    """A copy in a folder of a node, whole or a part of it.

    ``saved_at``: seconds since 1970, the same on all nodes. ``origins``: checkpoints that it was made after, the newest
    and those under way. ``files``: names of all its files. ``here``: names of those in this folder, with their size.
    """

    iteration: int
    saved_at: float
    origins: frozenset[str]
    files: frozenset[str] = field(default_factory=frozenset)
    here: frozenset[str] = field(default_factory=frozenset)

    @property
    def key(self) -> tuple[int, float]:
        """What parts of one copy share."""
        return self.iteration, self.saved_at


def candidates(found: Sequence[Collection[FoundCopy]], *, origin: str, newer_than: int) -> list[tuple[int, float]]:
    """Keys of copies whose files are all in some folder, newest first. ``found``: what each rank sees in its folder.

    ``origin``, ``newer_than``: the newest checkpoint in ``--save`` and its iteration: a copy that another one precedes
    is of another run, or of a past that this run has left.
    """
    seen = dict[tuple[int, float], set[str]]()
    files = dict[tuple[int, float], frozenset[str]]()
    for copies in found:
        for each in copies:
            if origin in each.origins and each.iteration > newer_than:
                seen.setdefault(each.key, set()).update(each.here)
                files[each.key] = each.files
    return sorted((key for key in seen if files[key] <= seen[key]), reverse=True)


def incomplete(found: Sequence[Collection[FoundCopy]], *, origin: str, newer_than: int) -> dict[int, int]:
    """Iterations of copies of the run with files that are nowhere, and how many these are."""
    whole = set(candidates(found, origin=origin, newer_than=newer_than))
    lacking = dict[int, int]()
    for copies in found:
        for each in copies:
            if origin in each.origins and each.iteration > newer_than and each.key not in whole:
                there = {name for others in found for other in others if other.key == each.key for name in other.here}
                lacking[each.iteration] = len(each.files - there)
    return lacking


def sources(good: Sequence[Collection[str]], places: Sequence[int], files: Collection[str]) -> list[Mapping[str, int]]:
    """For each rank, the rank that reads each file for it: itself, where the file lies in the folder that it sees.

    ``good``: the files that each rank has found undamaged in its folder. ``places``: the folder that each rank sees, by
    number. Files that nobody has are left out.
    """
    holders = {name: [rank for rank, names in enumerate(good) if name in names] for name in files}
    at = {name: {places[rank] for rank in ranks} for name, ranks in holders.items()}
    return [
        {name: rank if place in at[name] else ranks[rank % len(ranks)] for name, ranks in holders.items() if ranks}
        for rank, place in enumerate(places)
    ]
