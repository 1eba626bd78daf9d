"""Whole matrices from flat shards: each is updated by one rank, to which the others send their parts.

Any rank of a pipeline stage may own any matrix: matrices are dealt by cost, so that ranks share the work. One
all-to-all brings a bucket's parts to the owners, another one the updates back, while the next bucket's are on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.buffers import Bucket, FlatBuffer, ParamEntry, Span
from megatron.core.distributed.levels import Levels, levels_of
from megatron.core.optimizer.update_rule import MatrixRule
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.exchange import RankGroup, start_all_to_all_rows
from megatron.core.parallel.matrices import Block, LogicalMatrix, blocks, logical_matrices
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding, sharding_of


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """A matrix that this rank updates: number ``number`` of a parameter's, with the rule's state for it."""

    entry: ParamEntry
    number: int
    shape: tuple[int, int]
    state: Mapping[str, Tensor]

    def entries(self) -> Iterator[ShardedState]:
        """What a checkpoint keeps of it: ``optimizer.<state>.<parameter>.<number>``, whole."""
        for name, tensor in self.state.items():
            full_name = f"optimizer.{name}.{self.entry.name}.{self.number}"
            yield ShardedState(full_name, tensor, Sharding(tuple(tensor.shape)))


@dataclass(frozen=True, eq=False)
class _Message:
    """What is exchanged with one rank: ranges of its flat numbers or of this rank's, and blocks of owned matrices."""

    spans: list[Span]
    blocks: list[tuple[int, Block]]


class MatrixBucket:
    """The matrices of a bucket: who owns which, this rank's, and the messages that bring them there and back.

    ``span``: the elements of the bucket that this rank updates. ``deal``: gives each matrix of a parameter its owner,
    the same on every rank.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        bucket: Bucket,
        span: Span,
        rule: MatrixRule,
        context: ParallelContext,
        stacks: Sequence[Sequence[LogicalMatrix]],
        owners: Sequence[Sequence[int]],
    ) -> None:
        mesh = context.mesh
        self.buffer, self.span, self.rule = buffer, span, rule
        self._group = stage_ranks(mesh)
        self._wide = torch.promote_types(buffer.params.dtype, torch.float32)
        self._device = context.device
        self.owned: list[OwnedMatrix] = []
        place = dict[tuple[int, int], int]()
        for index, (entry, stack) in enumerate(zip(bucket.entries, stacks)):
            for number, matrix in enumerate(stack):
                if owners[index][number] != self._group.rank:
                    continue
                place[index, number] = len(self.owned)
                shapes = rule.matrix_state(matrix.shape).items()
                zeros = partial(torch.zeros, dtype=self._wide, device=self._device)
                state = {name: zeros(shape) for name, shape in shapes}
                self.owned.append(OwnedMatrix(entry, number, matrix.shape, state))
        messages = partial(_messages, buffer, bucket, stacks, owners, place, self._group)
        is_sharded = span != bucket.span
        self._there = messages(counted=True, held=buffer.portion)
        self._back = messages(counted=False, held=buffer.owned if is_sharded else buffer.whole)

    def collect(self, flat: Tensor) -> Handle[Tensor]:
        """Start to send ``flat``, numbers of this rank's ``span``, to the owners of the matrices they are in."""
        sent = [span.moved(-self.span.start).of(flat) for message in self._there for span in message.spans]
        return self._exchange(sent, self._there, to_owners=True)

    def assembled(self, received: Tensor) -> list[Tensor]:
        """The owned matrices, from what ``collect`` received."""
        found = [torch.empty(each.shape, dtype=self._wide, device=self._device) for each in self.owned]
        position = 0
        for message in self._there:
            for index, block in message.blocks:
                _rectangle(found[index], block).copy_(
                    received[position : position + block.size].view(block.rows, block.columns)
                )
                position += block.size
        return found

    def return_updates(self, updates: Sequence[Tensor]) -> Handle[Tensor]:
        """Start to send the updates of the owned matrices to all ranks that hold a part of them."""
        sent = [
            _rectangle(updates[index], block).reshape(-1) for message in self._back for index, block in message.blocks
        ]
        return self._exchange(sent, self._back, to_owners=False)

    def placed(self, received: Tensor) -> Tensor:
        """Updates of this rank's ``span``, from what ``return_updates`` received; padding has none."""
        flat, position = torch.zeros(self.span.size, dtype=self._wide, device=self._device), 0
        for message in self._back:
            for span in message.spans:
                span.moved(-self.span.start).of(flat).copy_(received[position : position + span.size])
                position += span.size
        return flat

    def _exchange(self, sent: Sequence[Tensor], messages: Sequence[_Message], *, to_owners: bool) -> Handle[Tensor]:
        flat = torch.cat([*sent]) if sent else torch.empty(0, dtype=self._wide, device=self._device)
        if self._group.size == 1:
            return Handle(flat)
        of_spans = [sum(span.size for span in each.spans) for each in messages]
        of_blocks = [sum(block.size for _, block in each.blocks) for each in messages]
        sends, receives = (of_spans, of_blocks) if to_owners else (of_blocks, of_spans)
        return start_all_to_all_rows(flat, self._group, sends, receives)


def matrices_of(parameter: Tensor, config: OptimizerConfig) -> tuple[LogicalMatrix, ...]:
    """The logical matrices of a parameter, as the flags say what is one."""
    return logical_matrices(
        sharding_of(parameter), splits_qkv=config.muon_split_qkv, splits_parts=config.muon_split_gate_up
    )


def stage_ranks(mesh: Mesh) -> RankGroup:
    """The ranks of this rank's pipeline stage."""
    return RankGroup.of(mesh, "dp", "cp", "tp")


def _rectangle(matrix: Tensor, block: Block) -> Tensor:
    return matrix[block.row : block.row + block.rows, block.column : block.column + block.columns]


def _messages(
    buffer: FlatBuffer,
    bucket: Bucket,
    stacks: Sequence[Sequence[LogicalMatrix]],
    owners: Sequence[Sequence[int]],
    place: Mapping[tuple[int, int], int],
    group: RankGroup,
    *,
    counted: bool,
    held: Callable[[Bucket, Levels], Span],
) -> list[_Message]:
    """This rank's messages with each rank of the stage, in the same order at both ends: parameters of the bucket in
    turn, and of each the blocks in the order of the numbers of the rank that holds them.

    ``place``: of the matrices that this rank owns. ``counted``: each element from one rank; else to all that hold it.
    ``held``: what the rank of given levels holds of the bucket.
    """
    mesh, messages = group.mesh, [_Message([], []) for _ in group.members]
    for index, entry in enumerate(bucket.entries):
        owned_here = any((index, number) in place for number in range(len(stacks[index])))
        for position, rank in enumerate(group.members):
            if not owned_here and rank != mesh.world_rank:
                continue
            there = mesh.seen_by(rank)
            part = held(bucket, levels_of(there, entry.sharding.reduce)).overlap(entry.span)
            if part is None:
                continue
            start, stop = part.start - entry.span.start, part.stop - entry.span.start
            for block in blocks(entry.sharding, stacks[index], there, start=start, stop=stop, counted=counted):
                owner = owners[index][block.matrix]
                if rank == mesh.world_rank:
                    first = entry.span.start + block.start
                    messages[owner].spans.append(Span(first, first + block.size))
                if owner == group.rank:
                    messages[position].blocks.append((place[index, block.matrix], block))
    return messages


class MatrixUpdates:
    """All buckets whose parameters have a rule for matrices, in the order of all ranks of a stage."""

    def __init__(
        self,
        buffers: Iterable[FlatBuffer],
        rule_of: Callable[[FlatBuffer], MatrixRule | None],
        config: OptimizerConfig,
        context: ParallelContext,
        *,
        sharded: bool,
    ) -> None:
        loads = [0.0] * stage_ranks(context.mesh).size
        self.buckets: list[MatrixBucket] = []
        for buffer in buffers:
            rule = rule_of(buffer)
            for bucket in buffer.buckets if rule is not None else ():
                assert rule is not None
                stacks = [matrices_of(entry.parameter, config) for entry in bucket.entries]
                span = buffer.owned(bucket) if sharded else bucket.span
                owners = dealt([[matrix.shape for matrix in stack] for stack in stacks], loads)
                self.buckets.append(MatrixBucket(buffer, bucket, span, rule, context, stacks, owners))

    def run(
        self,
        direction: Callable[[MatrixBucket], Tensor],
        weights: Callable[[MatrixBucket], Tensor],
        number: Callable[[ParamEntry], int],
        move: Callable[[MatrixBucket, Tensor], None],
    ) -> None:
        """Update all buckets: ``direction`` and ``weights`` give the numbers of a bucket's ``span``, ``number`` the
        steps of a parameter, and ``move`` takes the updates of the ``span``. A collective of a stage's ranks.
        """
        arriving: tuple[MatrixBucket, list[Handle[Tensor]]] | None = None
        returning: tuple[MatrixBucket, list[Handle[Tensor]]] | None = None
        for bucket in (*self.buckets, None, None):
            leaving = back = None
            if bucket is not None:
                sources = (direction, weights) if bucket.rule.reads_weights else (direction,)
                leaving = bucket, [bucket.collect(source(bucket)) for source in sources]
            if arriving is not None:
                there, handles = arriving
                back = there, [there.return_updates(_transformed(there, handles, number))]
            if returning is not None:
                there, handles = returning
                move(there, there.placed(handles.pop().wait()))
            arriving, returning = leaving, back


def _transformed(
    bucket: MatrixBucket, handles: list[Handle[Tensor]], number: Callable[[ParamEntry], int]
) -> list[Tensor]:
    """The updates of matrices that have arrived. ``handles`` are forgotten on the way, and what they hold."""
    gathered = []
    while handles:
        gathered.append(bucket.assembled(handles.pop(0).wait()))
    return bucket.rule.transform(
        gathered[0],
        gathered[1] if bucket.rule.reads_weights else (),
        [each.state for each in bucket.owned],
        [number(each.entry) for each in bucket.owned],
    )


def dealt(shapes: Sequence[Sequence[tuple[int, int]]], loads: list[float]) -> list[list[int]]:
    """Owner of each matrix of each parameter: the costliest first, to the rank with the least load, which grows."""
    owners = [[0] * len(stack) for stack in shapes]
    places = [(index, number) for index, stack in enumerate(shapes) for number in range(len(stack))]
    places.sort(key=lambda each: -matrix_cost(shapes[each[0]][each[1]]))  # stable: the same on every rank
    for index, number in places:
        owner = min(range(len(loads)), key=loads.__getitem__)
        loads[owner] += matrix_cost(shapes[index][number])
        owners[index][number] = owner
    return owners


def matrix_cost(shape: tuple[int, int]) -> int:
    """Multiplications of a product of a matrix with its transpose, in any unit."""
    return shape[0] * shape[1] * min(shape)
