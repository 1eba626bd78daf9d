"""The outer step: every few steps, the mean of what workers have learned moves the weights that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config.diloco import DilocoConfig
from megatron.core.diloco.mean import WorkersMean
from megatron.core.diloco.wire import WIRES
from megatron.core.optimizer.optimizer import MasterPart, Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState


@dataclass(eq=False)
class _Shared:
    """What the workers share of a part of a parameter: the weights, the outer momentum, and, from its arrival to the
    outer step, the workers' mean weights.
    """

    master: MasterPart
    weights: Tensor
    velocity: Tensor
    mean: Tensor | None = None

    @classmethod
    def of(cls, master: MasterPart) -> _Shared:
        weights = master.read().clone()
        return cls(master, weights, torch.zeros_like(weights))


def fragment_of(name: str, fragments: int) -> int:
    """The fragment of a parameter: layers are dealt to fragments in turn; the last has what is outside of layers."""
    layer = next((int(word) for word in name.split(".") if word.isdigit()), None)
    return fragments - 1 if layer is None else layer % fragments


class OuterStep:
    """Gradient descent with Nesterov momentum on the shared weights, along their mean difference to the workers'.

    ``after_step`` is to be called after each inner step, before the weights are gathered: what a rank owns it exchanges
    with its counterparts of other workers alone. A fragment is sent in step ``offset`` of every interval, and applied
    ``diloco_overlap_steps`` later, when it has arrived.
    """

    def __init__(self, optimizer: Optimizer, config: DilocoConfig, context: ParallelContext) -> None:
        self._config, self._context = config, context
        self._fragments: list[list[_Shared]] = [[] for _ in range(config.diloco_fragments)]
        for master in optimizer.masters():
            self._fragments[fragment_of(master.entry.name, config.diloco_fragments)].append(_Shared.of(master))
        self._steps = 0
        self._coming: dict[int, WorkersMean] = {}
        self._arrived: set[int] = set()
        self.is_resumed = False

    @property
    def _all(self) -> Iterator[_Shared]:
        return (each for fragment in self._fragments for each in fragment)

    @torch.no_grad()
    def after_step(self) -> bool:
        """Send and apply what is due after one more step of this worker; whether its weights have changed. A collective
        of the workers.
        """
        self._steps += 1
        overlap, changed = self._config.diloco_overlap_steps, False
        for number in range(len(self._fragments)):
            if self._is_sent_at(self._steps, number):
                self._send(number)
            if number in self._coming and self._is_sent_at(self._steps - (overlap + 1) // 2, number):
                self._coming[number].advance()
            if self._is_sent_at(self._steps - overlap, number) and (number in self._coming or number in self._arrived):
                self._receive(number)
                self._apply(self._fragments[number])
                self._arrived.discard(number)
                changed = True
        return changed

    def _is_sent_at(self, step: int, number: int) -> bool:
        return step > 0 and (step - self._config.offset(number)) % self._config.diloco_sync_interval == 0

    def _send(self, number: int) -> None:
        fragment = self._fragments[number]
        if self._context.mesh.size("dc") == 1:  # the mean of one is its own, and nothing rounds it
            for each in fragment:
                each.mean = each.master.read().clone()
            self._arrived.add(number)
        elif fragment:
            device = self._context.device
            differences = [(each.weights - each.master.read()).to(device) for each in fragment]
            wire = WIRES[self._config.diloco_dtype]
            self._coming[number] = WorkersMean(torch.cat(differences), self._context.mesh, wire)

    def _receive(self, number: int) -> None:
        """Wait for a fragment that is on its way, if it is."""
        if number not in self._coming:
            return
        fragment, mean = self._fragments[number], self._coming.pop(number).wait()
        for each, difference in zip(fragment, torch.split(mean, [len(each.weights) for each in fragment])):
            each.mean = each.weights - difference.to(each.weights.device)
        self._arrived.add(number)

    def _apply(self, fragment: Sequence[_Shared]) -> None:
        """From weights w with difference d to the mean: v = mu v + d, w = w - lr (d + mu v), written from the mean on,
        so that the plain mean (lr 1, mu 0) is not rounded.
        """
        lr, momentum, own = self._config.diloco_outer_lr, self._config.diloco_outer_momentum, self._config.mixing
        for each in fragment:
            assert each.mean is not None, "a fragment is applied when it has arrived"
            difference, moved, each.mean = each.weights - each.mean, each.mean, None
            each.velocity.mul_(momentum).add_(difference)
            if lr != 1.0:
                moved.add_(difference, alpha=1.0 - lr)
            if momentum:
                moved.sub_(each.velocity, alpha=lr * momentum)
            each.weights.copy_(moved)
            weights = each.master.read()
            if own:
                weights.mul_(own).add_(each.weights, alpha=1.0 - own)
            else:
                weights.copy_(each.weights)
            each.master.write(weights)

    @torch.no_grad()
    def start_anew(self, names: Collection[str] | None = None) -> None:
        """Share the weights that this worker has now, of all parameters or those of ``names``, without momentum."""
        for each in self._all:
            if names is None or each.master.entry.name in names:
                each.weights.copy_(each.master.read())
                each.velocity.zero_()

    def entries(self, *, fresh: Collection[str] = ()) -> Iterator[ShardedState]:
        """What a checkpoint keeps beside the workers' states; loading writes into it. ``fresh``: parameters without.

        ``diloco.theta.<parameter>``, ``diloco.velocity.<parameter>``, and ``diloco.mean.<parameter>`` of fragments
        whose outer step is still to be applied. A collective of the workers.
        """
        for number, fragment in enumerate(self._fragments):
            self._receive(number)
            for each in fragment:
                if each.master.entry.name in fresh:
                    continue
                yield each.master.state("diloco.theta", each.weights)
                yield each.master.state("diloco.velocity", each.velocity)
                if number in self._arrived:
                    each.mean = torch.empty_like(each.weights) if each.mean is None else each.mean
                    yield each.master.state("diloco.mean", each.mean)

    def state_dict(self) -> dict[str, int]:
        """Numbers that are not in ``entries``, the same on all ranks."""
        config = self._config
        return {
            "steps": self._steps,
            "workers": self._context.mesh.size("dc"),
            "interval": config.diloco_sync_interval,
            "fragments": config.diloco_fragments,
            "overlap": config.diloco_overlap_steps,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from stored numbers; ``entries`` are those to load then.

        With other settings a fragment that was on its way is sent again, with what has been learned since, when its
        turn comes: until it is applied, the shared weights know nothing of it.
        """
        self._steps, self.is_resumed = int(state["steps"]), True
        now = self.state_dict()
        if any(state.get(name) != now[name] for name in ("interval", "fragments", "overlap")):
            return
        ages = range(self._config.diloco_overlap_steps)
        self._arrived = {
            number
            for number in range(len(self._fragments))
            if any(self._is_sent_at(self._steps - age, number) for age in ages)
        }
