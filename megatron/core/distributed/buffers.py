"""Parameters and gradients as views into flat tensors, divided into buckets that data parallelism reduces and shards.

A buffer is a sequence of buckets; a bucket is a sequence of whole parameters, in the order in which backward completes
them; shard *r* is the *r*-th equal part of every bucket. The layout doesn't depend on whether the optimizer is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.objective import name_in_checkpoints
from megatron.core.distributed.layout import ALIGNMENT as ALIGNMENT
from megatron.core.distributed.layout import Span as Span
from megatron.core.distributed.layout import lay_out as lay_out
from megatron.core.distributed.layout import usual_bucket_size as usual_bucket_size
from megatron.core.distributed.levels import Levels, levels_of
from megatron.core.distributed.parameter_policy import ParameterPolicy, Policies, parameter_policies
from megatron.core.distributed.transient import TransientTensor
from megatron.core.parallel.collectives import gather_objects, registered_zeros
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding, sharding_of
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer
from megatron.core.tensor_parallel.initialize import draw, has_values

_SCRATCH_ELEMENTS = 1 << 20
_BUS_WIDTH_ELEMENTS = 1 << 16  # multiples of which NCCL's rings send at full speed on many nodes


@dataclass(eq=False)
class ParamEntry:
    """One parameter's place in a buffer.

    ``name``: its global name; tied copies share one. ``order``: its number in registration order.
    ``norm_spans``: this rank's part of global norms, as spans of the buffer. Over all model-parallel ranks every
    logical element is counted once, and vocabulary padding never.
    ``holders``: world ranks of this rank's pipeline that hold a copy, by stage; several for a tied parameter.
    ``main_grad``: the view of the gradients, shaped like the parameter, empty of a frozen one. ``rests``: whether their
    memory stays, also between backward passes. ``quantizer``: that of a weight that is gathered in 8 bits.
    """

    name: str
    order: int
    parameter: nn.Parameter
    sharding: Sharding
    span: Span
    norm_spans: tuple[Span, ...]
    holders: tuple[int, ...]
    main_grad: Tensor
    rests: bool = True
    quantizer: Fp8Quantizer | None = None

    @property
    def resting_grad(self) -> Tensor | None:
        """What ``parameter.grad`` is between backward passes: the buffer, when autograd can add to it in place."""
        return self.main_grad if self.rests and self.main_grad.dtype == self.parameter.dtype else None


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are reduced together, with padding that makes the bucket divisible into shards.

    ``weights``, ``grads``: 1-D, as long as ``span``: memory of its own that comes and goes, where ranks divide weights
    or gradients among them; else None. ``codes``: in place of ``weights`` of those that are gathered in 8 bits, uint8.
    ``grad_sums``: with such ``grads``, their sums in this rank's shard, which have memory from the first of a step on,
    and until the first step.
    """

    span: Span
    entries: tuple[ParamEntry, ...]
    weights: TransientTensor | None = None
    grads: TransientTensor | None = None
    codes: TransientTensor | None = None
    grad_sums: TransientTensor | None = None

    @property
    def gathered(self) -> TransientTensor | None:
        """What ranks gather while its unit is needed (ZeRO 3)."""
        return self.weights if self.codes is None else self.codes


@dataclass(eq=False)
class FlatBuffer:
    """All trained parameters of one class end to end: same dtype, same axes to reduce over, same policy.

    ``levels``: how the ranks on those axes divide what they have of it.
    ``params``, ``grads``: 1-D, equally long; empty where each bucket has memory of its own that comes and goes.
    ``shards``: this rank's shards of all buckets end to end, where it holds whole weights for a while only: those of
    ZeRO 3 or gathered in 8 bits. ``divides_grads``: whether it holds whole gradients for a while only (ZeRO 2), and
    their sums in ``grad_sums`` of its buckets. ``codes``: of weights that are gathered in 8 bits, see ``Fp8Weights``:
    bytes, as many as ``params``, or as ``shards`` with ZeRO 3.
    """

    params: Tensor
    grads: Tensor
    levels: Levels
    policy: ParameterPolicy
    buckets: list[Bucket] = field(default_factory=list)
    codes: Tensor | None = None
    shards: Tensor | None = None
    divides_grads: bool = False
    _scratch: Tensor | None = None

    @property
    def entries(self) -> Iterator[ParamEntry]:
        """Every parameter, in buffer order."""
        return (entry for bucket in self.buckets for entry in bucket.entries)

    @property
    def num_shards(self) -> int:
        """Parts into which ranks divide each bucket, where they divide any."""
        return self.levels.num_shards

    def whole(self, bucket: Bucket, levels: Levels | None = None) -> Span:
        """All of a bucket, on any rank."""
        return bucket.span

    def shard(self, bucket: Bucket, levels: Levels | None = None) -> Span:
        """This rank's part of a bucket, or that of the rank whose ``levels`` are given."""
        levels = levels or self.levels
        return bucket.span.part(levels.own_shard, levels.num_shards)

    def portion(self, bucket: Bucket, levels: Levels | None = None) -> Span:
        """The part of a shard that copies of it leave to this rank in sums over all ranks: each element once."""
        levels = levels or self.levels
        return self.shard(bucket, levels).part(levels.own_copy, levels.num_copies)

    def owned(self, bucket: Bucket, levels: Levels | None = None) -> Span:
        """What this rank updates of a bucket with a sharded optimizer."""
        return self.portion(bucket, levels) if self.levels.divides_state else self.shard(bucket, levels)

    def own(self, span: Span) -> Tensor:
        """Weights in a span of this rank's shard of a bucket."""
        if self.shards is None:
            return span.of(self.params)
        bucket, part = self._in_shard(span)
        return part.moved(bucket.span.start // self.num_shards).of(self.shards)

    def own_grads(self, span: Span) -> Tensor:
        """Gradients in a span of this rank's shard of a bucket."""
        if not self.divides_grads:
            return span.of(self.grads)
        bucket, part = self._in_shard(span)
        assert bucket.grad_sums is not None, "its gradients are divided"
        return part.of(bucket.grad_sums.flat)

    def own_codes(self, bucket: Bucket) -> Tensor:
        """Codes of this rank's shard of a bucket that is gathered in 8 bits."""
        assert self.codes is not None, "its weights are gathered as they are"
        shard = self.shard(bucket)
        if bucket.codes is None:
            return shard.of(self.codes)
        return Span(0, shard.size).moved(bucket.span.start // self.num_shards).of(self.codes)

    def _in_shard(self, span: Span) -> tuple[Bucket, Span]:
        """The bucket of which this rank's shard holds a span, and the span within the shard."""
        ((bucket, shard),) = (
            (bucket, shard) for bucket in self.buckets if (shard := self.shard(bucket)).overlap(span) is not None
        )
        return bucket, span.moved(-shard.start)

    def hide(self, entries: Iterable[ParamEntry]) -> None:
        """Let parameters have no memory for weights: who reads one finds NaN."""
        nothing = self.params.new_full((), math.nan)
        for entry in entries:
            entry.parameter.data = nothing.expand(entry.parameter.shape)

    def accumulate(self, entry: ParamEntry, grad: Tensor) -> None:
        """Add a gradient of the parameter, of any dtype, into the gradient buffer."""
        target = entry.main_grad
        if grad.dtype == target.dtype or grad.device.type != "cpu":
            target.add_(grad)
            return
        # On CPU torch adds a tensor of another dtype slowly: 65 ms for 35 million elements, 6 ms through a scratch.
        if self._scratch is None:
            self._scratch = torch.empty(_SCRATCH_ELEMENTS, dtype=target.dtype)
        flat_target, flat_grad = target.view(-1), grad.reshape(-1)
        for start in range(0, flat_target.numel(), _SCRATCH_ELEMENTS):
            part = flat_grad[start : start + _SCRATCH_ELEMENTS]
            converted = self._scratch[: part.numel()].copy_(part)
            flat_target[start : start + _SCRATCH_ELEMENTS].add_(converted)


def parts_of(
    buffers: Iterable[FlatBuffer], owned_of: Callable[[FlatBuffer, Bucket], Span]
) -> Iterator[tuple[FlatBuffer, ParamEntry, Span]]:
    """Every parameter with the span of its buffer that this rank has of it, by ``FlatBuffer.whole``, ``shard``,
    ``owned`` or ``portion``. Parameters of which it has nothing are left out.
    """
    for buffer in buffers:
        for bucket in buffer.buckets:
            owned = owned_of(buffer, bucket)
            for entry in bucket.entries:
                part = entry.span.overlap(owned)
                if part is not None:
                    yield buffer, entry, part


def build_buffers(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    context: ParallelContext,
    *,
    grad_dtype: torch.dtype,
    bucket_size: int | None = None,
    pads_buckets: bool = False,
    registers: bool = False,
    quantizers: Mapping[nn.Parameter, Fp8Quantizer] | None = None,
    policies: Policies | None = None,
    units: Mapping[nn.Parameter, str] | None = None,
    zero_stage: int = 1,
    seed: int = 0,
    of_frozen: bool = False,
    divides_state: bool = False,
) -> list[FlatBuffer]:
    """Move trained parameters into flat buffers, each with a view of a gradient buffer as ``parameter.main_grad``.

    Where dtypes agree, ``parameter.grad`` is that view too and autograd accumulates into it. Frozen parameters stay
    where they are and no longer require a gradient. ``bucket_size``: elements of a bucket; None means Megatron's
    max(40 million, 1 million times the ranks that reduce together). ``pads_buckets``: to multiples of 2^16 elements,
    with which NCCL's rings keep their speed on many nodes. ``registers``: in memory of NCCL, see ``registered_zeros``.
    ``quantizers``: of weights that are gathered in 8 bits where ranks share them. ``policies``: None trains everything.
    ``zero_stage``: from 2 on whole gradients have memory by unit, with 3 weights, too; ``units`` then names that of
    each parameter, and values that aren't there yet are drawn by ``seed``, a bucket at a time.
    ``divides_state``: see ``Levels``. ``of_frozen``: of the other parameters, which have no gradients, for ZeRO 3.
    With pipeline stages all ranks must call this together: they exchange which tied parameters they hold.
    """
    named_parameters = list(named_parameters)
    policies = parameter_policies(named_parameters) if policies is None else policies
    groups: dict[Hashable, list[_Member]] = {}
    units = units or {} if zero_stage > 1 else {}
    for order, (name, parameter) in enumerate(named_parameters):
        sharding = sharding_of(parameter)
        name = sharding.tied or name
        policy = policies[name]
        parameter.requires_grad_(policy.is_trained)
        if policy.is_trained != of_frozen:
            levels = levels_of(context.mesh, sharding.reduce)
            quantizer = (quantizers or {}).get(parameter) if levels.num_shards > 1 else None
            key = sharding.tied or (units.get(parameter) if levels.num_shards > 1 else None)
            member = _Member(name, order, parameter, sharding, policy, key, quantizer)
            groups.setdefault((parameter.dtype, sharding.reduce, policy, quantizer is not None), []).append(member)
    holders = tied_holders((member.sharding for group in groups.values() for member in group), context.mesh)
    multiple = _BUS_WIDTH_ELEMENTS if pads_buckets else 1
    return [
        _build_buffer(
            group[::-1],
            context,
            levels_of(context.mesh, group[0].sharding.reduce, divides_state=divides_state),
            grad_dtype,
            bucket_size,
            multiple,
            registers,
            holders,
            zero_stage,
            seed,
        )
        for group in groups.values()
    ]


class _Member(NamedTuple):
    """A trained parameter before it is placed. ``key``: parameters of different keys share no bucket."""

    name: str
    order: int
    parameter: nn.Parameter
    sharding: Sharding
    policy: ParameterPolicy
    key: str | None
    quantizer: Fp8Quantizer | None


def _build_buffer(
    members: Sequence[_Member],
    context: ParallelContext,
    levels: Levels,
    grad_dtype: torch.dtype,
    bucket_size: int | None,
    multiple: int,
    registers: bool,
    holders: Mapping[str, tuple[int, ...]],
    zero_stage: int,
    seed: int,
) -> FlatBuffer:
    dtype, num_shards = members[0].parameter.dtype, levels.num_shards
    is_trained = members[0].policy.is_trained
    divides_grads, divides_weights = (num_shards > 1 and zero_stage >= stage for stage in (2, 3))
    layout = lay_out(
        [(member.parameter.numel(), member.key) for member in members],
        bucket_size=bucket_size or usual_bucket_size(levels.num_ranks),
        multiple=math.lcm(levels.num_ranks * ALIGNMENT, multiple),
    )
    size = layout[-1].span.stop
    in_8_bits, grad_dtype = members[0].quantizer is not None, torch.promote_types(grad_dtype, dtype)
    registered = partial(registered_zeros, mesh=context.mesh, axes=levels.inner) if registers else torch.zeros
    zeros = partial(registered, device=context.device)
    if in_8_bits and divides_weights:
        params = torch.full((), math.nan, dtype=dtype, device=context.device).expand(size)
    else:
        length = 0 if divides_weights else size
        params = (torch.zeros if in_8_bits else registered)(length, dtype=dtype, device=context.device)
    buffer = FlatBuffer(
        params=params,
        grads=zeros(size if is_trained and not divides_grads else 0, dtype=grad_dtype),
        levels=levels,
        policy=members[0].policy,
        codes=zeros(size // num_shards if divides_weights else size, dtype=torch.uint8) if in_8_bits else None,
        shards=zeros(size // num_shards, dtype=dtype) if divides_weights else None,
        divides_grads=is_trained and divides_grads,
    )
    remaining = iter(members)
    for bucket_span, spans in layout:
        here = [(next(remaining), span.moved(-bucket_span.start)) for span in spans]
        weights = torch.zeros(bucket_span.size, dtype=dtype, device=context.device) if divides_weights else None
        grads = sums = None
        if buffer.divides_grads:
            grads = torch.empty(bucket_span.size, dtype=grad_dtype, device=context.device)
            sums = TransientTensor(grads.new_empty(bucket_span.size // num_shards))
        of_params = bucket_span.of(buffer.params) if weights is None else weights
        of_grads = (bucket_span.of(buffer.grads) if grads is None else grads) if is_trained else None
        rests = is_trained and grads is None
        entries = tuple(
            _adopt(member, span, bucket_span, of_params, of_grads, context.mesh, holders, seed, rests=rests)
            for member, span in here
        )
        named = {entry.name: entry.parameter for entry in entries}
        owner = here[0][0].key or ""
        codes = torch.empty_like(weights, dtype=torch.uint8) if in_8_bits and weights is not None else None
        bucket = Bucket(
            bucket_span,
            entries,
            None if weights is None or in_8_bits else TransientTensor(weights, owner=owner, parameters=named),
            None if grads is None else TransientTensor(grads),
            None if codes is None else TransientTensor(codes),
            sums,
        )
        buffer.buckets.append(bucket)
        if bucket.grads is not None:
            bucket.grads.free()
        if weights is not None and bucket.gathered is not None:
            shard = buffer.shard(bucket)
            buffer.own(shard).copy_(shard.moved(-bucket_span.start).of(weights))
            if in_8_bits:
                buffer.hide(entries)
            bucket.gathered.free()
    if in_8_bits and not divides_weights:
        buffer.shards = torch.cat([buffer.shard(bucket).of(buffer.params) for bucket in buffer.buckets])
    return buffer


def _adopt(
    member: _Member,
    span: Span,
    bucket: Span,
    params: Tensor,
    grads: Tensor | None,
    mesh: Mesh,
    holders: Mapping[str, tuple[int, ...]],
    seed: int,
    *,
    rests: bool,
) -> ParamEntry:
    """Move a parameter's values into ``span`` of its bucket's ``params`` and its storage with them."""
    parameter, sharding = member.parameter, member.sharding
    view = span.of(params).view(parameter.shape)
    if has_values(parameter):
        view.copy_(parameter.detach())
    else:
        draw(view, member.name, sharding, parameter.initialization, mesh, seed=seed)  # type: ignore[attr-defined]
    place = span.moved(bucket.start)
    parameter.data = view
    main_grad = torch.empty(0) if grads is None else span.of(grads).view(parameter.shape)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]
    norm_spans = tuple(part.moved(place.start) for part in _norm_spans(sharding, mesh, holders))
    held_by = holders[sharding.tied] if sharding.tied is not None else (mesh.world_rank,)
    entry = ParamEntry(
        name=member.name,
        order=member.order,
        parameter=parameter,
        sharding=sharding,
        span=place,
        norm_spans=norm_spans,
        holders=held_by,
        main_grad=main_grad,
        rests=rests,
        quantizer=member.quantizer,
    )
    parameter.grad = entry.resting_grad
    return entry


def sharded_weights(buffers: Iterable[FlatBuffer]) -> Iterator[ShardedState]:
    """This rank's parts of all weights, where ranks divide them, as checkpoints name them."""
    for buffer, entry, part in parts_of(buffers, FlatBuffer.shard):
        flat_range = (part.start - entry.span.start, part.stop - entry.span.start)
        yield ShardedState(name_in_checkpoints(entry.name), buffer.own(part), entry.sharding, flat_range)


def counted_weights(buffers: Iterable[FlatBuffer]) -> list[Tensor]:
    """This rank's parts of weights that it counts in sums over all ranks: each logical element once."""
    return [
        buffer.own(here)
        for buffer, entry, part in parts_of(buffers, FlatBuffer.portion)
        for span in entry.norm_spans
        if (here := span.overlap(part)) is not None
    ]


def frozen_parts(
    named_parameters: Iterable[tuple[str, nn.Parameter]], policies: Policies, context: ParallelContext
) -> list[Tensor]:
    """The parts of frozen parameters that this rank counts in sums over all ranks: each logical element once.

    With pipeline stages all ranks must call this together.
    """
    named = [(parameter, sharding_of(parameter), name) for name, parameter in named_parameters]
    frozen = [(p, sharding) for p, sharding, name in named if not policies[sharding.tied or name].is_trained]
    mesh, holders = context.mesh, tied_holders((sharding for _, sharding in frozen), context.mesh)
    return [
        span.of(parameter.detach().view(-1))
        for parameter, sharding in frozen
        if mesh.rank(*sharding.reduce) == 0
        for span in _norm_spans(sharding, mesh, holders)
    ]


def tied_holders(shardings: Iterable[Sharding], mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """World ranks that hold a copy of each tied parameter on this rank's pipeline, by stage. All ranks call this."""
    names = {sharding.tied for sharding in shardings if sharding.tied is not None}
    everywhere = gather_objects(names, mesh) if mesh.size("pp") > 1 else {mesh.world_rank: names}
    here = {rank: everywhere[rank] for rank in mesh.members("pp")}
    return {name: tuple(rank for rank in here if name in here[rank]) for name in sorted(set().union(*here.values()))}


def _norm_spans(sharding: Sharding, mesh: Mesh, holders: Mapping[str, tuple[int, ...]]) -> list[Span]:
    """The flat parts of a local tensor that this rank counts: without vocabulary padding and parts of other ranks."""
    if sharding.tied is not None and holders[sharding.tied][0] != mesh.world_rank:
        return []
    local = sharding.local_shape(mesh)
    elements = math.prod(local)
    pieces = sharding.counted_pieces(mesh)
    if sum(math.prod(piece.sizes) for piece in pieces) == elements:
        return [Span(0, elements)]
    row = elements // local[0]
    assert all(piece.sizes[1:] == local[1:] for piece in pieces), f"{sharding} is not counted by whole rows"
    return [Span(piece.local[0] * row, (piece.local[0] + piece.sizes[0]) * row) for piece in pieces]
