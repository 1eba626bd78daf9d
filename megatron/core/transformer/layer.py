"""One transformer layer: residual branches, one after the other or in parallel."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.training import RecomputeModule
from megatron.core.ops.dropout import dropout
from megatron.core.ops.text_cache import TextState, text_state_of
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import recomputed, with_recomputed_inputs
from megatron.core.tensor_parallel.low_rank import Adaptable
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import LayerScale, Norm
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import Branch, StackConfig


class TransformerLayer(nn.Module):
    """Adds each of its branches, such as attention and MLP, to the residual stream (see ``Branch``). ``number``: of the
    layer in its stack.

    With ``--apply-residual-connection-post-layernorm`` a branch is added to ``norm(x)``. The norm at the start of
    such a layer is as well the norm at the end of the one before, so a stack of them and a final norm are the original
    post-norm transformer (arXiv:1706.03762, arXiv:1810.04805), weight for weight.
    """

    def __init__(
        self,
        stack: StackConfig,
        context: ModelContext,
        *,
        number: int,
        recompute: frozenset[RecomputeModule] = frozenset(),
    ) -> None:
        super().__init__()
        model = stack.model
        self._context, self._branches, self.number = context, stack.layer(number), stack.first + number
        self._hidden_size, self._dropout = model.hidden_size, model.hidden_dropout
        self._post_norm = model.apply_residual_connection_post_layernorm
        names = [branch.name for branch in self._branches]
        names += [
            name
            for each in self._branches
            for name in (each.norm_after, each.layer_scale, not each.parallel and each.norm)
            if name
        ]
        assert len({*names}) == len(names), f"modules of a layer need different names, not {names}"
        self._recomputed = {branch.name for branch in self._branches if branch.recompute_name in recompute}
        inside = context.in_layer(self.number)
        self._copies = inside.keeps_bytes
        self._discards_normed = "layernorm" in recompute and not self._post_norm and not self._copies
        place = BranchPlace(stack, inside, self.number, recompute)
        for branch in self._branches:
            for name in (branch.norm, branch.norm_after):
                if name is not None and name not in self._modules:
                    self.add_module(name, Norm(model.hidden_size, model, context))
            self.add_module(branch.name, branch.build(place))
            if branch.layer_scale is not None:
                self.add_module(branch.layer_scale, LayerScale(model.hidden_size, context))
        if stack.lora.is_on:
            self._add_adapters(stack.lora)

    def _add_adapters(self, settings: LoraConfig) -> None:
        """Low-rank adapters beside the linear layers that the settings name."""
        for name, module in list(self.named_modules()):
            parts = settings.parts_of(name.rpartition(".")[2])
            if parts is not None and isinstance(module, Adaptable):
                module.adapt(settings, f"layer {self.number} {name}", parts)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        stream, normed = x, dict[str, Tensor]()
        for branch in self._branches:
            if not branch.parallel:
                stream, normed = x, {}
            if branch.norm is not None and self._discards_normed and self.training:
                output = self._run_from_stream(branch, stream, inputs)
            else:
                if branch.norm is None:
                    branch_input = stream.to(self._context.dtype)
                else:
                    if branch.norm not in normed:
                        normed[branch.norm] = getattr(self, branch.norm)(stream)
                    branch_input = normed[branch.norm]
                    if self._post_norm and not branch.parallel:
                        x = branch_input.to(x.dtype)  # the type of the residual stream
                output = self._run(branch, branch_input, inputs)
            if branch.norm_after is not None:
                output = getattr(self, branch.norm_after)(output)
            if branch.layer_scale is not None:
                output = getattr(self, branch.layer_scale)(output)
            if branch.scale != 1.0:
                output = output * branch.scale
            if self.training and self._dropout > 0.0:
                self._context.rng.enter(inputs.rng_key, f"layer {self.number} {branch.dropout_stream}")
                output = dropout(output, self._dropout, self._context.hidden_generator)
            x = x + output
        return x

    def _run(self, branch: Branch, branch_input: Tensor, inputs: LayerInputs) -> Tensor:
        module = getattr(self, branch.name)
        if branch.name in self._recomputed and self.training:
            return recomputed(self._compute, branch_input, inputs, module)
        return self._compute(branch_input, inputs, module)

    def _compute(self, branch_input: Tensor, inputs: LayerInputs, module: nn.Module) -> Tensor:
        self._context.rng.key = inputs.rng_key
        output: Tensor = module(branch_input, inputs)
        return output

    def _run_from_stream(self, branch: Branch, stream: Tensor, inputs: LayerInputs) -> Tensor:
        """A branch whose norm is computed again in the backward pass; branches in parallel each compute their own."""
        assert branch.norm is not None
        norm = getattr(self, branch.norm)
        return with_recomputed_inputs(
            lambda normed: self._run(branch, normed, inputs), lambda given: (norm(given),), stream
        )

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The residual branches, in order."""
        return self._branches

    def text_states(self) -> dict[str, TextState]:
        """What its branches need of a text in generation, by the branch's name."""
        return {branch.name: text_state_of(getattr(self, branch.name)) for branch in self._branches}

    @property
    def begins_with_norm(self) -> bool:
        """Whether its first branch normalizes the residual stream, and so keeps what the layer is given."""
        return self._branches[0].norm is not None

    def costs(self, workload: Workload) -> Costs:
        """Costs of its branches, and of a mask of dropout for each of them, one byte an element. Branches in parallel
        keep the same hidden states: those before a norm, or the norm's result, unless they keep copies in 8 bits. A
        branch that is recomputed keeps its input, and none that a norm computes again.
        """
        elements, branches = workload.rows * self._hidden_size, Costs()
        for name, module in self.named_children():
            found = costs_of(module, workload)
            given = elements * workload.itemsize
            found = found.recomputed(given, keeps_input=not self._copies) if name in self._recomputed else found
            branches = branches.before(found)
        first = self._branches[0].norm
        of_norm = 0 if self._copies else workload.itemsize
        shared = [
            of_norm if each.norm == first else workload.stream_itemsize for each in self._branches if each.parallel
        ]
        masks = len(self._branches) * elements * (self._dropout > 0)
        gradients = 2 * elements * workload.stream_itemsize
        norms = {each.norm for each in self._branches if each.norm} if self._discards_normed else ()
        normed = elements * workload.itemsize
        return dataclasses.replace(
            branches,
            kept=branches.kept + masks - elements * sum(shared) - normed * len(norms),
            working=branches.working + gradients + normed * bool(norms),
        )
