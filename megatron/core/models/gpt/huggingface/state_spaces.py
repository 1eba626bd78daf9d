"""Settings of Mamba-2 in the files of its authors (state-spaces), as those of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from megatron.core.conversion.bounds import Count, Heads, Layers, Width
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Json
from megatron.small_files import Between

# Defaults of the layer.
_LAYER = {"d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1}
_DT_LIMIT = (0.0, math.inf)
# What the layer may have, and doesn't here.
_EXPECTED: dict[str, Any] = {
    "bias": False,
    "conv_bias": True,
    "rmsnorm": True,
    "norm_before_gate": False,
    "D_has_hdim": False,
    "d_ssm": None,
    "activation": "swish",
}
_IDLE = ("chunk_size", "dt_min", "dt_max", "dt_init_floor", "A_init_range", "use_mem_eff_path", "sequence_parallel")
_KINDS: dict[str, Any] = {
    "d_model": Width,
    "n_layer": Layers,
    "vocab_size": Count,
    "d_intermediate": Annotated[int, Between(0, 1 << 24)],
    "pad_vocab_size_multiple": Annotated[int, Between(1, 1 << 20)],
    **dict.fromkeys(("rms_norm", "tie_embeddings", "residual_in_fp32", "fused_add_norm"), bool),
    "attn_layer_idx": list[int],
    **dict.fromkeys(("ssm_cfg", "attn_cfg"), dict[str, Any]),
    "layer": str,
    **dict.fromkeys(("d_state", "headdim"), Width),
    **dict.fromkeys(("d_conv", "expand", "ngroups"), Heads),
    "dt_limit": list[Any],
    **dict.fromkeys((*_EXPECTED, *_IDLE), Any),
}


def as_transformers(config: Json, where: str) -> Mapping[str, Any] | None:
    """The settings of transformers for such a model; None for other settings. Raises CheckpointError for a model with
    other layers than Mamba-2, named in the file ``where``.
    """
    if not {"d_model", "n_layer", "ssm_cfg"} <= config.keys():
        return None
    reader = ConfigReader(config, {}, where, kinds=_KINDS)
    layer = reader.within("ssm_cfg")
    if layer.get("layer", "Mamba1") != "Mamba2":
        raise layer.refuse("layer", "layers of Mamba-1 have a state of another shape; Mamba2 converts")
    if reader.get("attn_layer_idx"):
        raise reader.refuse("attn_layer_idx", "its attention has a convolution of its own, which is not available here")
    reader.expect(d_intermediate=0, rms_norm=True)
    layer.expect(**_EXPECTED)
    if unknown := sorted((reader.get("ssm_cfg") or {}).keys() - {"layer", "dt_limit", *_LAYER, *_EXPECTED, *_IDLE}):
        raise reader.refuse("ssm_cfg", f"{unknown[0]} is not known here")
    found = {name: layer.get(name, usual) for name, usual in _LAYER.items()}
    width, heads = found["expand"] * reader("d_model"), found["headdim"]
    multiple = reader.get("pad_vocab_size_multiple", 8)
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": reader("d_model"),
        "num_hidden_layers": reader("n_layer"),
        "vocab_size": -(-reader("vocab_size") // multiple) * multiple,
        "tie_word_embeddings": reader.get("tie_embeddings", True),
        "layer_norm_epsilon": 1e-5,
        "state_size": found["d_state"],
        "conv_kernel": found["d_conv"],
        "expand": found["expand"],
        "head_dim": heads,
        "num_heads": max(width // heads, 1),
        "n_groups": found["ngroups"],
        "time_step_limit": list(layer.get("dt_limit") or _DT_LIMIT),
    }
