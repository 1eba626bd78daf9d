"""Write what the examples' flags resolve to: python -m tests.golden.regenerate_examples; review the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES, Family

GOLDEN = Path(__file__).with_name("examples.json")
FLAG_FILES = sorted((Path(__file__).resolve().parents[2] / "examples").rglob("*.flags"))
WORLD_SIZES = {
    "gpt_345m": 1,
    "llama2_7b": 16,
    "llama3_70b": 512,
    "mixtral_8x7b": 64,
    "mixtral_8x22b": 128,
    "qwen3_30b_a3b": 16,
    "qwen3_next_80b_a3b": 64,
    "mamba2_hybrid_8b": 16,
    "nemotron_h_8b": 32,
    "olmo_hybrid_7b": 32,
    "deepseek_v2": 256,
    "deepseek_v3": 2048,
    "gpt3_175b_distributed": 1024,
}  # others: 8
FILES = ["--data-path", "data", "--vocab-file", "vocab", "--merge-file", "merges", "--tokenizer-model", "model"]


def family_of_example(flag_file: Path) -> Family:
    """The family that an example's folder is named after, else GPT: ``gpt3`` and ``llama`` hold GPT models."""
    name = flag_file.parent.name
    return FAMILIES["vlm"] if name == "vision_language" else FAMILIES.get(name, FAMILIES["gpt"])


def example(flag_file: Path) -> RunConfig:
    """An example on the ranks it is meant for."""
    groups, ranks = family_of_example(flag_file).groups, WORLD_SIZES.get(flag_file.stem, 8)
    return parse_run([f"@{flag_file}", *FILES], world_size=ranks, extra_groups=groups)


def resolved(flag_file: Path) -> dict[str, Any]:
    """Every setting of an example that is not the default, derived ones included."""
    run = example(flag_file)
    settings = {name: value for name, value in run.diff_from_defaults().items() if value not in (*FILES, ("data",))}
    settings |= {"train_iters": run.train_iters, "num_microbatches": run.num_microbatches()}
    resolved_settings: dict[str, Any] = json.loads(json.dumps(settings))
    return resolved_settings


if __name__ == "__main__":
    found = {path.stem: resolved(path) for path in FLAG_FILES}
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
