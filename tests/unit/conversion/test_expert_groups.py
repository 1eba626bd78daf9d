"""Which groups of experts published settings may have."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.conversion.huggingface.known import Known
from megatron.core.models.gpt.huggingface.deepseek import DEEPSEEK_V2
from megatron.errors import CheckpointError


def test_groups_scored_by_their_best_expert_need_not_divide_the_choices() -> None:
    """A DeepSeek-V2 with 3 choices in 2 of 4 groups, which trains, was refused by conversion."""
    defaults = DEEPSEEK_V2.merged("defaults")
    settings: dict[str, Any] = {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 2,
    }
    settings |= {"n_routed_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 3}
    kinds = dict.fromkeys({*DEEPSEEK_V2.merged("kinds"), *settings}, Any)
    moe = DEEPSEEK_V2.experts(Known(settings, defaults, "it", kinds=kinds))
    assert (moe.moe_router_group_topk, moe.moe_router_group_score) == (2, "max")
    with pytest.raises(CheckpointError, match="have no such groups"):
        DEEPSEEK_V2.experts(Known({**settings, "num_experts_per_tok": 5}, defaults, "it", kinds=kinds))
