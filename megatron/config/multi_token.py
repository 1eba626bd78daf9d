"""Multi-token prediction: its settings."""

from __future__ import annotations

from megatron.config.flags import Settings, flag


class MultiTokenConfig(Settings):
    """Settings of multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437), part of those of the model."""

    mtp_num_layers: int = flag(
        "Layers of multi-token prediction (MTP) on the last stage, each of which predicts one token more ahead in "
        "training; 0: none.",
        default=0,
        at_least=0,
        at_most=64,
        architecture=True,
    )
    mtp_loss_scaling_factor: float = flag(
        "Factor of the mean of the losses of --mtp-num-layers, each a mean over its own tokens.", default=0.1, above=0
    )
