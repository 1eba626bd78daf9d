"""Against the megatron-core package itself, on CPU: we read the torch_dist files it writes, and it loads ours.

Both packages are called megatron, so the other one runs in a process of its own. To run these tests:
``pip install --no-deps --target FOLDER "megatron-core==0.16.1"`` and ``MEGATRON_CORE_PATH=FOLDER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.answer import megatron_lm_answer
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.proof import native_answer
from megatron.core.conversion.questions import Answer, question_for
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.registry import family_of, with_all_groups
from megatron.core.models.t5.config import T5Config
from tests.harness.megatron_core import FOLDER, ON_CPU
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="needs MEGATRON_CORE_PATH, a folder with the megatron-core package"
)

PRELUDE = f"""{ON_CPU}
import argparse, json
ones = torch.ones
torch.ones = lambda *size, device=None, **options: ones(*size, **options)  # a window's mask is made on a GPU
class Stream:  # experts wait for the GPU
    def __getattr__(self, name): return lambda *args, **options: self
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = lambda *args, **options: Stream()
torch.cuda.stream = lambda stream: contextlib.nullcontext()
import megatron.core.transformer.moe.moe_utils as routers
routers.te_general_gemm = None  # which it asks for without Transformer Engine
import megatron.core.transformer.moe.grouped_gemm_util as products  # a package that needs a GPU
def multiply(rows, weights, counts, trans_b):
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts.tolist()), weights)])
products.grouped_gemm, products.ops = products, types.SimpleNamespace(gmm=multiply)
from megatron.core.transformer.dot_product_attention import DotProductAttention
import megatron.core.transformer.multi_latent_attention as latents
latents.TELinear = type("TELinear", (), dict())  # which it compares with, None without Transformer Engine
plain_attention = DotProductAttention.__init__  # knows no widths of latent attention, which here are those of a head
DotProductAttention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **k: plain_attention(self, *a, **k)
import torch.distributed.checkpoint.filesystem as files
import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
if hasattr(files, "SerializationFormat"):
    plain = files._write_item
    writer._write_item = lambda *a, **k: plain(*a, **k, serialization_format=files.SerializationFormat.TORCH_SAVE)
"""

SCRIPT = """
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

OF_CONFIG = ("window_size", "window_attn_skip_freq", "softmax_type", "softmax_scale", "qk_l2_norm", "no_rope_freq")
OF_CONFIG += ("mtp_num_layers", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
OF_CONFIG += ("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
OF_CONFIG += ("multi_latent_attention", "qk_layernorm")

def build(settings, family, binary_head):
    modern = settings.get("swiglu", False)
    experts = {name: value for name, value in settings.items() if name.startswith("moe_")}
    if "num_experts" in settings:
        experts |= dict(num_moe_experts=settings["num_experts"], moe_token_dispatcher_type="alltoall")
        experts |= dict(moe_aux_loss_coeff=0.0, moe_router_load_balancing_type="none")
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    config = kind(
        num_layers=settings["num_layers"], hidden_size=settings["hidden_size"],
        num_attention_heads=settings["num_attention_heads"], num_query_groups=settings.get("num_query_groups"),
        kv_channels=settings.get("kv_channels"), ffn_hidden_size=settings.get("ffn_hidden_size"),
        gated_linear_unit=modern, add_bias_linear=not modern, use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu if modern else torch.nn.functional.gelu,
        bias_activation_fusion=not modern, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2,
        pipeline_dtype=torch.float32, **{name: settings[name] for name in OF_CONFIG if name in settings}, **experts,
        normalization="LayerNorm",
    )
    sizes = dict(vocab_size=128, max_sequence_length=settings["max_position_embeddings"])
    sizes["share_embeddings_and_output_weights"] = not settings.get("untie_embeddings_and_output_weights", False)
    if family == "BERT":
        types = 2 if binary_head else 0
        return BertModel(config, types, bert_layer_local_spec, add_binary_head=binary_head, **sizes)
    sizes["position_embedding_type"] = "rope" if modern else "learned_absolute"
    if family == "T5":
        specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
        stacks = [TransformerBlockSubmodules([spec] * config.num_layers, layer_norm=t5_spec.LNImpl) for spec in specs]
        return T5Model(config, config, *stacks, **sizes)
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        latent = dict(multi_latent_attention=True, qk_layernorm=True) if kind is MLATransformerConfig else {}
        spec = get_gpt_layer_local_spec(qk_l2_norm=config.qk_l2_norm, **latent)
    later = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(config, spec, mtp_block_spec=later, **sizes)
    for module in model.modules():
        if type(module).__name__ == "GroupedMLP":  # which asks for bf16, and computes in any type
            module.config = argparse.Namespace(**{**vars(config), "bf16": True})
    return model

def answer(model, family, asked):
    tokens = asked["tokens"]
    if family == "BERT":
        types = asked["types"] if asked["binary_head"] else None
        words, order = model(tokens, asked["real"].long(), types)
        return {"words": words[asked["real"]], **({} if order is None else {"order": order})}
    length = tokens.shape[1]
    model.config.mtp_num_layers, model.mtp_process = None, False  # losses of future tokens, which nobody asks for
    if family == "T5":
        samples, later = asked["decoder_tokens"].shape
        future = torch.ones(1, 1, later, later, dtype=torch.bool).triu(1)
        masks = [~asked["real"][:, None, None].expand(samples, 1, queries, length) for queries in (length, later)]
        return {"words": model(tokens, asked["decoder_tokens"], masks[0], future, masks[1])}
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return {"words": model(tokens, torch.arange(length).expand_as(tokens), mask)}

def main(settings, family, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(5)
    asked = torch.load(folder + ".question")
    model = build(settings, family, asked.get("binary_head")).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    run(model, settings, folder)
    with torch.no_grad():
        torch.save(answer(model, family, asked), folder + ".answer")
"""

SAVES = """
def run(model, settings, folder):
    os.makedirs(folder)
    args = argparse.Namespace(**settings, padded_vocab_size=128, tokenizer_type="NullTokenizer", seq_length=16)
    args.vocab_size = 127
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    dist_checkpointing.save({**model.sharded_state_dict(), **common}, folder)
"""

LOADS = """
def run(model, settings, folder):
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict({name: value for name, value in state.items() if name in model.state_dict()}, strict=False)
    assert dist_checkpointing.load_common_state_dict(folder)["args"].hidden_size == settings["hidden_size"]
    path = os.path.join(os.path.dirname(folder), "../torch/release/mp_rank_00/model_optim_rng.pt")
    stored = torch.load(path, weights_only=False)["model"]
    if settings.get("moe_grouped_gemm"):
        return  # files of torch's format have its other kind of experts
    assert stored.keys() == {name for name in model.state_dict() if "_extra_state" not in name}
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items() if name in stored)
"""

# megatron-core has no RMSNorm without Transformer Engine, so what is modern here keeps LayerNorm.
UNTIED = {**CLASSIC, "untie_embeddings_and_output_weights": True}
BOTH = (BertConfig(exact_gelu_head=True), TokenTypesConfig())
FIRST = (BertConfig(bert_binary_head=False, exact_gelu_head=True), TokenTypesConfig())
UNGROUPED = {"group_query_attention": False, "num_query_groups": 4}
# Arguments of theirs that say what MODERN does, which has our name of the activation.
SWIGLU = {**{name: value for name, value in MODERN.items() if name != "activation"}, "swiglu": True}
SWIGLU["normalization"] = "LayerNorm"
DEEP = T5Config(decoder_num_layers=4, decoder_seq_length=4)
ROUTED: dict[str, Any] = {**SWIGLU, "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
BIASED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "rope_type": "rope",
}
MODELS: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "gpt": (CLASSIC, ()),
    "gpt with a window": ({**CLASSIC, "window_size": (2, 0), "window_attn_skip_freq": 2}, ()),
    "gpt with sinks and a scale": ({**CLASSIC, "softmax_type": "learnable", "softmax_scale": 0.3}, ()),
    "modern gpt": (SWIGLU, ()),
    "modern gpt with layers without positions": ({**SWIGLU, "no_rope_freq": 2}, ()),
    "modern gpt with listed layers without positions": ({**SWIGLU, "no_rope_freq": [1, 0, 0, 1]}, ()),
    "modern gpt with L2 norms": ({**SWIGLU, "qk_l2_norm": True}, ()),
    "experts": (ROUTED, ()),
    "grouped experts": ({**ROUTED, **BIASED, "moe_grouped_gemm": True}, ()),
    "experts, scored before": ({**ROUTED, "moe_router_pre_softmax": True}, ()),
    "biased and shared experts": ({**ROUTED, **BIASED}, ()),
    "experts in every second layer": ({**ROUTED, "moe_layer_freq": 2}, ()),
    "experts in listed layers": ({**ROUTED, **BIASED, "moe_layer_freq": [0, 1, 1, 1]}, ()),
    "latents": ({**SWIGLU, **UNGROUPED, **LATENT}, ()),
    "latents and experts": ({**ROUTED, **BIASED, **UNGROUPED, **LATENT, "moe_layer_freq": [0, 1, 1, 1]}, ()),
    "future tokens": ({**SWIGLU, "mtp_num_layers": 1}, ()),
    "future tokens and experts": ({**ROUTED, **BIASED, "mtp_num_layers": 1}, ()),
    "bert": (CLASSIC, BOTH),
    "bert, masked tokens only, untied": (UNTIED, FIRST),
    "t5": (CLASSIC, (DEEP,)),
    "modern t5": ({**SWIGLU, **UNGROUPED}, (DEEP,)),
}


def groups_of(name: str) -> tuple[object, ...]:
    """The settings of a family alone, experts among them."""
    settings, groups = MODELS[name]
    moe = {key: value for key, value in settings.items() if key.startswith("moe_") or key == "num_experts"}
    moe.pop("moe_grouped_gemm", None)
    if "moe_layer_freq" in moe:
        moe["moe_layer_freq"] = str(moe["moe_layer_freq"]).replace(" ", "")
    return with_all_groups((*groups, MoEConfig(**moe)))


def of_ours(settings: dict[str, Any]) -> ModelConfig:
    """The architecture that arguments of theirs say."""
    theirs = ("moe_", "num_experts", "rope_type")
    ours = {name: value for name, value in settings.items() if not name.startswith(theirs)}
    if ours.get("multi_latent_attention"):
        ours["rotary_interleaved"] = True
        del ours["kv_channels"]
    for name in {"window_attn_skip_freq", "no_rope_freq"} & settings.keys():
        ours[name] = str(settings[name])
    if ours.pop("swiglu", False):
        ours["activation"] = "swiglu"
    return ModelConfig(**ours)


def run_megatron_core(body: str, name: str, folder: Path, work: Path) -> Answer:
    """What megatron-core answers to the proof's question, from what it saved in, or loaded from, ``folder``."""
    settings, groups = MODELS[name][0], groups_of(name)
    torch.save(vars(question_for(of_ours(settings), groups)), f"{folder}.question")
    script = work / "script.py"
    call = f"main({settings!r}, {family_of(groups).title!r}, {str(folder)!r})"
    script.write_text(f"{PRELUDE}{SCRIPT}\n{textwrap.dedent(body)}\nif __name__ == '__main__':\n    {call}\n")
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: Answer = torch.load(f"{folder}.answer", weights_only=True)
    return answer


def assert_close(found: Answer, expected: Answer) -> None:
    """Equal to fp32 rounding; rows of padding aside."""
    assert found.keys() == expected.keys()
    for kind, logits in expected.items():
        assert (found[kind][..., :101] - logits[..., :101]).abs().max() < 1e-5 * logits.abs().max(), kind


@pytest.mark.parametrize("name", MODELS)
def test_reads_what_it_writes(name: str, tmp_path: Path) -> None:
    """Logits of our checkpoint equal megatron-core's own."""
    settings, groups = MODELS[name][0], groups_of(name)
    expected = run_megatron_core(SAVES, name, tmp_path / "theirs", tmp_path)
    question = question_for(of_ours(settings), groups)
    assert_close(megatron_lm_answer(tmp_path / "theirs", question), expected)
    job = Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    convert(job, print)
    found = read_native(tmp_path / "ours")
    assert (found.iteration, found.groups) == (5, groups)
    assert_close(native_answer(tmp_path / "ours", question), expected)


@pytest.mark.parametrize("name", MODELS)
def test_it_loads_what_we_write(name: str, tmp_path: Path) -> None:
    """Padded vocabulary, stacked layers, settings: its own loader takes them and computes our logits; torch's
    format has the names and the numbers that its model wants.
    """
    settings, groups = MODELS[name][0], groups_of(name)
    model = of_ours(settings)
    values = random_tensors(model, groups)
    if FIRST[0] in groups:
        values["embedding.tokentype_embeddings.weight"].zero_()
    write_native(portable(model, values, groups), tmp_path / "ours", final=tmp_path / "ours")
    convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), print)
    convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "torch", dist=False), print)
    found = run_megatron_core(LOADS, name, tmp_path / "theirs/release", tmp_path)
    assert_close(found, native_answer(tmp_path / "ours", question_for(model, groups)))
