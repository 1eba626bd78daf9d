"""How much each part of a model matters to texts, from what activations are in forward passes.

Of a sequence the mean magnitude over its tokens is taken, of all sequences the L2 norm (arXiv:2407.14679, section 2.2).
Each sequence is read alone, and its numbers have a row of their own until all are there: any number of ranks finds the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from typing_extensions import override

from megatron.core.conversion.layer_by_layer import stage_of_layer
from megatron.core.conversion.portable import PortableModel, layers_of
from megatron.core.models.gpt.pruning.units import Unit, units_of
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import WORLD
from megatron.core.parallel.operands import Grouping, Operands
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Importance:
    """Scores, fp64; what has the larger one matters more.

    ``channels`` [h]: of hidden states, as branches and the output layer read them. ``layers`` [layers]: block
    influence, 1 - cosine of a layer's input and output (arXiv:2403.03853). ``units``: by ``Unit.key``, [count], and
    [experts, count] for neurons of experts. ``loss``: cross entropy of the texts, per token.
    """

    channels: Tensor
    layers: Tensor
    units: Mapping[tuple[str, str], Tensor]
    loss: float


@torch.no_grad()
def importance_of(
    portable: PortableModel, tokens: Tensor, *, context: ParallelContext, say: Callable[[str], None] = lambda line: None
) -> Importance:
    """Scores of a model on ``tokens`` [samples, length], which ranks divide. A collective.

    One layer is in memory at a time, in fp32. ``say`` takes lines about progress. Raises CheckpointError where
    activations are not finite.
    """
    mesh, device, count = context.mesh, context.device, layers_of(portable.model, portable.groups)
    mine = range(mesh.world_rank, len(tokens), mesh.world_size)
    handed: dict[int, Tensor | None] = dict.fromkeys(mine)
    channels = torch.zeros(portable.model.hidden_size, dtype=torch.float64)
    layers, units = list[Tensor](), dict[tuple[str, str], Tensor]()
    losses = torch.zeros(len(tokens), dtype=torch.float64, device=device)
    for number in range(count):
        observer = _Observer(tokens.shape, portable.model.hidden_size, device)
        stage = stage_of_layer(portable, number, device=device, operands=observer)
        observer.watch(stage, [*units_of(stage, portable.model)])
        for row in mine:
            text, observer.row = tokens[row : row + 1].to(device), row
            output = stage(text, hidden=handed[row])
            if isinstance(output, VocabularyOutput):
                losses[row] = output.token_losses(text.roll(-1, dims=1))[:, :-1].double().mean()
            else:
                handed[row] = output
        observer.agree(context)
        channels += observer.channels()
        layers.append(observer.influence.mean().cpu())
        units |= (of_layer := observer.scores())
        if not all(each.isfinite().all() for each in (channels, layers[-1], *of_layer.values())):
            raise CheckpointError(
                f"activations of layer {number + 1} are not finite on these texts, so nothing tells what matters less: "
                "give a checkpoint whose weights are all finite, such as an earlier one"
            )
        say(f"layer {number + 1} of {count} is measured")
    loss = all_reduce(losses, mesh, *WORLD).mean().item()
    return Importance(channels, torch.stack(layers), units, loss)


def nothing_measured(portable: PortableModel) -> Importance:
    """Equal scores for all parts, without texts: for a choice that is the user's."""
    layers = torch.ones(layers_of(portable.model, portable.groups), dtype=torch.float64)
    return Importance(torch.ones(portable.model.hidden_size, dtype=torch.float64), layers, {}, float("nan"))


class _Observer(Operands):
    """Hands products their operands as they are, and keeps what it sees in tables with a ``row`` for each sequence.

    ``shape``: sequences, and tokens of each. ``width``: of hidden states.
    """

    replaces = True

    def __init__(self, shape: Sequence[int], width: int, device: torch.device) -> None:
        (self._samples, self._length), self._width, self._device, self.row = shape, width, device, 0
        self._units = dict[Tensor, list[Unit]]()
        self._of_units, self._of_channels = dict[tuple[str, str], Tensor](), list[Tensor]()
        self.influence = self._table()

    def _table(self, *shape: int) -> Tensor:
        return torch.zeros(self._samples, *shape, dtype=torch.float64, device=self._device)

    def watch(self, stage: nn.Module, units: Sequence[Unit]) -> None:
        """Watch the layer in ``stage`` from now on: its ``units``, what its branches read, and what it changes."""
        weights = dict(stage.named_parameters())
        for unit in units:
            weight = weights[unit.read_by]
            self._units.setdefault(weight, []).append(unit)
            of_experts = (len(weight),) if unit.kind == "neurons of experts" else ()
            self._of_units[unit.key] = self._table(*of_experts, unit.count * unit.width)
        for name, module in stage.named_modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(self._note_influence)
                for branch in module.branches:
                    self._note_channels(getattr(module, branch.name))
            elif name.endswith("final_layernorm"):
                self._note_channels(module, result=True)

    def _note_channels(self, module: nn.Module, *, result: bool = False) -> None:
        """Note what a module reads, or its ``result``: hidden states [s, b, h]."""
        table = self._table(self._width)
        self._of_channels.append(table)

        def note(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            table[self.row] += _magnitudes(output if result else given[0]) / self._length

        module.register_forward_hook(note)

    def _note_influence(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        alike = cosine_similarity(given[0].double(), output.double(), dim=-1)
        self.influence[self.row] += 1.0 - alike.mean()

    @override
    def rows(self, rows: Tensor, weight: Tensor, grouping: Grouping | None = None) -> Tensor:
        """``rows`` themselves."""
        for unit in self._units.get(weight, ()):
            found, of_row = self._of_units[unit.key], list[Tensor]()
            if grouping is None:
                found[self.row] += _magnitudes(rows) / self._length
                continue
            for expert, part in enumerate(grouping.parts(rows.detach())):
                if unit.kind == "experts":
                    of_row.append(torch.linalg.vector_norm(part @ weight[expert].t(), dim=-1).double().sum())
                else:
                    of_row.append(_magnitudes(part))
            found[self.row] += torch.stack(of_row) / self._length
        return rows

    def agree(self, context: ParallelContext) -> None:
        """Gather the rows of all ranks. A collective."""
        for table in (self.influence, *self._of_channels, *self._of_units.values()):
            all_reduce(table, context.mesh, *WORLD)

    def channels(self) -> Tensor:
        """Scores of the channels of hidden states, added up over all that reads them."""
        return sum((torch.linalg.vector_norm(table, dim=0) for table in self._of_channels), torch.zeros(())).cpu()

    def scores(self) -> dict[tuple[str, str], Tensor]:
        """Scores of the units, those of inputs that belong to one together."""
        widths = {unit.key: unit.width for units in self._units.values() for unit in units}
        norms = {key: torch.linalg.vector_norm(table, dim=0).cpu() for key, table in self._of_units.items()}
        return {
            key: torch.linalg.vector_norm(each.unflatten(-1, (-1, widths[key])), dim=-1) for key, each in norms.items()
        }


def _magnitudes(rows: Tensor) -> Tensor:
    """Sums [width] of magnitudes over the rows of [..., width]."""
    return rows.detach().double().abs().flatten(0, -2).sum(0)
