"""What is asked of pruning: sizes of the smaller model, checked against the larger one before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.config.family import PartConfig
from megatron.config.flags import plural_s
from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from megatron.config.layer_patterns import marked_layers, pattern_of, window_layers, window_pattern
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.portable import PortableModel, refuse_quantized
from megatron.core.models.registry import family_of
from megatron.errors import ConfigError

_OF_EXPERTS = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


@dataclass(frozen=True)
class Targets:
    """Sizes of the smaller model, by the names of its settings; None: as they are. ``drop``: numbers of layers that
    are left out, counted from 0, where the user names them.
    """

    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    num_layers: int | None = None
    drop: tuple[int, ...] = ()

    @property
    def needs_scores(self) -> bool:
        """Whether importance says what is left out, and not the user alone."""
        return dataclasses.replace(self, drop=()) != Targets()

    def sizes(self, portable: PortableModel) -> dict[str, int]:
        """All sizes of the smaller model, by the name of the setting.

        Raises ConfigError for sizes that the model can't have, and for models that can't be pruned in this way;
        CheckpointError for a quantized one.
        """
        refuse_quantized(portable, "--load", what="scales fit none of the smaller matrices")
        family = family_of(portable.groups)
        if not family.train_spec.continues_texts:
            raise ConfigError(
                f"the model in --load is a {family.title}, and importance is measured on texts with models that "
                "continue them: prune a GPT or a hybrid"
            )
        model, sizes = portable.model, sizes_of(portable)
        asked = {name: value for name, value in dataclasses.asdict(self).items() if name in sizes and value is not None}
        if model.num_query_groups == model.num_attention_heads and "num_attention_heads" in asked:
            asked.setdefault("num_query_groups", asked["num_attention_heads"])
        for name, value in asked.items():
            if not sizes[name]:
                raise ConfigError(f"{flag_of(name)} {value}: no layer of the model in --load has any; leave it out")
            if value > sizes[name]:
                raise ConfigError(f"{flag_of(name)} {value}: the model in --load has {sizes[name]}; give at most that")
        found = sizes | asked
        smaller = {name for name in sizes if found[name] < sizes[name]} | ({"num_layers"} if self.drop else set())
        checks = (_misfits(portable, smaller), _unequal(portable, found), self._layers(found["num_layers"], model))
        for problem in chain(*checks):
            raise ConfigError(problem)
        return found | {"num_layers": min(found["num_layers"], model.num_layers - len({*self.drop}))}

    def _layers(self, left: int, model: ModelConfig) -> Iterator[str]:
        layers = model.num_layers
        wrong = [layer + 1 for layer in self.drop if not 0 <= layer < layers]
        if wrong:
            yield f"--layers-to-drop {wrong[0]}: layers of the model in --load have the numbers 1 to {layers}"
        if len({*self.drop}) >= layers:
            yield f"--layers-to-drop names all {layers} layers: leave one, or give --target-num-layers"
        if self.drop and left < layers:
            yield "--layers-to-drop and --target-num-layers both say which layers are dropped: leave one of them out"


def flag_of(name: str) -> str:
    """The flag of the target for a setting."""
    name = "num_moe_experts" if name == "num_experts" else name
    return f"--target-{name.replace('_', '-')}"


def sizes_of(portable: PortableModel) -> dict[str, int]:
    """The sizes of a model that can become smaller, by the name of the setting; 0 for those of layers that it lacks."""
    model, moe = portable.model, MoEConfig.among(portable.groups)
    letters, layers = HybridConfig.among(portable.groups).letters, model.num_layers
    has_heads = ATTENTION in letters or not letters
    has_experts = EXPERTS in letters or (not letters and any(moe.expert_layers(layers)))
    has_neurons = MLP in letters or (not letters and not all(moe.expert_layers(layers)))
    return {
        "num_layers": layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size * has_neurons,
        "num_attention_heads": model.num_attention_heads * has_heads,
        "num_query_groups": model.num_query_groups * has_heads,
        **{name: (getattr(moe, name) or 0) * has_experts for name in _OF_EXPERTS},
    }


def with_sizes(portable: PortableModel, sizes: Mapping[str, int], layers: Sequence[int]) -> PortableModel:
    """The model with smaller settings and the same tensors. ``layers``: numbers of those that it keeps."""
    model, count = portable.model, portable.model.num_layers
    small = model if len(layers) == count else _with_layers(model, layers)
    own: dict[str, Any] = {name: size for name, size in sizes.items() if size and name not in _OF_EXPERTS}
    small, groups = dataclasses.replace(small, **{**own, "num_layers": len(layers)}), list[object]()
    has_mamba = MAMBA in HybridConfig.among(portable.groups).letters
    for group in portable.groups:
        made = group.with_layers(count, layers) if isinstance(group, PartConfig) and len(layers) < count else group
        if isinstance(made, MoEConfig):
            of_experts: Any = {name: sizes[name] for name in _OF_EXPERTS if sizes.get(name)}
            made = dataclasses.replace(made, **of_experts)
        if isinstance(made, MambaConfig) and has_mamba and small.hidden_size < model.hidden_size:
            made = dataclasses.replace(made, mamba_num_heads=made.num_heads(model))  # its default follows from the size
        groups.append(made)
    return dataclasses.replace(portable, model=small, groups=tuple(groups))


def _with_layers(model: ModelConfig, kept: Sequence[int]) -> ModelConfig:
    """A model with the layers ``kept`` alone: each sees the window and has the positions that it has in ``model``."""
    windows = window_layers(model.window_attn_skip_freq, model.num_layers)
    bare = marked_layers(model.no_rope_freq or "[0]", model.num_layers, flag="--no-rope-freq")
    patterns: Any = {
        "window_attn_skip_freq": window_pattern(tuple(windows[layer] for layer in kept)),
        "no_rope_freq": pattern_of(tuple(bare[layer] for layer in kept)),
    }
    return dataclasses.replace(model, num_layers=len(kept), **patterns)


def without_mtp(portable: PortableModel) -> PortableModel:
    """The model without its layers of multi-token prediction."""
    groups = tuple(
        dataclasses.replace(group, hybrid_layer_pattern=group.letters)
        if isinstance(group, HybridConfig) and group.is_hybrid
        else group
        for group in portable.groups
    )
    tensors = {name: tensor for name, tensor in portable.tensors.items() if not name.startswith("mtp.")}
    model = dataclasses.replace(portable.model, mtp_num_layers=0)
    return dataclasses.replace(portable, model=model, groups=groups, tensors=tensors)


def _misfits(portable: PortableModel, smaller: Set[str]) -> Iterator[str]:
    """What can't be made ``smaller`` in a model of this kind, a sentence each."""
    model, moe = portable.model, MoEConfig.among(portable.groups)
    if model.mtp_num_layers:
        yield (
            f"the model in --load has {model.mtp_num_layers} depth{plural_s(model.mtp_num_layers)} of multi-token "
            "prediction, whose importance is not measured: leave them out of the smaller model with --drop-mtp"
        )
    if {"num_attention_heads", "num_query_groups"} & smaller:
        if model.position_embedding_type == "alibi":
            yield (
                "attention heads with --position-embedding-type alibi have a slope by their number, which those that "
                "are left would change: prune --target-ffn-hidden-size, --target-hidden-size or --target-num-layers"
            )
        if model.qk_layernorm and not model.multi_latent_attention and model.qk_layernorm_kind == "all_heads":
            yield (
                "--qk-layernorm-kind all_heads normalizes all heads together, so those that are left would change: "
                "prune --target-ffn-hidden-size, --target-hidden-size or --target-num-layers"
            )
    if "hidden_size" in smaller and model.use_mup:
        yield (
            "--use-mup derives multipliers from the hidden size, and those of the smaller model would be others: prune "
            "--target-ffn-hidden-size, --target-num-attention-heads or --target-num-layers"
        )
    if "num_experts" in smaller and moe.moe_router_num_groups:
        yield (
            f"the router first chooses among {moe.moe_router_num_groups} groups of experts, which would become "
            "unequal: prune --target-moe-ffn-hidden-size or --target-num-layers"
        )


def _unequal(portable: PortableModel, sizes: Mapping[str, int]) -> Iterator[str]:
    """Sizes that don't fit each other, a sentence each."""
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    model, moe = portable.model, MoEConfig.among(portable.groups)
    most = model.num_attention_heads // model.num_query_groups
    if groups and (heads % groups or heads // groups > most):
        yield (
            f"--target-num-attention-heads {heads} with {groups} query groups: each group keeps equally many of its "
            f"{most} heads; give a multiple of {groups}, at most {most * groups}, or --target-num-query-groups, too"
        )
    if 0 < sizes["num_experts"] < moe.moe_router_topk:
        yield (
            f"--target-num-moe-experts {sizes['num_experts']}: each token chooses {moe.moe_router_topk} experts "
            "(--moe-router-topk); give at least as many"
        )


def refuse_layers_without(portable: PortableModel, layers: Sequence[int]) -> None:
    """Raise ConfigError for ``layers`` among which a kind that the model's settings need is missing."""
    model, moe = portable.model, MoEConfig.among(portable.groups)
    if moe.has_experts:
        marked = moe.expert_layers(model.num_layers)
        if not any(marked[layer] for layer in layers):
            having = [layer + 1 for layer, is_marked in enumerate(marked) if is_marked]
            raise ConfigError(
                f"layers with experts are {', '.join(map(str, having[:8]))}, and none of them would be left: drop "
                "others with --layers-to-drop"
            )
    if not model.first_attention_norm and layers[0] != 0:
        raise ConfigError(
            "layer 1 has no norm before its attention (--no-first-attention-norm), so no other can be the first: drop "
            "others with --layers-to-drop"
        )
