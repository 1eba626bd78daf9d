"""One update of the weights from gradient sums: norm, skip or clip, step, and a gather of the weights.

A replicated optimizer and a sharded one (ZeRO 1) are the same code: each owns spans of the buffers, the replicated one
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import FlatBuffer, ParamEntry, Span
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.optimizer.grad_norm import ModelStatistics
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.update_rules import Step, build_update_rule
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState

_WIDE = (torch.float32, torch.float64)
_CONVERSION_CHUNK = 1 << 22


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
class _Owned:
    """A span of a buffer that this rank updates: master weights, gradients and the update rule's state for it.

    ``main_params`` is a view of the buffer where that is wide enough, and own memory for bf16 and fp16.
    """

    buffer: FlatBuffer
    span: Span
    entries: tuple[ParamEntry, ...]
    main_params: Tensor
    state: list[Tensor]

    @property
    def has_own_masters(self) -> bool:
        return self.main_params.dtype != self.buffer.params.dtype


class Optimizer:
    """AdamW or SGD over flat buffers.

    ``sharded``: own only this rank's shard of every bucket and gather the weights after each update.
    ``count_zeros``: report zero gradients with every update. ``frozen``: see ``ModelStatistics``.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        context: ParallelContext,
        *,
        sharded: bool,
        count_zeros: bool = False,
        frozen: Sequence[Tensor] = (),
    ) -> None:
        self._clip_grad = config.clip_grad
        self._count_zeros = count_zeros
        self._rule = build_update_rule(config)
        self._scaler = build_loss_scaler(precision)
        self._statistics = ModelStatistics(buffers, context, frozen=frozen)
        self._owned = []
        for buffer in buffers:
            for bucket in buffer.buckets:
                span = buffer.shard(bucket) if sharded else bucket.span
                weights = span.of(buffer.params)
                main_params = weights if weights.dtype in _WIDE else weights.float()
                state = [torch.zeros_like(main_params) for _ in self._rule.state_names]
                self._owned.append(_Owned(buffer, span, bucket.entries, main_params, state))
        self._step = 0
        self._trained_since: dict[str, int] = {}
        self._seed_divisor = 1.0
        self.gather = ParamGather(buffers if sharded else [], context)

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
    def update(
        self, *, count: float, lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> UpdateResult:
        """Take one step from gradient sums over ``count`` tokens; zero means that all tokens were masked.

        The policies of the buffers decide on weight decay and learning rate. All ranks call this together, after
        ``GradSync.finish``.
        """
        self.gather.finish()
        sums = self._statistics.gradients(count_zeros=self._count_zeros)
        divisor = (count or 1.0) * self.backward_scale
        grad_norm = sums.norm / divisor
        overflow = not math.isfinite(sums.norm)
        self._scaler.update(overflow=overflow)
        if overflow:
            return UpdateResult(grad_norm, skipped=True, num_zeros=sums.num_zeros)
        clip = self._clip_grad / (grad_norm + 1e-6) if self._clip_grad > 0 else 1.0
        self._step += 1
        for owned in self._owned:
            policy = owned.buffer.policy
            rate = decoupled_lr if policy.is_decoupled and decoupled_lr is not None else lr
            decay = weight_decay if policy.decays else 0.0
            self._move(owned, divisor / min(clip, 1.0), lr=rate, weight_decay=decay)
        self.gather.start()
        return UpdateResult(grad_norm, skipped=False, num_zeros=sums.num_zeros)

    def _move(self, owned: _Owned, divisor: float, *, lr: float, weight_decay: float) -> None:
        """Step on one span; dividing the gradients costs no pass of its own."""
        gradients = owned.span.of(owned.buffer.grads)
        direct = gradients.dtype == owned.main_params.dtype
        scale: Tensor | None = torch.tensor(divisor, dtype=torch.float32, device=owned.main_params.device)
        if owned.main_params.dtype == torch.float64:
            gradients.div_(divisor)  # the kernels take their scale in fp32, too coarse here
            scale = None
        for begun, whole in self._begun_together(owned):
            step = Step(self._step - begun, lr, weight_decay, scale)
            chunk = whole.size if direct else _CONVERSION_CHUNK
            for start in range(whole.start, whole.stop, chunk):
                part = Span(start, min(start + chunk, whole.stop))
                grads = part.of(gradients).to(owned.main_params.dtype)
                self._rule.apply(part.of(owned.main_params), grads, [part.of(tensor) for tensor in owned.state], step)
        if owned.has_own_masters:
            owned.span.of(owned.buffer.params).copy_(owned.main_params)

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

    def entries(self, *, fresh: Collection[str] = ()) -> Iterator[ShardedState]:
        """What a checkpoint keeps for each weight this rank owns; loading writes into these tensors.

        ``fresh``: parameters for which only master weights are yielded, because a checkpoint has no state of them.

        ``optimizer.exp_avg.<parameter>`` and ``optimizer.exp_avg_sq.<parameter>`` for Adam,
        ``optimizer.momentum.<parameter>`` for SGD, and for bf16 and fp16 weights ``optimizer.fp32_param.<parameter>``.
        """
        for owned in self._owned:
            tensors = dict(zip(self._rule.state_names, owned.state))
            if owned.has_own_masters:
                tensors["fp32_param"] = owned.main_params
            for entry in owned.entries:
                part = entry.span.overlap(owned.span)
                if part is None:
                    continue
                flat_range = (part.start - entry.span.start, part.stop - entry.span.start)
                for name, tensor in tensors.items():
                    if entry.name in fresh and name != "fp32_param":
                        continue
                    local = part.moved(-owned.span.start).of(tensor)
                    full_name = f"optimizer.{name}.{entry.name}"
                    if part == entry.span:
                        yield ShardedState(full_name, local.view(entry.parameter.shape), entry.sharding)
                    else:
                        yield ShardedState(full_name, local, entry.sharding, flat_range)

    def master_entries(self) -> Iterator[ShardedState]:
        """The fp32 master weights among ``entries``, for a run that loads weights but no optimizer state."""
        return (entry for entry in self.entries() if entry.name.startswith("optimizer.fp32_param."))

    def state_dict(self) -> dict[str, Any]:
        """Numbers that are not in ``entries``: JSON-able, the same on every rank."""
        return {"step": self._step, "trained_since": self._trained_since, "loss_scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, fresh: Collection[str] = ()) -> None:
        """Continue from stored numbers; ``entries`` are loaded in place.

        ``fresh``: parameters of the whole model whose state starts from zero. Their steps are counted from here:
        without bias correction Adam's first steps would be several times too large.
        """
        self._step = int(state["step"])
        self._trained_since = state.get("trained_since", {}) | dict.fromkeys(sorted(fresh), self._step)
        self._scaler.load_state_dict(state["loss_scaler"])
