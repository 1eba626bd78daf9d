"""States of fixed size, such as a recurrence's: one slot for each text, and how a step's rows go on from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.inference.step_plan import PlanRow
from megatron.core.ops.text_cache import Advance, Slotted, States


class StateTables:
    """States of every text by layer and name, ``[slots, *shape]``."""

    def __init__(self, layers: Mapping[int, Slotted], *, slots: int, device: torch.device) -> None:
        self.device = device
        self.tables = {
            layer: {
                name: torch.zeros(slots, *shape, dtype=state.dtypes[name], device=device)
                for name, shape in state.shapes.items()
            }
            for layer, state in layers.items()
        }

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(table.nbytes for table in self._all())

    def copy(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy states from the first slot of each pair to the second, pair by pair."""
        for source, target in slots:
            for table in self._all():
                table[target] = table[source]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the states of texts that begin."""
        if not slots or not self.tables:
            return
        index = torch.tensor(slots, device=self.device)
        for table in self._all():
            table.index_fill_(0, index, 0)

    def read(self, layer: int, slots: slice | Tensor) -> list[Tensor]:
        """States of ``slots``: views of the tables, or copies."""
        return [table[slots] for table in self.tables[layer].values()]

    def write(self, layer: int, slots: slice | Tensor, states: Sequence[Tensor]) -> None:
        """Keep states, which may be what ``read`` returned, changed in place, or parts of it in another order."""
        tables = [*self.tables[layer].values()]
        own = {table.untyped_storage().data_ptr() for table in tables}
        changed = list[tuple[Tensor, Tensor]]()
        for table, state in zip(tables, states, strict=True):
            if state.untyped_storage().data_ptr() in own:
                if state.data_ptr() == table[slots].data_ptr() and state.stride() == table.stride():
                    continue  # changed in place
                state = state.clone()
            changed.append((table, state))
        for table, state in changed:
            table[slots] = state.to(table.dtype)

    def _all(self) -> list[Tensor]:
        return [table for tables in self.tables.values() for table in tables.values()]


@dataclass(frozen=True)
class RowGroup:
    """Parts of rows of a step that advance together, because they have as many tokens as each other.

    ``tokens``: places of their tokens in the step, part by part. ``length``: of each part. ``slots``: of their texts.
    ``is_kept``: whether the states behind them are, as they are not behind drafts. ``one_by_one``: whether each token
    is computed alone.
    """

    tokens: slice | Tensor
    length: int
    slots: slice | Tensor
    is_kept: bool = True
    one_by_one: bool = False

    def inputs(self, tensor: Tensor) -> Tensor:
        """The group's part ``[length, rows, …]`` of ``[tokens, 1, …]``."""
        mine = tensor[self.tokens, 0]
        return mine.view(-1, self.length, *mine.shape[1:]).transpose(0, 1)


def groups_of(rows: Sequence[PlanRow], *, one_by_one: bool, device: torch.device) -> list[RowGroup]:
    """The groups of a step, in the order in which they are computed: drafts after what comes before them.

    ``one_by_one``: each token of each text alone, so that bits depend neither on the batch nor on how texts are cut.
    """
    members: dict[tuple[bool, int, int], list[tuple[int, int]]] = {}  # first token and slot of each part
    first = 0
    for number, row in enumerate(rows):
        alone = number if one_by_one else -1
        for is_draft, length in ((False, len(row.tokens) - row.drafts), (True, row.drafts)):
            if length:
                members.setdefault((is_draft, length, alone), []).append((first, row.slot))
                first += length
    groups = list[RowGroup]()
    for (is_draft, length, _), found in sorted(members.items(), key=lambda each: each[0][0]):
        tokens = [first + number for first, _ in found for number in range(length)]
        slots = [slot for _, slot in found]
        index = (_slice_or_index(tokens, device), length, _slice_or_index(slots, device))
        groups.append(RowGroup(*index, is_kept=not is_draft, one_by_one=one_by_one and length > 1))
    return groups


@dataclass(frozen=True)
class StateAccess:
    """How a layer's states are read and kept: functions of a group's number, for tensors in the order of ``names``."""

    names: tuple[str, ...]
    read: Callable[[int], Sequence[Tensor]]
    write: Callable[..., None]


def advanced(groups: Sequence[RowGroup], advance: Advance, inputs: Sequence[Tensor], access: StateAccess) -> Tensor:
    """The outputs ``[tokens, 1, …]`` of a layer for a step's ``inputs``."""
    result: Tensor | None = None
    for number, group in enumerate(groups):
        states: States = dict(zip(access.names, access.read(number)))
        mine = [group.inputs(each) for each in inputs]
        if group.one_by_one:
            parts = list[Tensor]()
            for token in range(group.length):
                part, after = advance(states, *(each[token : token + 1] for each in mine))
                parts.append(part)
                states = {name: state.to(states[name].dtype) for name, state in after.items()}  # as if kept
            outputs = torch.cat(parts)
        else:
            outputs, states = advance(states, *mine)
        assert {*states} == {*access.names}, f"a layer declares states {[*access.names]} and returns {[*states]}"
        access.write(number, *(states[name] for name in access.names))
        flat = outputs.transpose(0, 1).flatten(0, 1)
        if len(groups) == 1:
            return flat.unsqueeze(1)
        if result is None:
            result = flat.new_empty(len(inputs[0]), *flat.shape[1:])
        result[group.tokens] = flat
    assert result is not None, "a step has tokens"
    return result.unsqueeze(1)


def _slice_or_index(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return torch.tensor(numbers, device=device)
