"""Whether the collectives and messages of several ranks match, without deadlock, by the rules of NCCL.

The members of a communicator must ask for the same operations in the same order, with the same type and size. A
communicator runs its operations one after the other, each when all its members have reached it; communicators run
beside each other. An operation begins after what its rank has waited for before.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations

from megatron.rehearsal.recorder import MESSAGES, Communicator, Operation

WHOLE_DEVICE = Communicator("whole device", ())


def disagreements(ranks: Mapping[int, Sequence[Operation]]) -> list[str]:
    """A sentence for each communicator whose members ask for different things. ``ranks``: operations by world rank;
    communicators with a member that isn't among them are left out.
    """
    found = []
    for communicator, members in _by_communicator(ranks).items():
        rounds = {rank: [each for each in asked if each.name not in MESSAGES] for rank, asked in members.items()}
        found += _first_difference(communicator, rounds, what="operations")
        for sender, receiver in permutations(communicator.members, 2):
            sent = [each for each in members[sender] if each.name == "send" and each.peer == receiver]
            received = [each for each in members[receiver] if each.name == "receive" and each.peer == sender]
            found += _first_difference(communicator, {sender: sent, receiver: received}, what="messages")
    return found


def compared(ranks: Mapping[int, Sequence[Operation]]) -> tuple[int, int]:
    """How many communicators have all their members among ``ranks``, and how many these use."""
    return len(_by_communicator(ranks)), len({each.communicator for asked in ranks.values() for each in asked})


def incomplete_beginnings(ranks: Mapping[int, Sequence[Operation]]) -> list[str]:
    """A sentence for each communicator that begins with messages in a batch of which not all its members are part:
    such a batch makes NCCL connect all of them. Communicators as in ``disagreements``.
    """
    found = []
    for members in _by_communicator(ranks).values():
        begins = {rank: bool(asked) and asked[0].grouped for rank, asked in members.items()}
        first = next((rank for rank, grouped in begins.items() if grouped), None)
        if first is not None and not all(begins.values()):
            others = ", ".join(str(rank) for rank, grouped in begins.items() if not grouped)
            found.append(
                f"{members[first][0].describe} of rank {first} is the first of its process group, and in a batch, "
                f"without rank {others}"
            )
    return found


def stuck(ranks: Mapping[int, Sequence[Operation]], *, one_queue: bool = False) -> str | None:
    """Where all ranks would wait for ever; None when every operation ends. Communicators as in ``disagreements``.

    ``one_queue``: if each device ran one operation at a time, in the order of its rank, whatever their communicators:
    NCCL may, and does not have to, run several at once.
    """
    ranks = {rank: _with_pairs(rank, asked) for rank, asked in ranks.items()}
    whole = set(_by_communicator(ranks))
    queues: dict[tuple[int, Communicator], list[list[Operation]]] = {}
    pending: dict[int, set[int]] = {rank: set() for rank in ranks}  # waits that are not over, by number
    left: dict[int, dict[int, int]] = {rank: defaultdict(int) for rank in ranks}
    for rank, operations in ranks.items():
        batches: dict[tuple[Communicator, int], list[Operation]] = {}
        for each in operations:
            if each.communicator not in whole:
                continue
            line = WHOLE_DEVICE if one_queue else each.communicator
            if (line, each.batch) not in batches:
                batches[line, each.batch] = []
                queues.setdefault((rank, line), []).append(batches[line, each.batch])
            batches[line, each.batch].append(each)
            if each.waited is not None:
                left[rank][each.waited] += 1
                pending[rank].add(each.waited)
    greetings = _greetings(ranks)

    def heads(rank: int, communicator: Communicator) -> list[Operation]:
        queue = queues.get((rank, WHOLE_DEVICE if one_queue else communicator), [])
        earliest, greeted = min(pending[rank], default=None), next(iter(greetings[rank]), None)
        return [
            each
            for each in (queue[0] if queue else ())
            if each.communicator == communicator
            if (earliest is None or each.started_after <= earliest) and (greeted is None or each.batch <= greeted)
        ]

    def finish(rank: int, operation: Operation) -> None:
        queue = queues[rank, WHOLE_DEVICE if one_queue else operation.communicator]
        queue[0].remove(operation)
        if not queue[0]:
            queue.pop(0)
        if operation.batch in greetings[rank]:
            greetings[rank].remove(operation.batch)
        if operation.waited is not None:
            left[rank][operation.waited] -= 1
            if not left[rank][operation.waited]:
                pending[rank].discard(operation.waited)

    moved = True
    while moved:
        moved = False
        for communicator in whole:
            while ready := _ready(communicator, {rank: heads(rank, communicator) for rank in communicator.members}):
                moved = True
                for rank, operation in ready:
                    finish(rank, operation)
    waiting = [(rank, queue[0][0]) for (rank, _), queue in sorted(queues.items(), key=lambda item: item[0][0]) if queue]
    if not waiting:
        return None
    return "; ".join(f"rank {rank} waits in {operation.describe}" for rank, operation in waiting[:4])


def _greetings(ranks: Mapping[int, Sequence[Operation]]) -> dict[int, list[int]]:
    """Numbers of each rank's single messages that are the first of their pair and way: NCCL connects the two then, and
    the host waits until both have come.
    """
    found: dict[int, list[int]] = {}
    for rank, operations in ranks.items():
        met: set[tuple[Communicator, int | None]] = set()
        found[rank] = []
        for each in operations:
            if each.name in MESSAGES and not each.grouped and (each.communicator, each.peer) not in met:
                met.add((each.communicator, each.peer))
                if set(each.communicator.members) <= ranks.keys():
                    found[rank].append(each.batch)
    return found


def _ready(communicator: Communicator, heads: Mapping[int, Sequence[Operation]]) -> list[tuple[int, Operation]]:
    """One operation that all its ranks have reached, as each of them asked for it; none if there is none."""
    rounds = [(rank, each) for rank, asked in heads.items() for each in asked[:1] if each.name not in MESSAGES]
    if len(rounds) == len(communicator.members):
        return rounds
    for rank, asked in heads.items():
        for sent in (each for each in asked if each.name == "send"):
            assert sent.peer is not None
            for received in heads[sent.peer]:
                if received.name == "receive" and received.peer == rank:
                    return [(rank, sent), (sent.peer, received)]
    return []


def _by_communicator(ranks: Mapping[int, Sequence[Operation]]) -> dict[Communicator, dict[int, list[Operation]]]:
    found: dict[Communicator, dict[int, list[Operation]]] = {}
    for rank, operations in ranks.items():
        for each in operations:
            if set(each.communicator.members) <= ranks.keys():
                members = found.setdefault(each.communicator, {member: [] for member in each.communicator.members})
                members[rank].append(each)
    return found


def _with_pairs(rank: int, asked: Sequence[Operation]) -> list[Operation]:
    """Messages that are in no batch belong to a communicator of two, which NCCL makes for each pair of a group."""
    return [
        each
        if each.peer is None or each.grouped
        else dataclasses.replace(
            each,
            communicator=Communicator(
                f"{each.communicator.name}, a pair", (min(rank, each.peer), max(rank, each.peer))
            ),
        )
        for each in asked
    ]


def _first_difference(communicator: Communicator, asked: Mapping[int, Sequence[Operation]], *, what: str) -> list[str]:
    first, *others = asked
    for other in others:
        ours, theirs = asked[first], asked[other]
        for number, (one, two) in enumerate(zip(ours, theirs), start=1):
            same_kind = what == "messages" or one.name == two.name
            if not same_kind or _kind(one) != _kind(two):
                return [
                    f"{what} {number} of ranks {', '.join(map(str, communicator.members))}: rank {first} asks for "
                    f"{one.describe}, rank {other} for {two.describe}"
                ]
        if len(ours) != len(theirs):
            longer, extra = (first, ours) if len(ours) > len(theirs) else (other, theirs)
            return [
                f"rank {longer} asks for {extra[min(len(ours), len(theirs))].describe}, to which no other of ranks "
                f"{', '.join(map(str, communicator.members))} comes"
            ]
    return []


def _kind(operation: Operation) -> tuple[object, ...]:
    # Ranks may give unequal numbers of rows to an all-to-all.
    elements = None if operation.name == "all-to-all" else operation.elements
    return operation.dtype, elements, operation.reduction
