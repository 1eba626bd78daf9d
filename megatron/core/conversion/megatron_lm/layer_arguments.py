"""The arguments of attention and MLP in Megatron-LM's checkpoints and our settings, each from the other.

Core has windows, sinks, a scale of scores, L2 norms of queries and keys, latents, and MLPs gated by quick GELU.
``--use-checkpoint-args`` doesn't take them from a checkpoint, so a training run there needs them as flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.family import FamilyConfig
from megatron.config.flags import flags_of
from megatron.config.layer_patterns import listed_layers, marked_layers, window_layers, window_pattern
from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.known_arguments import OF_QUICK_GEGLU
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.errors import CheckpointError

YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
"""Our field -> Megatron-LM's argument, for the settings of YaRN."""
_PLAIN_ROTARY = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
}
FIELDS = (
    *("window_size", "window_attn_skip_freq", "softmax_type", "softmax_scale", "qk_l2_norm", "no_rope_freq"),
    "attention_output_gate",
)
"""Fields of our architecture that are made here."""


def read_attention(args: Arguments, *, num_layers: int) -> dict[str, Any]:
    """The fields that the arguments describe; CheckpointError for windows and patterns of layers that aren't any."""
    found = {name: value for name in ("softmax_type", "softmax_scale") if (value := args(name, None)) is not None}
    if args("attention_output_gate", False):
        found["attention_output_gate"] = True
    if args("qk_l2_norm", False):
        found |= {"qk_l2_norm": True, "qk_layernorm": False}  # core has one norm of queries and keys, and prefers this
    if args("use_rotary_position_embeddings", False) or args("position_embedding_type", "") in ("rope", "yarn"):
        found["no_rope_freq"] = _pattern(args, "no_rope_freq", num_layers)
    window, pattern = _window(args), _pattern(args, "window_attn_skip_freq", num_layers)
    if window is not None and any(windows := window_layers(pattern, num_layers)):
        found |= {"window_size": window, "window_attn_skip_freq": window_pattern(windows)}
    return found


def _pattern(args: Arguments, name: str, num_layers: int) -> str | None:
    """A pattern of layers as our settings write it; CheckpointError for one that core doesn't take."""
    layers = args(name, None)
    if layers is None or (type(layers) is int and layers > num_layers):
        return None
    if type(layers) is int and layers > 0:
        return str(layers)
    if not isinstance(layers, list) or len(layers) != num_layers or not {*layers} <= {0, 1}:
        raise _wrong(args, name, f"a number of layers, or a list of 0 and 1 for {num_layers} layers")
    return listed_layers(tuple(map(bool, layers)))


def read_yarn(args: Arguments) -> dict[str, Any]:
    """The fields of YaRN; empty for other positions. CheckpointError where the factor or the length is missing."""
    if args("position_embedding_type", "") != "yarn":
        return {}
    needed = [*YARN.values()][:2]
    found = {ours: args(name) if name in needed else args(name, None) for ours, name in YARN.items()}
    if found["mscale"] is None or found["mscale_all_dim"] is None:
        found["mscale"] = found["mscale_all_dim"] = None
    return {name: value for name, value in found.items() if value is not None}


def written_yarn(model: ModelConfig) -> dict[str, Any]:
    """The arguments of the fields of YaRN; empty for other positions."""
    is_yarn = model.position_embedding_type == "yarn" and not model.multi_latent_attention
    return {name: getattr(model, ours) for ours, name in YARN.items()} if is_yarn else {}


LATENTS = ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of latent attention, which arguments have under the same names."""
_YARN_OF_LATENTS = {ours: name.removeprefix("yarn_") for ours, name in YARN.items() if "correction" not in name}
_OF_OTHER_ATTENTION = ("no_rope_freq", "softmax_scale", "qk_l2_norm", "group_query_attention")


def read_latents(args: Arguments) -> dict[str, Any]:
    """The fields of latent attention; empty without it. Its rotary positions turn neighbouring channels, and are those
    of YaRN unless ``rope_type`` says otherwise; core gives neither the latents nor queries and keys a bias.
    """
    if not args("multi_latent_attention", False):
        return {}
    found = {name: value for name in LATENTS if (value := args(name, None)) is not None}
    found |= {"position_embedding_type": "rope", "rotary_interleaved": True, "add_qkv_bias": False}
    if args("rope_type", "yarn") == "yarn" and args("rotary_scaling_factor", 1.0) > 1:
        found |= {ours: value for ours, name in _YARN_OF_LATENTS.items() if (value := args(name, None)) is not None}
        found.setdefault("original_max_position_embeddings", args("max_position_embeddings"))
        found["position_embedding_type"] = "yarn"
    return found


def refused_latents(args: Arguments) -> list[str]:
    """What is not available about latent attention, as ``limits``."""
    if not args("multi_latent_attention", False):
        return []
    found = [f"latent attention and {name} = {args(name)}" for name in _OF_OTHER_ATTENTION if args(name, None)]
    if changed_rotary(args) or args("position_embedding_type", "rope") not in ("rope", "none"):
        found.append("latent attention whose positions are not rotary ones of neighbouring channels")
    if args("add_bias_linear", True):
        found.append("latent attention with biases (add_bias_linear = True)")
    has_yarn = args("rope_type", "yarn") == "yarn" and args("rotary_scaling_factor", 1.0) > 1
    if has_yarn and args("mscale", 1.0) != args("mscale_all_dim", 1.0):
        found.append(_TWO_SCALES)
    return found


_TWO_SCALES = "latent attention with YaRN's mscale unlike mscale_all_dim, of which releases take one or the other"


def unsupported_latents(model: ModelConfig) -> dict[str, bool]:
    """What no latent attention of Megatron-LM's has, and whether this one has it."""
    if not model.multi_latent_attention:
        usual = ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        sizes = any(getattr(model, name) != getattr(usual, name) for name in LATENTS)
        return {"no sizes of latents without --multi-latent-attention": sizes}
    is_yarn = model.position_embedding_type == "yarn"
    return {
        "no biases in latent attention": model.add_qkv_bias or model.add_attention_output_bias,
        "latent attention over neighbouring channels only (--rotary-interleaved)": not model.rotary_interleaved,
        "latent attention with positions of type rope or yarn only": model.position_embedding_type
        not in ("rope", "yarn"),
        "latent attention over whole rotary channels only": model.rotary_percent != 1.0,
        "no layers without positions, no scale of scores and no other norms in latent attention": bool(
            model.no_rope_freq or model.softmax_scale or model.qk_l2_norm
        ),
        f"no {_TWO_SCALES}": is_yarn and model.mscale != model.mscale_all_dim,
        "no range of YaRN that isn't rounded in latent attention": not model.yarn_correction_range_round_to_int,
    }


def written_latents(model: ModelConfig) -> dict[str, Any]:
    """The arguments of latent attention; empty without it."""
    if not model.multi_latent_attention:
        return {}
    is_yarn = model.position_embedding_type == "yarn"
    return {
        **{name: getattr(model, name) for name in LATENTS},
        **({name: getattr(model, ours) for ours, name in _YARN_OF_LATENTS.items()} if is_yarn else {}),
        "position_embedding_type": "rope",
        "rope_type": model.position_embedding_type,
        "rotary_interleaved": False,
        "group_query_attention": False,
        "kv_channels": None,
    }


def changed_rotary(settings: Callable[[str, Any], Any]) -> list[str]:
    """Settings under which not whole heads are turned in halves, as core's YaRN always does, each ``name = value``.

    ``settings``: gives one by name, with a default.
    """
    return [f"{name} = {found}" for name, usual in _PLAIN_ROTARY.items() if (found := settings(name, usual)) != usual]


def refused_windows(args: Arguments, family: type[FamilyConfig]) -> list[str]:
    """What is not available about the window of a model of the family, as ``limits``."""
    window = _window(args)
    sides = 2 if window and window[1] else 1
    if window is None or (min(window) >= 0 and sides <= family.window_sides):
        return []
    return [f"attention over a window in a {family.title} (window_size = {window})"]


def _window(args: Arguments) -> tuple[int, int] | None:
    """How many keys before and after its own a query sees, -1 for all of them; None for all on both sides."""
    window = args("window_size", None)
    if not window:
        return None
    if not isinstance(window, tuple | list) or [type(side) for side in window] != [int, int] or min(window) < -1:
        raise _wrong(args, "window_size", "two numbers of keys, each at least -1")
    before, after = window
    return None if before == -1 and after <= 0 else (before, after)


def _wrong(args: Arguments, name: str, expected: str) -> CheckpointError:
    shown = str(args(name))[:60]
    return CheckpointError(f"{args.where}: its saved settings: {name} is {shown}; expected {expected}")


def written_attention(model: ModelConfig) -> dict[str, Any]:
    """The arguments of the fields."""
    found: dict[str, Any] = {name: getattr(model, name) for name in FIELDS}
    pattern = model.window_attn_skip_freq
    if pattern is not None:
        layers = [int(each) for each in window_layers(pattern, model.num_layers)]
        found["window_attn_skip_freq"] = layers if "[" in pattern else int(pattern)
    if model.no_rope_freq is not None:
        marked = marked_layers(model.no_rope_freq, model.num_layers, flag="--no-rope-freq")
        found["no_rope_freq"] = [int(each) for each in marked]
    return found


def read_mlp(args: Arguments) -> dict[str, Any]:
    """The fields of an MLP gated by quick GELU; empty for others."""
    if not args("quick_geglu", False):
        return {}
    return {name: value for name in OF_QUICK_GEGLU if (value := args(name, None)) is not None}


def written_mlp(model: ModelConfig) -> dict[str, Any]:
    """The arguments of an MLP gated by quick GELU."""
    found = {name: getattr(model, name) for name in OF_QUICK_GEGLU}
    return {"quick_geglu": model.activation == "quick_geglu", **found}


def notes_for_training(model: ModelConfig, of_family: Mapping[str, Any]) -> list[str]:
    """What such a model needs in Megatron-LM beside ``--use-checkpoint-args``, a line each.

    ``of_family``: arguments that only its family has.
    """
    defaults = {spec.field: spec.default for spec in flags_of(ModelConfig)}
    flags, settings = [], [f"{name} = {value}" for name, value in written_yarn(model).items()]
    latent = {**written_latents(model), **({"mtp_num_layers": model.mtp_num_layers} if model.mtp_num_layers else {})}
    taken = ("position_embedding_type", "rotary_interleaved", "group_query_attention", "kv_channels")
    latent = {name: value for name, value in latent.items() if name not in taken and value is not None}
    own = {**written_attention(model), **written_mlp(model), **of_family, **latent}
    for name, value in own.items():
        if value != defaults.get(name, False) or name in latent:
            joined = ",".join(map(str, value)) if isinstance(value, tuple | list) else value
            shown = f"'[{joined}]'" if isinstance(value, list) else joined
            flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shown}"))
    given = f"note: give Megatron-LM {' '.join(flags)}: its --use-checkpoint-args does not take them from a checkpoint"
    set_there = f"note: Megatron-LM's releases have no flags for YaRN: set {', '.join(settings)} in its configuration"
    return [*([given] if flags else []), *([set_there] if settings else [])]
