"""Against the megatron-core package itself, on CPU: we read the torch_dist files it writes, and it loads ours.

Both packages are called megatron, so the other one runs in a process of its own. To run these tests:
``pip install --no-deps --target FOLDER "megatron-core==0.12.*"`` and ``MEGATRON_CORE_PATH=FOLDER``.
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
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.forward import megatron_lm_logits
from megatron.core.conversion.native import read_native, write_native
from tests.unit.conversion.logits import native_logits
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors

FOLDER = os.environ.get("MEGATRON_CORE_PATH")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="needs MEGATRON_CORE_PATH, a folder with the megatron-core package"
)

# megatron-core 0.12 expects a GPU, psutil and an older torch; on a CPU none of the three changes what it computes.
PRELUDE = """
import argparse, json, os, sys, types

psutil = types.ModuleType("psutil")
class Process:
    def __init__(self, *pid): pass
    def memory_info(self): return types.SimpleNamespace(rss=0)
    def nice(self, *value): pass
psutil.Process = Process
sys.modules["psutil"] = psutil

import torch
import torch.distributed.checkpoint.filesystem as files
torch.cuda.synchronize = lambda *device: None
torch.cuda.current_device = lambda: "cpu"
import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
if hasattr(files, "SerializationFormat"):
    plain = files._write_item
    writer._write_item = lambda *a, **k: plain(*a, **k, serialization_format=files.SerializationFormat.TORCH_SAVE)

import contextlib
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

def build(settings):
    modern = settings.get("swiglu", False)
    config = TransformerConfig(
        num_layers=settings["num_layers"], hidden_size=settings["hidden_size"],
        num_attention_heads=settings["num_attention_heads"], num_query_groups=settings.get("num_query_groups"),
        kv_channels=settings.get("kv_channels"), ffn_hidden_size=settings.get("ffn_hidden_size"),
        gated_linear_unit=modern, add_bias_linear=not modern, use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu if modern else torch.nn.functional.gelu,
        bias_activation_fusion=not modern, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=settings["max_position_embeddings"],
        position_embedding_type="rope" if modern else "learned_absolute",
        share_embeddings_and_output_weights=not modern,
    )
    return model.eval()

def logits(model, tokens):
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length).expand_as(tokens), mask)

def main(settings, folder, tokens):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(5)
    model = build(settings)
    run(model, settings, folder, torch.tensor(tokens))
"""

SAVES = """
def run(model, settings, folder, tokens):
    os.makedirs(folder)
    args = argparse.Namespace(**settings, padded_vocab_size=128, tokenizer_type="NullTokenizer", seq_length=16)
    args.vocab_size = 127
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    dist_checkpointing.save({**model.sharded_state_dict(), **common}, folder)
    torch.save(logits(model, tokens), folder + ".logits")
"""

LOADS = """
def run(model, settings, folder, tokens):
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict({name: value for name, value in state.items() if name in model.state_dict()}, strict=False)
    torch.save(logits(model, tokens), folder + ".logits")
    assert dist_checkpointing.load_common_state_dict(folder)["args"].hidden_size == settings["hidden_size"]
"""

# megatron-core has no RMSNorm without Transformer Engine, so what is modern here keeps LayerNorm.
SETTINGS: dict[str, dict[str, Any]] = {"classic": CLASSIC, "modern": {**MODERN, "normalization": "LayerNorm"}}
TOKENS = torch.arange(24).view(2, 12) * 7 % 101


def run_megatron_core(body: str, settings: dict[str, Any], folder: Path, work: Path) -> torch.Tensor:
    """Logits that megatron-core computes from what it saved in, or loaded from, ``folder``."""
    script = work / "script.py"
    call = f"main({settings!r}, {str(folder)!r}, {TOKENS.tolist()!r})"
    script.write_text(f"{PRELUDE}\n{textwrap.dedent(body)}\nif __name__ == '__main__':\n    {call}\n")
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore"},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    logits: torch.Tensor = torch.load(f"{folder}.logits", weights_only=True)
    return logits


@pytest.mark.parametrize("name", SETTINGS)
def test_reads_what_it_writes(name: str, tmp_path: Path) -> None:
    """Logits of our checkpoint equal megatron-core's own."""
    settings = SETTINGS[name]
    expected = run_megatron_core(SAVES, settings, tmp_path / "theirs", tmp_path)
    assert (megatron_lm_logits(tmp_path / "theirs", TOKENS) - expected).abs().max() < 1e-5
    job = Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    convert(job, print)
    assert read_native(tmp_path / "ours").iteration == 5
    assert (native_logits(tmp_path / "ours", TOKENS) - expected[..., :101]).abs().max() < 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_it_loads_what_we_write(name: str, tmp_path: Path) -> None:
    """Padded vocabulary, stacked layers, settings: its own loader takes them and computes our logits."""
    model = ModelConfig(**SETTINGS[name])
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), print)
    found = run_megatron_core(LOADS, SETTINGS[name], tmp_path / "theirs/release", tmp_path)
    assert (found[..., :101] - native_logits(tmp_path / "ours", TOKENS)).abs().max() < 1e-5
