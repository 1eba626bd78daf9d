"""Which groups of experts published settings may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.models.gpt.huggingface import FORMAT
from megatron.core.models.gpt.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error


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
    moe = DEEPSEEK_V2.groups[0].of(ConfigReader(settings, defaults, "it", kinds=kinds))
    assert (moe.moe_router_group_topk, moe.moe_router_group_score) == (2, "max")
    with expect_error(CheckpointError):
        DEEPSEEK_V2.groups[0].of(ConfigReader({**settings, "num_experts_per_tok": 5}, defaults, "it", kinds=kinds))


def v3(**settings: Any) -> MoEConfig:
    """The experts of a DeepSeek-V3 with eight of them."""
    asked = {"num_hidden_layers": 2, "n_routed_experts": 8, "moe_intermediate_size": 16, **settings}
    kinds = dict.fromkeys({*DEEPSEEK_V3.merged("kinds"), *asked}, Any)
    found: MoEConfig = DEEPSEEK_V3.groups[0].of(ConfigReader(asked, DEEPSEEK_V3.merged("defaults"), "it", kinds=kinds))
    return found


@pytest.mark.parametrize(("kept", "choices", "name"), [(2, 4, "sum"), (2, 3, "top2"), (3, 5, "top2"), (4, 4, "top2")])
def test_deepseek_v3_adds_two_scores_of_a_group_whatever_it_chooses(kept: int, choices: int, name: str) -> None:
    """Such models, which transformers runs, were refused unless a token chose two experts in each of its groups."""
    moe = v3(n_group=4, topk_group=kept, num_experts_per_tok=choices)
    assert (moe.scores_of_group, moe.moe_router_group_score, moe.moe_router_num_groups) == (2, name, 4)


@pytest.mark.parametrize(
    ("groups", "kept", "choices", "fact"),
    [
        (8, 4, 3, "8"),
        (1, 2, 4, "8"),
        (3, 2, 4, "8"),
    ],
)
def test_groups_that_deepseek_v3_does_not_define(groups: int, kept: int, choices: int, fact: str) -> None:
    """transformers stops at them with an error of torch's; they are refused before any weight is read."""
    with expect_error(CheckpointError, fact):
        v3(n_group=groups, topk_group=kept, num_experts_per_tok=choices)


def test_groups_of_other_scores_are_not_written_as_deepseek_v3() -> None:
    """Megatron-LM adds as many scores as a token chooses in a group; DeepSeek's code always two."""
    model = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32)
    usual = v3(n_group=4, topk_group=2, num_experts_per_tok=4)

    def differences(moe: MoEConfig) -> list[str]:
        return FORMAT.differences("deepseek_v3", model, (moe,))

    assert differences(usual) == []
    assert differences(replace(usual, moe_router_group_score="top2")) == []
    three = replace(usual, num_experts=16, moe_router_topk=6)
    assert differences(three) == ["--moe-router-group-score is sum and not top2"]
