"""Conversions stream: a model of 140 MB passes with a few of its tensors in memory, whatever the formats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.data import REPOSITORY

WIDTH, INNER, WORDS, LAYERS = 512, 1536, 8000, 8
LARGEST = WORDS * WIDTH * 4  # bytes of the largest tensor
WHOLE = 4 * (2 * WORDS * WIDTH + LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER))

CONVERT = """
import json, sys, threading, time
from pathlib import Path
import torch
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.tensorrt_llm.cuts import Layout
from megatron.core.quantization.scheme import SCHEMES

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

root = Path(sys.argv[1])
steps = [
    ("hf", "source", "megatron", "ours", True),
    ("megatron", "ours", "hf", "back", True),
    ("megatron", "ours", "megatron-lm", "dist", True),
    ("megatron", "ours", "megatron-lm", "torch", False),
    ("megatron-lm", "dist", "megatron", "from dist", True),
    ("megatron-lm", "torch", "hf", "from torch", True),
    ("megatron", "ours", "hf", "int4", True),
    ("hf", "int4", "megatron", "from int4", True),
    ("megatron", "ours", "tensorrt-llm", "trt", True),
]
torch.zeros(10).sum()
peaks = {}
for source, load, target, save, dist in steps:
    before, most, done = held(), [0], threading.Event()
    def watch():
        while not done.is_set():
            most[0] = max(most[0], held())
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    given = {"rounding": Rounding(SCHEMES["int4"])} if save == "int4" else {"layout": Layout(2, 2)}
    files = {"dist": dist, "max_shard_size": 10**10, "skip_proof": True}
    job = Conversion(source, root / load, target, root / save, **files, **given)
    convert(job, lambda words: None)
    done.set()
    watcher.join()
    peaks[f"{source} {load} to {target} {save}"] = most[0] - before
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_peak_memory_is_a_few_tensors(tmp_path: Path) -> None:
    """A 70 B model is converted on a machine with 16 GB, as its users expect."""
    import torch

    from megatron.core.conversion.huggingface.writing import write_safetensors
    from megatron.core.conversion.portable import LazyTensor

    def tensor(*shape: int) -> LazyTensor:
        return LazyTensor(shape, torch.float32, lambda: torch.full(shape, 0.5))

    tensors = {"model.embed_tokens.weight": tensor(WORDS, WIDTH), "lm_head.weight": tensor(WORDS, WIDTH)}
    tensors["model.norm.weight"] = tensor(WIDTH)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": tensor(WIDTH, WIDTH) for name in "qkvo"}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": tensor(INNER, WIDTH) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = tensor(WIDTH, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = tensor(WIDTH)
    (tmp_path / "source").mkdir()
    write_safetensors(tensors, tmp_path / "source/model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
    }
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    words = [sys.executable, "-c", CONVERT, str(tmp_path)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    limit = 4 * LARGEST
    assert limit < WHOLE / 2
    assert {name: peak for name, peak in peaks.items() if peak > limit} == {}, peaks
