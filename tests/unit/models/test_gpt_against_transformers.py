"""GPT computes what transformers' GPT-2 and Llama compute, forward and backward, from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from megatron.core.transformer.output_layer import VocabularyOutput

transformers = pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY = 2, 48, 4, 24, 101
HEAD_DIM = HIDDEN // HEADS


def ours(**settings: Any) -> GPTModel:
    """A GPT of the test's size in fp64."""
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **settings,
    )
    return GPTModel(config, ModelContext.single(dtype=torch.float64), seed=1)


def fused_qkv(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Separate projections ``[out, …]`` as one, grouped by key/value head: its queries, its key, its value."""
    parts = [part.view(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def gpt2_weights(reference: Any) -> dict[str, Tensor]:
    """GPT-2's tensors under our names; its Conv1D keeps matrices transposed."""
    source = {name: tensor.detach() for name, tensor in reference.transformer.named_parameters()}
    found = {
        "embedding.word_embeddings.weight": source["wte.weight"],
        "embedding.position_embeddings.weight": source["wpe.weight"],
    }
    for kind in ("weight", "bias"):
        found[f"decoder.final_layernorm.{kind}"] = source[f"ln_f.{kind}"]
        for layer in range(LAYERS):
            theirs, mine = f"h.{layer}", f"decoder.layers.{layer}"
            found[f"{mine}.input_layernorm.{kind}"] = source[f"{theirs}.ln_1.{kind}"]
            found[f"{mine}.pre_mlp_layernorm.{kind}"] = source[f"{theirs}.ln_2.{kind}"]
            qkv = source[f"{theirs}.attn.c_attn.{kind}"]
            query, key, value = (qkv.t() if kind == "weight" else qkv).contiguous().chunk(3)
            found[f"{mine}.self_attention.linear_qkv.{kind}"] = fused_qkv(query, key, value, HEADS)
            for name, target in (
                ("attn.c_proj", "self_attention.linear_proj"),
                ("mlp.c_fc", "mlp.linear_fc1"),
                ("mlp.c_proj", "mlp.linear_fc2"),
            ):
                tensor = source[f"{theirs}.{name}.{kind}"]
                found[f"{mine}.{target}.{kind}"] = tensor.t() if kind == "weight" else tensor
    return found


def llama_weights(reference: Any, groups: int) -> dict[str, Tensor]:
    """Llama's tensors under our names."""
    source = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    found = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        "output_layer.weight": source["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, mine = f"model.layers.{layer}", f"decoder.layers.{layer}"
        query, key, value = (source[f"{theirs}.self_attn.{name}_proj.weight"] for name in "qkv")
        found[f"{mine}.input_layernorm.weight"] = source[f"{theirs}.input_layernorm.weight"]
        found[f"{mine}.pre_mlp_layernorm.weight"] = source[f"{theirs}.post_attention_layernorm.weight"]
        found[f"{mine}.self_attention.linear_qkv.weight"] = fused_qkv(query, key, value, groups)
        found[f"{mine}.self_attention.linear_proj.weight"] = source[f"{theirs}.self_attn.o_proj.weight"]
        gate, up = source[f"{theirs}.mlp.gate_proj.weight"], source[f"{theirs}.mlp.up_proj.weight"]
        found[f"{mine}.mlp.linear_fc1.weight"] = torch.cat((gate, up))
        found[f"{mine}.mlp.linear_fc2.weight"] = source[f"{theirs}.mlp.down_proj.weight"]
    return found


def load(model: GPTModel, weights: dict[str, Tensor]) -> None:
    """Copy logical tensors into the model; every parameter must be named, rows of vocabulary padding stay zero."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name][: tensor.shape[0]].copy_(tensor)


def loss_of(model: GPTModel, tokens: Tensor) -> Tensor:
    """Mean next-token loss."""
    output = model(tokens[:, :-1])
    assert isinstance(output, VocabularyOutput)
    weights = torch.ones(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.float64)
    return output.cross_entropy(tokens[:, 1:], weights) / weights.sum()


def compare(model: GPTModel, reference: Any, to_ours: Any, *, tolerance: float) -> None:
    """Logits, loss and every gradient agree to ``tolerance``."""
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    expected = reference(tokens[:, :-1]).logits
    output = model(tokens[:, :-1])
    assert isinstance(output, VocabularyOutput)
    torch.testing.assert_close(output.logits(), expected, rtol=0, atol=tolerance)

    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss_of(model, tokens)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=tolerance)
    torch.autograd.backward((loss, expected_loss))
    for parameter in reference.parameters():
        parameter.data = parameter.grad  # so that the weight mapping maps gradients
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in to_ours(reference).items():
        found = gradients[name]
        assert found is not None
        torch.testing.assert_close(found[: gradient.shape[0]], gradient, rtol=0, atol=tolerance, msg=name)


def test_gpt2() -> None:
    """Learned positions, LayerNorm, tanh GELU, biases, tied embeddings are GPT-2's."""
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    ).double()  # fmt: skip
    model = ours()
    load(model, gpt2_weights(reference))
    compare(model, reference, gpt2_weights, tolerance=1e-9)


@pytest.mark.parametrize("scaling", [None, "linear", "llama3"])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_llama(groups: int, scaling: str | None) -> None:
    """Rotary positions (plain, linear, Llama-3), RMSNorm, SwiGLU, grouped queries and untied output are Llama's."""
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    settings: dict[str, Any] = {}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": 4.0}
        settings = {"rotary_seq_len_interpolation_factor": 4.0}
    elif scaling == "llama3":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
        settings = {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=groups, max_position_embeddings=LENGTH,
            rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=rope, attn_implementation="eager",
        )
    ).double()  # fmt: skip
    model = ours(
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        ffn_hidden_size=64,
        add_bias_linear=False,
        group_query_attention=True,
        num_query_groups=groups,
        untie_embeddings_and_output_weights=True,
        **settings,
    )
    load(model, llama_weights(reference, groups))
    # transformers computes RMSNorm and rotary angles in fp32 whatever the model's type.
    compare(model, reference, lambda source: llama_weights(source, groups), tolerance=2e-6)
