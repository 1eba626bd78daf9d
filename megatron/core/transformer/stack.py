"""Settings of a stack of layers: shared sizes, and the residual branches of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import nn

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig, NormPlacement
from megatron.config.training import RecomputeModule
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.place import BranchPlace


@dataclass(frozen=True)
class Branch:
    """A kind of residual branch, ``x + scale * layer_scale * norm_after(module(norm(x)))``, with dropout on what is
    added.

    ``build``: makes the module, whose ``forward(x, inputs: LayerInputs)`` is ``[s, b, h] -> [s, b, h]``; ``x`` is
    normalized, and side losses go to ``inputs.side_losses``.
    ``name``, ``norm``, ``norm_after``: of its module and its norms, in the names of parameters; a norm that is None is
    left out (norms after only: OLMo 2, arXiv:2501.00656; before and after: Gemma 2, arXiv:2408.00118).
    ``layer_scale``: name of the module that multiplies what it adds by a learned vector (arXiv:2103.17239), if any.
    ``dropout_stream``: name of its random stream. ``parallel``: it reads what the branch before it read, not its result
    (GPT-NeoX, arXiv:2204.06745), and shares that branch's norm if it names the same. ``scale``: as Granite's residual
    multiplier. ``recompute_name``: of the whole branch among ``--recompute-modules``. ``norm_placement``: if another
    than the model's, that of all branches of a layer that begins with this one.
    """

    name: str
    norm: str | None
    dropout_stream: str
    build: Callable[[BranchPlace], nn.Module]
    norm_after: str | None = None
    layer_scale: str | None = None
    parallel: bool = False
    scale: float = 1.0
    recompute_name: RecomputeModule | None = None
    norm_placement: NormPlacement | None = None


SELF_ATTENTION = Branch("self_attention", "input_layernorm", "attention", SelfAttention)
LATENT_ATTENTION = replace(SELF_ATTENTION, build=LatentAttention)
CROSS_ATTENTION = Branch("cross_attention", "pre_cross_attn_layernorm", "cross attention", CrossAttention)
FEED_FORWARD = Branch("mlp", "pre_mlp_layernorm", "mlp", MLP, recompute_name="mlp")

Layer = tuple[Branch, ...]
"""The residual branches of a layer, in order."""


def self_attention(model: ModelConfig) -> Branch:
    """The branch of a model's kind of self-attention."""
    return LATENT_ATTENTION if model.multi_latent_attention else SELF_ATTENTION


@dataclass(frozen=True)
class StackConfig:
    """One stack of layers of a model.

    ``model``: what all its layers share, and how many they are. ``first``: number of its first layer in the whole
    model. ``pattern``: layers that the stack repeats, of which each occurrence has branches of its own; those of
    multi-token prediction come after the stack's, ``layers_per_depth`` for each depth. ``lora``: adapters of its linear
    layers.
    """

    model: ModelConfig
    causal: bool
    first: int = 0
    pattern: tuple[Layer, ...] = ((SELF_ATTENTION, FEED_FORWARD),)
    layers_per_depth: int = 1
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def residual_writers(self) -> int:
        """Two for each layer, and one in a hybrid, whose layers have one branch each (Megatron-LM's count)."""
        is_hybrid = all(len(layer) == 1 for layer in self.pattern)
        return self.model.num_layers * (1 if is_hybrid else 2)

    def layer(self, number: int) -> Layer:
        """Branches of layer ``number`` of the stack, with norms where ``--norm-placement`` and
        ``--no-first-attention-norm`` say and scaled by ``--residual-multiplier``; in parallel they read what the first
        reads.
        """
        model = self.model
        first, *others = self.pattern[number % len(self.pattern)]
        if model.parallel_attention:
            own_norms = model.parallel_layernorm
            others = [replace(each, norm=each.norm if own_norms else first.norm, parallel=True) for each in others]
        if number == 0 and not model.first_attention_norm:
            first = replace(first, norm=None)
        placement = first.norm_placement or model.norm_placement
        return tuple(self._scaled_and_normed(branch, placement) for branch in (first, *others))

    def _scaled_and_normed(self, branch: Branch, placement: NormPlacement) -> Branch:
        scaled = replace(branch, scale=branch.scale * self.model.residual_multiplier)
        if placement == "before":
            return scaled
        before = branch.norm if placement == "both" else None
        return replace(scaled, norm=before, norm_after=f"post_{branch.name.replace('attention', 'attn')}_layernorm")
