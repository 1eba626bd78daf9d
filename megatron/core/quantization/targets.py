"""Which weights are quantized: those of linear layers, by our parameter names."""

from __future__ import annotations

# Mixers' projections have no names of linear layers of their own.
_MIXERS = ("in_proj", "out_proj")
_OF_IMAGES = "vision_"


def is_quantized(name: str) -> bool:
    """Whether the parameter ``name`` is quantized unless asked otherwise: a weight of a linear layer or of experts.

    Embeddings, norms, the output layer, routers, gates of shared experts, and a mixer's convolution and numbers for
    each head stay as they are, and so do the encoder of images and its projector, which are small and lose most.
    """
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    return kind == "weight" and not name.startswith(_OF_IMAGES) and (last.startswith("linear_") or last in _MIXERS)
