"""Multi-token prediction: its layers, and the factor of its loss."""

from __future__ import annotations

from megatron.config.flags import Settings, architecture_flag, flag


class MultiTokenConfig(Settings):
    """Settings of multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437), part of those of the model."""

    mtp_num_layers: int = architecture_flag(
        "Layers of multi-token prediction (MTP) on the last stage. In training each predicts one token further ahead; "
        "0: none.",
        default=0,
        at_least=0,
        at_most=64,
    )
    mtp_loss_scaling_factor: float = flag(
        "Coefficient of the MTP loss, which is the mean of the losses of all --mtp-num-layers.",
        default=0.1,
        above=0,
        from_checkpoint=True,
    )
