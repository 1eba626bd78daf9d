"""BERT, RoBERTa and the types with their names; ``architectures`` says which heads a model has."""

from __future__ import annotations

from typing import Any

from tests.published.sizes import SIZES

BERT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "hidden_act": "gelu",
    "architectures": ["BertForPreTraining"],
}
MEGATRON: dict[str, Any] = {**BERT, "architectures": ["MegatronBertForPreTraining"]}
ROBERTA: dict[str, Any] = {
    **BERT,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "architectures": ["RobertaForMaskedLM"],
}
MODERNBERT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "num_hidden_layers": 4,
    "local_attention": 14,
    "pad_token_id": 0,
    "architectures": ["ModernBertForMaskedLM"],
}
FULL, WINDOW = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT),
    "bert, masked tokens only": ("bert", {**BERT, "architectures": ["BertForMaskedLM"]}),
    "bert, tanh gelu": ("bert", {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert of one layer, three token types, 3 heads": (
        "bert",
        {**BERT, "num_hidden_layers": 1, "type_vocab_size": 3, "num_attention_heads": 3},
    ),
    "bert, untied": ("bert", {**BERT, "tie_word_embeddings": False}),
    "megatron-bert": ("megatron-bert", MEGATRON),
    "megatron-bert, untied, masked tokens only": (
        "megatron-bert",
        {**MEGATRON, "tie_word_embeddings": False, "architectures": ["MegatronBertForMaskedLM"]},
    ),
    "megatron-bert, masked tokens only": (
        "megatron-bert",
        {**MEGATRON, "architectures": ["MegatronBertForMaskedLM"]},
    ),
    "roberta": ("roberta", ROBERTA),
    "roberta, tanh gelu, 3 heads": ("roberta", {**ROBERTA, "hidden_act": "gelu_new", "num_attention_heads": 3}),
    "roberta, two token types, padding id 7": ("roberta", {**ROBERTA, "type_vocab_size": 2, "pad_token_id": 7}),
    "roberta, untied": ("roberta", {**ROBERTA, "tie_word_embeddings": False}),
    "xlm-roberta": ("xlm-roberta", {**ROBERTA, "architectures": ["XLMRobertaForMaskedLM"]}),
    "camembert": ("camembert", {**ROBERTA, "architectures": ["CamembertForMaskedLM"]}),
    "modernbert": ("modernbert", MODERNBERT),
    "modernbert, every bias, 3 heads, one layer": (
        "modernbert",
        {
            **MODERNBERT,
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
            "num_attention_heads": 3,
            "num_hidden_layers": 1,
        },
    ),
    "modernbert, tanh gelu, untied, every second layer full, biases of attention": (
        "modernbert",
        {
            **MODERNBERT,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
            "global_attn_every_n_layers": 2,
            "attention_bias": True,
        },
    ),
    "modernbert, silu, one base, windows only, biases of the MLP": (
        "modernbert",
        {
            **MODERNBERT,
            "hidden_activation": "silu",
            "layer_types": [WINDOW] * 4,
            "local_attention": 9,
            "rope_parameters": {each: {"rope_type": "default", "rope_theta": 3e4} for each in (FULL, WINDOW)},
            "mlp_bias": True,
        },
    ),
    "modernbert, yarn, other layers": (
        "modernbert",
        {
            **MODERNBERT,
            "layer_types": [WINDOW, FULL, FULL, WINDOW],
            "rope_parameters": {FULL: YARN, WINDOW: {"rope_type": "default", "rope_theta": 500.0}},
            "norm_bias": True,
        },
    ),
    "modernbert, full attention, linear scaling": (
        "modernbert",
        {
            **MODERNBERT,
            "global_attn_every_n_layers": 1,
            "rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.5}},
        },
    ),
}
