"""Operations of ranks that don't fit together, or can't end, by the rules of NCCL."""

from __future__ import annotations

import dataclasses

import torch

from megatron.rehearsal.comparing import disagreements, incomplete_beginnings, stuck
from megatron.rehearsal.recorder import Communicator, Operation
from tests.harness.sentences import check_line, check_sentence

BOTH, OTHER = Communicator("both", (0, 1)), Communicator("other", (0, 1))


def rank(*asked: tuple[str, Communicator, int | None, bool], elements: int = 4) -> list[Operation]:
    """Operations (name, communicator, peer, whether the rank waits at once); the others are never waited for."""
    operations, waits = [], 0
    for number, (name, communicator, peer, waits_at_once) in enumerate(asked):
        waited = waits if waits_at_once else None
        one = Operation(name, communicator, torch.float32, elements, f"file.py:{number}", number, waits, peer, waited)
        operations.append(one)
        waits += waits_at_once
    return operations


def test_equal_ranks_agree_and_end() -> None:
    asked = rank(("all-reduce", BOTH, None, True), ("all-gather", OTHER, None, True))
    assert disagreements({0: asked, 1: asked}) == []
    assert stuck({0: asked, 1: asked}) is None
    assert stuck({0: asked, 1: asked}, one_queue=True) is None


def test_another_order_size_type_or_number_is_named() -> None:
    """gloo pairs what it is given, NCCL computes with other bytes or waits."""
    one = rank(("all-reduce", BOTH, None, True), ("all-gather", BOTH, None, True))
    (said,) = disagreements({0: one, 1: one[::-1]})
    check_line(said, "operations 1", "4 x float32", "file.py:0")
    (said,) = disagreements({0: one, 1: rank(("all-reduce", BOTH, None, True), elements=5)})
    check_line(said, "rank 1", "5", "float32")
    (said,) = disagreements({0: one, 1: [dataclasses.replace(one[0], dtype=torch.bfloat16), one[1]]})
    check_line(said, "rank 0", "4", "float32")
    check_line(said, "rank 1", "4", "bfloat16")
    (said,) = disagreements({0: one, 1: one[:1]})
    check_line(said, "rank 0", "4 x float32", "file.py:1", "ranks 0, 1")


def test_two_communicators_in_another_order_wait_for_ever() -> None:
    """Each communicator's order is right, and both ranks wait."""
    first, second = ("all-reduce", BOTH, None, True), ("all-reduce", OTHER, None, True)
    crossed = {0: rank(first, second), 1: rank(second, first)}
    assert disagreements(crossed) == []
    said = stuck(crossed)
    assert said is not None and said.startswith("rank 0 waits in all-reduce of 4 x float32 at file.py:0")
    unwaited = {
        number: [(name, group, None, False) for name, group, _, _ in order]
        for number, order in {0: (first, second), 1: (second, first)}.items()
    }
    assert stuck({number: rank(*order) for number, order in unwaited.items()}) is None


def test_an_early_receive_blocks_a_send_of_its_communicator() -> None:
    """NCCL runs the operations of a communicator one after the other: two channels are needed."""

    def crossed(back: Communicator, *, greet: bool = True) -> dict[int, list[Operation]]:
        greetings = {0: [("send", BOTH, 1, True), ("receive", back, 1, True)] * greet}
        greetings[1] = [("receive", BOTH, 0, True), ("send", back, 0, True)] * greet
        return {
            0: rank(*greetings[0], ("receive", back, 1, False), ("send", BOTH, 1, True)),
            1: rank(*greetings[1], ("receive", BOTH, 0, True), ("send", back, 0, True)),
        }

    check_sentence(stuck(crossed(BOTH)))
    assert stuck(crossed(OTHER)) is None
    # The first message of a pair connects the two, which the host waits for.
    check_sentence(stuck(crossed(OTHER, greet=False)))
    # One operation at a time on a device: the receive that was started early keeps the send from running.
    check_sentence(stuck(crossed(OTHER), one_queue=True))


def test_a_batch_of_messages_begins_with_all_ranks() -> None:
    """NCCL connects the whole group at its first batch, and waits for those who are not part of it."""
    ring = rank(("send", BOTH, 1, True), ("receive", BOTH, 1, True))
    back = rank(("send", BOTH, 0, True), ("receive", BOTH, 0, True))
    other = rank(("all-reduce", BOTH, None, True))
    for each in (*ring, *back):
        each.grouped = True
    assert incomplete_beginnings({0: ring, 1: back}) == []
    (said,) = incomplete_beginnings({0: ring, 1: other})
    assert said.endswith("is the first of its process group, and in a batch, without rank 1")


def test_ranks_that_are_not_rehearsed_are_left_out() -> None:
    assert disagreements({0: rank(("all-reduce", BOTH, None, True))}) == []
    assert stuck({0: rank(("all-reduce", BOTH, None, True))}) is None


def test_messages_of_several_pairs_do_not_wait_for_each_other() -> None:
    """NCCL gives each pair of a group a communicator of its own, unless messages are started together."""
    ring = Communicator("ring", (0, 1, 2))
    met = [
        [("send", ring, 1, True), ("receive", ring, 2, True)],
        [("receive", ring, 0, True), ("send", ring, 2, True)],
        [("receive", ring, 1, True), ("send", ring, 0, True)],
    ]
    early = {
        0: rank(*met[0], ("receive", ring, 2, False), ("send", ring, 1, True)),
        1: rank(*met[1], *met[1]),
        2: rank(*met[2], *met[2]),
    }
    assert stuck(early) is None
    for operations in early.values():
        for each in operations:
            each.grouped = True
    check_sentence(stuck(early))
