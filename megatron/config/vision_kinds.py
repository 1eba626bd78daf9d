"""Facts about vision encoders by their type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

VisionModelType = Literal["clip", "siglip", "internvit", "internvit300M"]
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class VisionKind:
    """Facts about the encoders of a type.

    ``mean``, ``deviation``: of pixels between 0 and 1, by channel. ``class_token``: whether one stands before the
    patches. ``pre_norm``, ``post_norm``: whether a norm stands before the first and behind the last layer.
    ``patch_bias``: of the matrix of patches. ``layer_scale``: whether branches have a learned one. ``usual``: sizes of
    the best-known model, unless others are given. ``choices``: fields of the encoder's layers.
    """

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    class_token: bool
    usual: dict[str, Any]
    choices: dict[str, Any]
    pre_norm: bool = False
    post_norm: bool = False
    patch_bias: bool = True
    layer_scale: bool = False


def _usual(
    layers: int, hidden: int, heads: int, ffn: int, *, image: int, activation: str, eps: float
) -> dict[str, Any]:
    return {
        "vision_num_layers": layers,
        "vision_hidden_size": hidden,
        "vision_num_attention_heads": heads,
        "vision_ffn_hidden_size": ffn,
        "vision_activation": activation,
        "vision_norm_epsilon": eps,
        "img_h": image,
        "img_w": image,
    }


_ALL_BIASES = {"add_bias_linear": True}
_NO_QKV_BIAS = {"add_bias_linear": False, "add_attention_output_bias": True, "add_mlp_bias": True}

VISION_KINDS: dict[VisionModelType, VisionKind] = {
    "clip": VisionKind(
        mean=(0.48145466, 0.4578275, 0.40821073),
        deviation=(0.26862954, 0.26130258, 0.27577711),
        class_token=True,
        pre_norm=True,
        patch_bias=False,
        usual=_usual(24, 1024, 16, 4096, image=336, activation="quick_gelu", eps=1e-5),
        choices=_ALL_BIASES,
    ),
    "siglip": VisionKind(
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        class_token=False,
        post_norm=True,
        usual=_usual(27, 1152, 16, 4304, image=384, activation="gelu_tanh", eps=1e-6),
        choices=_ALL_BIASES,
    ),
    "internvit": VisionKind(
        mean=_IMAGENET[0],
        deviation=_IMAGENET[1],
        class_token=True,
        layer_scale=True,
        usual=_usual(45, 3200, 25, 12800, image=448, activation="gelu", eps=1e-6),
        choices={
            **_NO_QKV_BIAS,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "qk_layernorm_kind": "all_heads",
        },
    ),
    "internvit300M": VisionKind(
        mean=_IMAGENET[0],
        deviation=_IMAGENET[1],
        class_token=True,
        layer_scale=True,
        usual=_usual(24, 1024, 16, 4096, image=448, activation="gelu", eps=1e-6),
        choices=_ALL_BIASES,
    ),
}
