"""What a model is built with: facts about the rank, and the services that its layers share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from typing_extensions import override

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.operands import Operands
from megatron.core.parallel.products import Products
from megatron.core.parallel.weight_gradients import WeightGradients


@dataclass(frozen=True, kw_only=True)
class ModelContext(ParallelContext):
    """A rank, and the services of the model that is built on it, which have a state of their own.

    ``weight_gradients``: when gradients of weights are computed, and where they are added up. ``low_precision``: which
    layers multiply in 8 bits. ``products``: how passes of generation multiply. ``operands``: what layers multiply in
    place of weights and inputs. The defaults are those of a model in one type whose backward pass does everything at
    once. ``layer``: number of the layer that is being built, if any.
    """

    weight_gradients: WeightGradients = field(default_factory=WeightGradients, compare=False)
    low_precision: LowPrecision = field(default_factory=LowPrecision, compare=False)
    products: Products = field(default_factory=Products, compare=False)
    operands: Operands = field(default_factory=Operands, compare=False)
    layer: int | None = field(default=None, compare=False)

    @classmethod
    def on(
        cls,
        rank: ParallelContext,
        *,
        weight_gradients: WeightGradients,
        low_precision: LowPrecision,
        products: Products,
        operands: Operands | None = None,
    ) -> ModelContext:
        """The context of a model with these services on a rank."""
        facts = {each.name: getattr(rank, each.name) for each in fields(ParallelContext)}
        return cls(
            **facts,
            weight_gradients=weight_gradients,
            low_precision=low_precision,
            products=products,
            operands=operands or Operands(),
        )

    @classmethod
    def plain(cls, rank: ParallelContext) -> ModelContext:
        """The context of a model that isn't trained by a run, or trained plainly."""
        return cls.on(rank, weight_gradients=WeightGradients(), low_precision=LowPrecision(), products=Products())

    def in_layer(self, number: int | None) -> ModelContext:
        """The context for parts of layer ``number`` of the whole model; None: for parts that belong to no layer."""
        return replace(self, layer=number)

    def of_whole_sequences(self) -> ModelContext:
        """The context of a part of the model in which every rank has whole sequences, as of images, whatever divides
        those of the decoder. Its products are in the model's type.
        """
        return replace(
            self,
            mesh=self.mesh.of_whole_sequences(),
            sequence_parallel=False,
            low_precision=LowPrecision(),
            operands=Operands(),
        )

    @property
    @override
    def splits_sequence(self) -> bool:
        """Whether hidden states of the running pass are this rank's part of the sequence. In generation, whose few
        tokens can't be divided, every rank has all of them: the weights are the same.
        """
        return self.sequence_parallel and not self.products.in_generation

    @property
    def replaces_operands(self) -> bool:
        """Whether products of the layer that this context belongs to ask ``operands`` what they multiply."""
        return self.operands.replaces and self.layer is not None

    @property
    def keeps_bytes(self) -> bool:
        """Whether linear layers that are built with this context keep copies of their inputs in 8 bits."""
        return self.low_precision.serves(self.layer) and self.low_precision.settings.fp8_wgrad
