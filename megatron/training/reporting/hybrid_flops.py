"""FLOPs of a hybrid by Megatron-LM's formula, to compare its TFLOP/s with ours, which count what layers compute."""

from __future__ import annotations

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, MAMBA, MLP
from megatron.config.mamba import MambaConfig
from megatron.config.run import RunConfig


def megatron_lm_flops(run: RunConfig) -> float | None:
    """Training FLOPs of a sample as Megatron-LM counts them for a hybrid; None for other models, and for layers that
    its formula lacks. The vocabulary size must be known.

    It takes the scan of Mamba-2 as 7 times width and state size for each token, the width as twice the hidden size,
    and leaves out the convolution and multi-token prediction.
    """
    letters, model, length = run.part(HybridConfig).letters, run.model, run.data.seq_length
    if not letters or set(letters) - {ATTENTION, MAMBA, MLP}:
        return None
    mamba, hidden = run.part(MambaConfig), model.hidden_size
    inner, state, groups = 2 * hidden, mamba.mamba_state_dim, mamba.mamba_num_groups
    projected = 2 * inner + 2 * groups * state + inner // mamba.mamba_head_dim
    shared = model.num_query_groups / model.num_attention_heads
    by_letter = {
        ATTENTION: 4 * model.num_attention_heads * model.kv_channels * (hidden + hidden * shared + length / 2),
        MLP: 4 * model.ffn_hidden_size * hidden * (1.5 if model.gated else 1.0),
        MAMBA: 2 * hidden * projected + 7 * inner * state + 2 * inner * hidden,
    }
    forward = sum(by_letter[letter] for letter in letters) + 2 * hidden * run.padded_vocab_size
    return 3.0 * length * forward
