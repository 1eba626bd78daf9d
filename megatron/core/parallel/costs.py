"""What a module costs: a method beside its ``forward``, added up over the modules of a model without values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from megatron.core.parallel.context import ParallelContext


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One microbatch, as far as costs depend on it.

    ``batch``: sequences, of ``length`` tokens before ranks divide them. ``encoder_length``: tokens that cross-attention
    sees. ``has_padding``: an attention mask says which tokens are real. ``has_documents``: attention stays within
    documents. ``sees_ahead``: some queries of causal attention see keys after them. ``predicted``: the share of the
    tokens whose loss is computed. ``stream_itemsize``: bytes of an element of the residual stream.
    ``splits_backward``: the schedule computes gradients of weights later, and keeps what they
    need. ``visit``: called with each module whose costs are computed, and the microbatch it sees. ``with_unit``: adds
    what ranks gather, and sum of gradients, to the costs of a module, or of the loss that reads a weight.
    """

    context: ParallelContext
    batch: int
    length: int
    stream_itemsize: int
    encoder_length: int = 0
    has_padding: bool = False
    has_documents: bool = False
    sees_ahead: bool = False
    predicted: float = 1.0
    splits_backward: bool = False
    visit: Callable[[nn.Module, Workload], None] | None = field(default=None, compare=False, repr=False)
    with_unit: Callable[[nn.Module | Tensor, Costs], Costs] = field(default=lambda of, costs: costs, compare=False)

    @property
    def all_tokens(self) -> int:
        """Tokens of the microbatch over all ranks: FLOPs are counted for them."""
        return self.batch * self.length

    @property
    def tokens(self) -> int:
        """Tokens of this rank inside the tensor-parallel regions."""
        return self.all_tokens // self.context.mesh.size("cp")

    @property
    def rows(self) -> int:
        """Tokens of this rank outside of them: fewer with sequence parallelism."""
        return self.tokens // self.context.sequence_parts

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the model's type."""
        return self.context.dtype.itemsize

    def of_encoder(self) -> Workload:
        """The workload of modules that see the encoder's tokens."""
        return dataclasses.replace(self, length=self.encoder_length)


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch in one module.

    ``flops``: of the matrix products of a forward pass over all tensor- and context-parallel ranks, 2 for each
    multiply-add. ``kept``: bytes that this rank keeps from the forward to the backward pass. ``working``: bytes that
    this rank needs besides, at most, while it computes. ``uncounted``: classes of modules without a method ``costs``.
    ``frozen_flops``: those of ``flops`` whose weight is frozen. ``exchanged``: bytes that this rank sends to ranks with
    other experts in the forward pass, if choices are balanced; the backward pass sends as many. ``replayed``: those
    bytes of ``kept`` that recomputation keeps as well, as it must not choose them anew. ``offloaded``: bytes that are
    kept in main memory instead. ``left``: bytes that its backward pass leaves for the step, sums of gradients.
    ``gathered``: those of ``working`` that are its whole weights, which modules that are computed again together keep;
    ``ahead``: those that are weights of the module before.
    """

    flops: float = 0.0
    kept: int = 0
    working: int = 0
    uncounted: frozenset[str] = frozenset()
    frozen_flops: float = 0.0
    exchanged: int = 0
    replayed: int = 0
    offloaded: int = 0
    left: int = 0
    gathered: int = 0
    ahead: int = 0

    def __add__(self, other: Costs) -> Costs:
        """Costs of both modules, computed one after the other. The backward pass begins with the other one, and what
        that leaves is there while this one is computed.
        """
        return Costs(
            self.flops + other.flops,
            self.kept + other.kept,
            max(self.working + other.left if self.working else 0, other.working),
            self.uncounted | other.uncounted,
            self.frozen_flops + other.frozen_flops,
            self.exchanged + other.exchanged,
            self.replayed + other.replayed,
            self.offloaded + other.offloaded,
            self.left + other.left,
            self.gathered + other.gathered,
            max(self.ahead, other.ahead),
        )

    def before(self, later: Costs, *, splits_backward: bool = False) -> Costs:
        """Costs of this module and of ``later`` ones, which have freed what they kept when this one's backward pass
        runs, unless the schedule splits that pass.
        """
        freed = 0 if splits_backward else later.kept
        return dataclasses.replace(self, working=self.working - freed) + later

    @classmethod
    def of_product(cls, weight: Tensor, flops: float, *, kept: int = 0, working: int = 0) -> Costs:
        """Costs of a product with ``weight``."""
        return cls(flops, kept, working, frozen_flops=0.0 if weight.requires_grad else flops)

    def recomputed(self, given: int, *, keeps_input: bool) -> Costs:
        """Costs of this module if it keeps ``given`` bytes, its input, and computes the rest again for its backward
        pass. ``keeps_input``: whether the tensors that it keeps while computing include that input.
        """
        again = self.kept - given * keeps_input
        return dataclasses.replace(self, kept=given + self.replayed, working=self.working + again)

    @property
    def training_flops(self) -> float:
        """Model FLOPs of a forward and a backward pass, without recomputation.

        Each product of the forward pass has two in the backward pass, for the gradients of its two factors; one of
        them is missing where a factor is a frozen weight.
        """
        return 3 * self.flops - self.frozen_flops


def costs_of(module: nn.Module | None, workload: Workload) -> Costs:
    """Costs of a training step's forward pass over ``workload`` in a module and those inside it: what its method
    ``costs(workload)`` returns, else the total of its children. The class of a module is ``uncounted`` when it has
    parameters of its own and no ``costs``, or when it overrides ``forward`` and inherits ``costs``.
    """
    if module is None:
        return Costs()
    if workload.visit is not None:
        workload.visit(module, workload)
    costs: Callable[[Workload], Costs] | None = getattr(module, "costs", None)
    if costs is None:
        found, is_uncounted = total_of(module.children(), workload), any(True for _ in module.parameters(recurse=False))
    else:
        forward_in, costs_in = (
            next(place for place, each in enumerate(type(module).__mro__) if name in vars(each))
            for name in ("forward", "costs")
        )
        found, is_uncounted = costs(workload), forward_in < costs_in
    found = workload.with_unit(module, found)
    return dataclasses.replace(
        found, uncounted=found.uncounted | frozenset({type(module).__name__} if is_uncounted else ())
    )


def workloads_of(model: nn.Module, workload: Workload) -> list[tuple[nn.Module, Workload]]:
    """The modules of a model in the order of their costs, each with the microbatch as it sees it, such as a decoder its
    own length.
    """
    found = list[tuple[nn.Module, Workload]]()
    costs_of(model, dataclasses.replace(workload, visit=lambda *each: found.append(each)))
    return found


def total_of(modules: Iterable[nn.Module | None], workload: Workload) -> Costs:
    """Costs of several modules that see the same tokens, computed one after the other."""
    return sum((costs_of(module, workload) for module in modules), start=Costs())
