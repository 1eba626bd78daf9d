"""One update of the weights from gradient sums: norm, skip or clip, step, and a gather of the weights.

A replicated optimizer and a sharded one (ZeRO 1) are the same code: each owns spans of the buffers, the replicated one
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import ALIGNMENT, FlatBuffer, ParamEntry, Span
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.distributed.parameter_policy import ParameterPolicy
from megatron.core.distributed.unit_memory import UnitWeights
from megatron.core.optimizer.grad_norm import GradientStatistics, ModelStatistics
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.matrix_updates import MatrixBucket, MatrixUpdates
from megatron.core.optimizer.offload import CPU, HostTransfer, divided
from megatron.core.optimizer.storage import (
    MainParams,
    PlainStateStorage,
    Remainders,
    StateStorage,
    StochasticallyRounded,
    build_main_params,
)
from megatron.core.optimizer.update_rule import ElementRule, MatrixRule, Step
from megatron.core.optimizer.update_rules import ROUNDED_STOCHASTICALLY, UPDATE_RULES, UpdateRule, is_narrow
from megatron.core.optimizer.weight_average import AVERAGE, AVERAGES, WeightAverage
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.sharding import ShardedState

# Elements; a step's copies of a chunk stay in a CPU's caches.
_CPU_CHUNK = 1 << 18
CHUNK = 1 << 22


@dataclass(frozen=True)
class UpdateResult:
    """How a step ended, the same on every rank.

    ``grad_norm``: L2 norm of the mean gradient before clipping. ``skipped``: a gradient was infinite or NaN on some
    rank, so nothing changed on any. ``num_zeros``: gradient elements that are zero, when asked for.
    """

    grad_norm: float
    skipped: bool
    num_zeros: int | None = None


@dataclass(frozen=True, eq=False)
class MasterPart:
    """The part of a parameter that this rank updates: ``span`` of the parameter, flattened, and ``place`` of the
    ``storage`` of its master weights, which begins on ``ALIGNMENT`` and takes the padding behind it, if there is any.
    """

    entry: ParamEntry
    span: Span
    place: Span
    storage: PlainStateStorage | MainParams | Remainders

    def read(self) -> Tensor:
        """The weights in the format of a step [elements]: memory or a copy; see ``StateStorage``."""
        return self.storage.read(self.place)

    def write(self, weights: Tensor) -> None:
        """Keep what ``read`` gave, changed in place, and round it to the weights of the forward pass."""
        self.storage.write(self.place, weights)

    def state(self, kind: str, numbers: Tensor) -> ShardedState:
        """What a checkpoint keeps of ``numbers``, which lie like the weights, as ``<kind>.<parameter>``."""
        entry, local = self.entry, numbers[: self.span.size]
        if self.span.size == entry.span.size:
            return ShardedState(f"{kind}.{entry.name}", local.view(entry.parameter.shape), entry.sharding)
        return ShardedState(f"{kind}.{entry.name}", local, entry.sharding, (self.span.start, self.span.stop))


@dataclass(frozen=True, eq=False)
class _Owned:
    """A span of a buffer that this rank updates: master weights, gradients and the update rule's state for it.

    ``grads``: of the span. ``main_params`` are the weights themselves where those are wide enough. ``transfer``: where
    its steps are taken in main memory.
    """

    buffer: FlatBuffer
    span: Span
    entries: tuple[ParamEntry, ...]
    rule: UpdateRule
    grads: Tensor
    main_params: PlainStateStorage | MainParams | Remainders
    state: dict[str, PlainStateStorage]
    transfer: HostTransfer | None
    average: WeightAverage | None = None

    @property
    def wide(self) -> torch.dtype:
        """The type in which a step computes."""
        return torch.promote_types(self.buffer.params.dtype, torch.float32)

    @property
    def is_direct(self) -> bool:
        """Whether a step needs no copies of anything."""
        in_place = self.transfer is None and not isinstance(self.main_params, Remainders)
        in_place = in_place and self.grads.dtype == self.wide
        return in_place and all(kept.numbers.dtype == self.wide for kept in self.state.values())

    def gradients(self, parts: Sequence[Span]) -> Iterator[Tensor]:
        """Gradients of parts of the span, widened, where the step is taken; from a device, the next part is copied
        meanwhile.
        """
        gradients = self.grads
        if self.transfer is None:
            yield from (part.of(gradients).to(self.wide) for part in parts)
            return
        fetch = partial(self.transfer.to_host, purpose="gradients")
        coming = fetch(parts[0].of(gradients))
        for following in (*parts[1:], None):
            arrived, coming = coming, coming if following is None else fetch(following.of(gradients))
            yield arrived().to(self.wide)

    def kept(self) -> dict[str, StateStorage]:
        """What checkpoints keep, by name."""
        masters = {} if isinstance(self.main_params, PlainStateStorage) else {"fp32_param": self.main_params}
        averages = {} if self.average is None else {AVERAGE: self.average}
        return {**self.state, **masters, **averages}


@dataclass(frozen=True)
class _Rates:
    """Numbers of one step for all parameters: gradient sums are divided by ``divisor``."""

    divisor: float
    lr: float
    decoupled_lr: float
    weight_decay: float

    def of(self, policy: ParameterPolicy) -> tuple[float, float]:
        """Learning rate and weight decay of parameters with a policy."""
        rate = self.decoupled_lr if policy.is_decoupled else self.lr
        return rate * policy.lr_multiplier, self.weight_decay if policy.decays else 0.0


def _chunk_of(owned: _Owned) -> int:
    """Elements of which a step makes copies at a time."""
    return _CPU_CHUNK if owned.grads.device.type == "cpu" else CHUNK


def _cut(whole: Span, size: int) -> Iterator[Span]:
    """The span in parts of ``size`` elements, the last one shorter."""
    return (Span(start, min(start + size, whole.stop)) for start in range(whole.start, whole.stop, size))


class Optimizer:
    """Update rules over flat buffers, each buffer by that of its parameters' policy.

    ``sharded``: own only this rank's shard of every bucket and gather the weights after each update.
    ``count_zeros``: report zero gradients with every update. ``frozen``: see ``ModelStatistics``. ``low_precision``:
    where layers look for weights that are gathered in 8 bits, if any are. ``units``: gathers weights by unit, if any.

    ``outer_step``: called after each update, also a skipped one, before the weights are gathered; whether it changed
    any.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        context: ParallelContext,
        *,
        low_precision: LowPrecision,
        sharded: bool,
        count_zeros: bool = False,
        frozen: Sequence[Tensor] = (),
        units: UnitWeights | None = None,
    ) -> None:
        self._clip_grad = config.clip_grad
        self._count_zeros = count_zeros
        self._rules = {name: UPDATE_RULES[name](config) for name in {each.policy.update_rule for each in buffers}}
        self._config = config
        self._scaler = build_loss_scaler(precision)
        self._statistics = ModelStatistics(buffers, context, frozen=frozen)
        self._owned = []
        self._numbers = {id(buffer): number for number, buffer in enumerate(buffers)}
        transfer = HostTransfer.of(config, context.device)
        spans = [
            (buffer, bucket, buffer.owned(bucket) if sharded else bucket.span)
            for buffer in buffers
            for bucket in buffer.buckets
        ]
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        for buffer, bucket, span, is_offloaded in divided(spans, fraction):
            by = transfer if is_offloaded else None
            masters = build_main_params(buffer.own(span), by, as_remainders=config.use_precision_aware_optimizer)
            home = CPU if is_offloaded else buffer.params.device
            state, average = self._zeros(buffer, span, home), None
            if config.ema_decay is not None:
                wide = torch.promote_types(buffer.params.dtype, torch.float32)
                average = WeightAverage.of(config.ema_decay, span.size, wide, home)
            rule, grads = self._rules[buffer.policy.update_rule], buffer.own_grads(span)
            self._owned.append(_Owned(buffer, span, bucket.entries, rule, grads, masters, state, by, average))
        self._matrices = MatrixUpdates(buffers, self._matrix_rule, config, context, sharded=sharded)
        self._owned.sort(key=lambda owned: owned.transfer is not None)  # a device works through its own meanwhile
        self._step = 0
        self._trained_since: dict[str, int] = {}
        self._averaged_since = 0
        self._seed_divisor = 1.0
        self.outer_step: Callable[[], bool] = lambda: False
        self.gather = ParamGather(buffers if sharded else [], context, low_precision, units)

    def _zeros(self, buffer: FlatBuffer, span: Span, device: torch.device) -> dict[str, PlainStateStorage]:
        """The update rule's state before the first step, for a span of the buffer."""
        number = self._numbers[id(buffer)]
        wide, state = torch.promote_types(buffer.params.dtype, torch.float32), dict[str, PlainStateStorage]()
        for name in self._rules[buffer.policy.update_rule].state_names:
            narrow = is_narrow(name, self._config)
            dtype = torch.bfloat16 if narrow else wide
            zeros = torch.zeros(span.size, dtype=dtype, device=device)
            state[name] = PlainStateStorage(zeros, wide)
            if narrow and name in ROUNDED_STOCHASTICALLY:
                state[name] = StochasticallyRounded(zeros, wide, partial(self._rounding_key, number), span.start)
        return state

    def _matrix_rule(self, buffer: FlatBuffer) -> MatrixRule | None:
        rule = self._rules[buffer.policy.update_rule]
        return rule if isinstance(rule, MatrixRule) else None

    def _rounding_key(self, buffer: int) -> int:
        return self._step * 0x9E3779B1 + buffer * 0x85EBCA77

    @property
    def loss_scale(self) -> float:
        """The loss scale of the coming step, as the log shows it."""
        return self._scaler.scale

    @property
    def backward_scale(self) -> float:
        """The gradient from which the coming step's backward passes start, instead of 1.

        The loss scale; for fp16 divided by a power of two near the argument of ``expect``, because losses here are
        sums: fp16 gradients then have the size that they have with Megatron-LM's mean of each microbatch divided by the
        number of microbatches, and a loss scale means the same as there.
        """
        return self._scaler.scale / self._seed_divisor

    def expect(self, predictions: float) -> None:
        """Set how many ``predictions`` each rank's losses of the coming fp16 step sum over, on average."""
        self._seed_divisor = 2.0 ** round(math.log2(max(predictions, 1.0)))

    @torch.no_grad()
    def gradient_sums(self) -> Tensor:
        """What ``GradientStatistics.of`` needs for the coming update, fp64 on the device. A collective, after
        ``GradSync.finish``.
        """
        return self._statistics.gradient_sums(count_zeros=self._count_zeros)

    @torch.no_grad()
    def update(
        self,
        *,
        count: float,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        statistics: GradientStatistics | None = None,
    ) -> UpdateResult:
        """Take one step from gradient sums over ``count`` tokens; zero means that all tokens were masked.

        The policies of the buffers decide on weight decay and learning rate. ``statistics``: those of these gradients,
        where the caller has read ``gradient_sums``; otherwise the host waits for them here. All ranks call this
        together, after ``GradSync.finish``.
        """
        self.gather.finish()
        sums = statistics or GradientStatistics.of(self.gradient_sums().tolist())
        divisor = (count or 1.0) * self.backward_scale
        grad_norm = sums.norm / divisor
        overflow = not math.isfinite(sums.norm)
        self._scaler.update(overflow=overflow)
        if overflow:
            if self.outer_step():
                self.gather.start()
            else:
                self.gather.start_again()
            return UpdateResult(grad_norm, skipped=True, num_zeros=sums.num_zeros)
        clip = self._clip_grad / (grad_norm + 1e-6) if self._clip_grad > 0 else 1.0
        self._step += 1
        rates = _Rates(divisor / min(clip, 1.0), lr, lr if decoupled_lr is None else decoupled_lr, weight_decay)
        for owned in self._owned:
            if not isinstance(owned.rule, MatrixRule):
                self._move(owned, owned.rule, rates)
        self._matrices.run(
            partial(self._directions, rates=rates),
            self._masters,
            lambda entry: self._step - self._trained_since.get(entry.name, 0),
            partial(self._move_matrices, rates=rates),
        )
        self.outer_step()
        self.gather.start()
        return UpdateResult(grad_norm, skipped=False, num_zeros=sums.num_zeros)

    def leave(self) -> None:
        """Take no step by these gradients: weights and state stay, for the coming forward pass. All ranks call it."""
        self.gather.finish()
        self.gather.start_again()

    def _move(self, owned: _Owned, rule: ElementRule, rates: _Rates) -> None:
        """Step on one span; dividing the gradients costs no pass of its own."""
        for step, part, grads in self._parts(owned, rates, at_once=not rule.temporaries):
            weights = owned.main_params.read(part)
            state = {name: kept.read(part) for name, kept in owned.state.items()}
            rule.apply(weights, grads, list(state.values()), step)
            self._follow(owned, part, weights, step.number)
            owned.main_params.write(part, weights)
            for name, kept in owned.state.items():
                kept.write(part, state[name])

    def _directions(self, bucket: MatrixBucket, *, rates: _Rates) -> Tensor:
        """What the matrix rule transforms, for the span of a bucket."""
        flat = self._empty(bucket)
        for owned in self._owned_of(bucket):
            for step, part, grads in self._parts(owned, rates, at_once=False):
                state = {name: kept.read(part) for name, kept in owned.state.items()}
                here = part.moved(owned.span.start - bucket.span.start)
                here.of(flat).copy_(bucket.rule.direction(grads, list(state.values()), step))
                for name, kept in owned.state.items():
                    kept.write(part, state[name])
        return flat

    def _masters(self, bucket: MatrixBucket) -> Tensor:
        """Master weights of the span of a bucket."""
        flat = self._empty(bucket)
        for owned in self._owned_of(bucket):
            for part in _cut(Span(0, owned.span.size), _chunk_of(owned)):
                part.moved(owned.span.start - bucket.span.start).of(flat).copy_(owned.main_params.read(part))
        return flat

    def _move_matrices(self, bucket: MatrixBucket, updates: Tensor, *, rates: _Rates) -> None:
        """Decay the weights of the span of a bucket and subtract the updates."""
        lr, weight_decay = rates.of(bucket.buffer.policy)
        for owned in self._owned_of(bucket):
            for number, part in self._numbered_parts(owned):
                weights = owned.main_params.read(part)
                update = part.moved(owned.span.start - bucket.span.start).of(updates).to(weights.device)
                weights.mul_(1.0 - lr * weight_decay).add_(update, alpha=-lr)
                self._follow(owned, part, weights, number)
                owned.main_params.write(part, weights)

    def _follow(self, owned: _Owned, part: Span, weights: Tensor, number: int) -> None:
        """Move the moving average of the weights, if there is one, after step ``number`` of a part."""
        if owned.average is not None:
            begun = max(self._averaged_since, self._step - number)
            owned.average.follow(part, weights, is_first=self._step == begun + 1)

    def _numbered_parts(self, owned: _Owned) -> Iterator[tuple[int, Span]]:
        """Parts of an owned span, each with the number of its parameters' step."""
        for begun, whole in self._begun_together(owned):
            for part in _cut(whole, _chunk_of(owned)):
                yield self._step - begun, part

    def _owned_of(self, bucket: MatrixBucket) -> Iterator[_Owned]:
        """The owned spans within that of a bucket."""
        return (each for each in self._owned if each.buffer is bucket.buffer and each.span.overlap(bucket.span))

    def _empty(self, bucket: MatrixBucket) -> Tensor:
        wide = torch.promote_types(bucket.buffer.params.dtype, torch.float32)
        return torch.empty(bucket.span.size, dtype=wide, device=bucket.buffer.params.device)

    def _parts(self, owned: _Owned, rates: _Rates, *, at_once: bool) -> Iterator[tuple[Step, Span, Tensor]]:
        """Parts of an owned span with their steps and gradient sums. ``at_once``: as large as they can be."""
        divisor, scale = rates.divisor, None
        lr, weight_decay = rates.of(owned.buffer.policy)
        if owned.wide == torch.float64:
            owned.grads.div_(divisor)  # the kernels take their scale in fp32, too coarse here
        else:
            device = owned.grads.device if owned.transfer is None else CPU
            # Filled in on the device: a copy from the host would wait for everything queued there.
            scale = torch.full((), divisor, dtype=torch.float32, device=device)
        chunks = [
            (Step(self._step - begun, lr, weight_decay, scale, owned.buffer.policy.eps_multiplier), part)
            for begun, whole in self._begun_together(owned)
            for part in _cut(whole, whole.size if owned.is_direct and at_once else _chunk_of(owned))
        ]
        for (step, part), grads in zip(chunks, owned.gradients([part for _, part in chunks])):
            yield step, part, grads

    def _begun_together(self, owned: _Owned) -> Iterator[tuple[int, Span]]:
        """The parts of an owned span whose training began at the same step, with that step; usually one."""
        if not self._trained_since:
            yield 0, Span(0, owned.span.size)
            return
        here = [(entry, part) for entry in owned.entries if (part := entry.span.overlap(owned.span))]
        starts = [(self._trained_since.get(entry.name, 0), part.start - owned.span.start) for entry, part in here]
        runs = [(begun, min(start for _, start in run)) for begun, run in groupby(starts, key=lambda each: each[0])]
        for (begun, start), (_, stop) in pairwise([*runs, (0, owned.span.size)]):
            yield begun, Span(start, stop)

    def parameter_norm(self) -> float:
        """L2 norm of the weights that the forward pass uses, over the whole model."""
        self.gather.finish()
        return self._statistics.parameter_norm()

    @torch.no_grad()
    def entries(
        self, *, fresh: Collection[str] = (), only_masters: bool = False, with_average: bool = True
    ) -> Iterator[ShardedState]:
        """What a checkpoint keeps for each weight this rank owns; loading writes into these tensors.

        ``fresh``: parameters for which only master weights are yielded, because a checkpoint has no state of them.
        ``only_masters``: for all, as for a run that loads weights but no optimizer state. ``with_average``: the moving
        average as well, if there is one.

        ``optimizer.<state>.<parameter>`` for each of the update rule's ``state_names``, and for bf16 and fp16 weights
        ``optimizer.fp32_param.<parameter>``.
        """
        for matrix in (each for bucket in self._matrices.buckets for each in bucket.owned):
            if matrix.entry.name not in fresh and not only_masters:
                yield from matrix.entries()
        for owned in self._owned:
            for entry in owned.entries:
                part = entry.span.overlap(owned.span)
                if part is None:
                    continue
                flat_range = (part.start - entry.span.start, part.stop - entry.span.start)
                for name, kept in owned.kept().items():
                    if (entry.name in fresh or only_masters) and name != "fp32_param":
                        continue
                    if name == AVERAGE and not with_average:
                        continue
                    local, after_load = kept.stored(part.moved(-owned.span.start))
                    full_name = f"optimizer.{name}.{entry.name}"
                    if part == entry.span:
                        local = local.view(entry.parameter.shape)
                        yield ShardedState(full_name, local, entry.sharding, after_load=after_load)
                    else:
                        yield ShardedState(full_name, local, entry.sharding, flat_range, after_load)

    @property
    def has_average(self) -> bool:
        """Whether the moving average of the weights has followed a step; before, it is an average of nothing."""
        return self._config.ema_decay is not None and self._step > self._averaged_since

    def averages(self) -> Iterator[ShardedState]:
        """The moving average of the weights among ``entries``."""
        return (each for each in self.entries() if each.name.startswith(AVERAGES))

    def masters(self) -> Iterator[MasterPart]:
        """The master weights that this rank updates, by parameter, in an order that depends on the layout alone."""
        for owned in self._owned:
            for entry in owned.entries:
                part = entry.span.overlap(owned.span)
                if part is not None:
                    place = part.moved(-owned.span.start)
                    stop = min(-(-place.stop // ALIGNMENT) * ALIGNMENT, owned.span.size)
                    place = Span(place.start, stop)
                    yield MasterPart(entry, part.moved(-entry.span.start), place, owned.main_params)

    def master_entries(self) -> Iterator[ShardedState]:
        """The fp32 master weights among ``entries``, for a run that loads weights but no optimizer state."""
        return self.entries(only_masters=True)

    def state_dict(self) -> dict[str, Any]:
        """Numbers that are not in ``entries``: JSON-able, the same on every rank."""
        numbers = {"step": self._step, "trained_since": self._trained_since, "loss_scaler": self._scaler.state_dict()}
        return numbers | {"averaged_since": self._averaged_since} if self.has_average else numbers

    def load_state_dict(self, state: Mapping[str, Any], *, fresh: Collection[str] = ()) -> None:
        """Continue from stored numbers; ``entries`` are loaded in place.

        ``fresh``: parameters of the whole model whose state starts from zero. Their steps are counted from here:
        without bias correction the first steps of rules like Adam would be several times too large.
        """
        self._step = int(state["step"])
        self._trained_since = (state.get("trained_since") or {}) | dict.fromkeys(sorted(fresh), self._step)
        self._averaged_since = int(state.get("averaged_since", self._step))
        self._scaler.load_state_dict(state["loss_scaler"])
