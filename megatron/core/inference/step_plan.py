"""What a model computes in one step of generation: integers only, so that one message carries it to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.images.prompts import PromptImages
from megatron.core.parallel.collectives import Handle

_ROW_FIELDS = 11


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One request's tokens of a step.

    ``slot``: from 0 to ``max_requests - 1``, a place for state that is not in blocks; no two unfinished requests have
    the same. ``start``: position of the first of ``tokens`` in the request's text; the cache holds all before it.
    ``blocks``: the request's block table: position ``p`` is at ``blocks[p // block_size]``. ``logits_from``: logits are
    wanted after each token from this one on; ``len(tokens)`` for none. ``encoder``: ``tokens`` are the whole encoder
    prompt of the slot's request, which has no blocks and no logits; decoder rows of the slot follow in later plans.
    ``copies``: a block whose content is copied to the one of position ``start``, before any row writes; 0 for none.
    ``drafts``: how many of the last tokens are guesses. The states of fixed size that are kept are those before them.
    ``adapter``: number of the request's adapter, 0 for none. ``images``: what stands at places of ``tokens``, and the
    tiles that it takes; None where all are words. ``prefix``: how many tokens of the text see each other both ways, all
    of which are in the row that has the first.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    logits_from: int
    encoder: bool = False
    copies: int = 0
    drafts: int = 0
    adapter: int = 0
    images: PromptImages | None = None
    prefix: int = 0

    @property
    def num_logits(self) -> int:
        """Number of tokens after which logits are wanted."""
        return len(self.tokens) - self.logits_from


@dataclass(frozen=True)
class StepPlan:
    """The rows of a step. Their tokens, side by side in this order, are one ragged flat batch.

    ``state_copies``: pairs of slots; before any row is computed, the states of fixed size in the first are copied to
    the second, pair by pair. A row that starts at 0 begins with states of zeros.
    """

    rows: tuple[PlanRow, ...]
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_logits(self) -> int:
        """Rows of logits wanted: row by row, in the order of tokens."""
        return sum(row.num_logits for row in self.rows)

    def to_array(self) -> NDArray[np.int64]:
        """The plan as one flat array: the numbers of rows and of copies; eleven numbers for each row; two for each
        copy; all tokens; all block tables; all images.
        """
        header = [len(self.rows), len(self.state_copies)]
        tokens: list[int] = []
        blocks: list[int] = []
        images = list[NDArray[np.int64]]()
        for row in self.rows:
            if row.images is not None:
                images.append(row.images.to_array())
            counts = (len(row.tokens), len(row.blocks), 0 if row.images is None else len(images[-1]))
            header += (
                row.slot,
                row.start,
                row.logits_from,
                int(row.encoder),
                row.copies,
                row.drafts,
                row.adapter,
                row.prefix,
                *counts,
            )
            tokens += row.tokens
            blocks += row.blocks
        copies = [slot for pair in self.state_copies for slot in pair]
        return np.concatenate([np.array(header + copies + tokens + blocks, dtype=np.int64), *images])

    @classmethod
    def from_array(cls, array: NDArray[np.int64]) -> StepPlan:
        """The plan that ``to_array`` wrote."""
        first = 2 + _ROW_FIELDS * int(array[0])
        counts = array[2:first].reshape(-1, _ROW_FIELDS)[:, 8:]
        length = first + 2 * int(array[1]) + int(counts[:, :2].sum())  # of all but images, which stay an array
        numbers: list[int] = array[:length].tolist()
        image_ends = list(accumulate(counts[:, 2].tolist(), initial=length))
        ends = range(2, _ROW_FIELDS * numbers[0] + 3, _ROW_FIELDS)
        fields = [numbers[start : start + _ROW_FIELDS] for start in ends[:-1]]
        slots = numbers[ends[-1] : ends[-1] + 2 * numbers[1]]
        token_ends = list(accumulate((row[8] for row in fields), initial=ends[-1] + len(slots)))
        block_ends = list(accumulate((row[9] for row in fields), initial=token_ends[-1]))
        return cls(
            tuple(
                PlanRow(
                    slot=slot,
                    start=start,
                    tokens=tuple(numbers[token_ends[number] : token_ends[number + 1]]),
                    blocks=tuple(numbers[block_ends[number] : block_ends[number + 1]]),
                    logits_from=logits_from,
                    encoder=bool(encoder),
                    copies=copies,
                    drafts=drafts,
                    adapter=adapter,
                    prefix=prefix,
                    images=PromptImages.from_array(array[image_ends[number] : image_ends[number + 1]])
                    if held
                    else None,
                )
                for number, (
                    slot,
                    start,
                    logits_from,
                    encoder,
                    copies,
                    drafts,
                    adapter,
                    prefix,
                    _,
                    _,
                    held,
                ) in enumerate(fields)
            ),
            tuple(zip(slots[::2], slots[1::2])),
        )


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """What a runner has room for.

    ``num_blocks`` of ``block_size`` tokens each, of which block 0 is a dummy that no request is given.
    ``max_requests``: slots. ``max_length``: tokens of a text, prompt included; ``max_encoder_length``: of an encoder
    prompt, 0 for a model without encoder. ``vocabulary``: ids, and columns of the logits. ``has_states``: whether
    layers of the model have states of a fixed size, which are in slots; ``num_snapshots``: slots after those of
    requests, for states at the end of a prefix that others may use again. ``num_adapters``: how many the model has.
    ``image_shape``: height and width of tiles, and features of each, for a model that reads images.
    ``joint_attention``: what its places see of later ones, as ``--image-attention`` says.
    """

    num_blocks: int
    block_size: int
    max_requests: int
    max_length: int
    vocabulary: int
    max_encoder_length: int = 0
    has_states: bool = False
    num_snapshots: int = 0
    num_adapters: int = 0
    image_shape: tuple[int, int, int] | None = None
    joint_attention: str = "causal"

    @property
    def num_slots(self) -> int:
        """Slots of states: of requests, then of snapshots."""
        return self.max_requests + self.num_snapshots


class ModelStage(Protocol):
    """A rank's part of a model and of the cache: all layers, or those of a pipeline stage.

    ``logits_dtype``: of the last stage's result. ``device``: of all tensors.
    """

    limits: RunnerLimits
    logits_dtype: torch.dtype
    device: torch.device

    def buffers(self, plan: StepPlan) -> list[Tensor]:
        """Empty tensors for what the stage before hands on; none on the first stage."""
        ...

    def run(self, plan: StepPlan, received: Sequence[Tensor]) -> list[Tensor]:
        """Compute a plan: what is handed to the next stage; on the last one ``[logits]``,
        ``[plan.num_logits, vocabulary]`` on all tensor-parallel ranks.
        """
        ...


@dataclass(frozen=True)
class RunningStep:
    """A plan that a runner has begun. ``result``: of the last stage."""

    result: Handle[Sequence[Tensor]]

    def logits(self) -> Tensor:
        """Wait for the step; ``[plan.num_logits, vocabulary]``, fp32, or fp64 for a fp64 model."""
        return self.result.wait()[0].cpu()


class ModelRunner(Protocol):
    """Computes plans in the order in which they come.

    ``depth``: how many plans should be in flight to keep every pipeline stage busy; 1 without a pipeline.
    """

    limits: RunnerLimits
    depth: int

    @property
    def failure(self) -> Exception | None:
        """Why no plan can be started any more, such as a lost rank; None while all is well."""
        ...

    def start(self, plan: StepPlan) -> RunningStep:
        """Begin a step. Keys and values that it writes are there for every plan that is started after it."""
        ...

    def close(self) -> None:
        """No more plans: other ranks stop waiting for them."""
        ...
