"""Every benchmark with its peers and its goal: what ``python -m benchmarks`` lists, and what ratios are judged by."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PARTS = {
    "catalogue", "results", "training_families", "gpu_checks", "gpu_plain", "gpu_ranks", "gpu_rehearsal", "gpu_steps",
}  # fmt: skip
"""Modules that benchmarks import, and that are none themselves."""


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark compares. ``ratio``: of what; the goal is a bound of it, or None where it is watched alone."""

    peers: str
    ratio: str
    at_least: float | None = None
    at_most: float | None = None
    needs_gpu: bool = False

    @property
    def goal(self) -> str:
        """The bound in words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "none" if self.at_most is None else f"at most {self.at_most:g}"

    def reaches(self, ratio: float) -> bool | None:
        """Whether a ratio is within the bound; None without one."""
        if self.at_least is not None:
            return ratio >= self.at_least
        return None if self.at_most is None else ratio <= self.at_most


COUNTED = 1 + 1e-9  # ratios of whole numbers of bytes, which must be equal
CATALOGUE = {
    "against_commit": Benchmark("an earlier commit (the last one)", "time of a step over its", at_most=1.03),
    "attention_windows": Benchmark("full causal attention", "time with a narrow window over its", at_most=1.0),
    "checkpoint_conversion": Benchmark("transformers, loading and saving", "speed over its", at_least=1.0),
    "checkpoints": Benchmark("torch.save and torch.load", "throughput over theirs", at_least=0.8),
    "communication": Benchmark("the textbook", "bytes sent over its figure", at_most=COUNTED),
    "context_parallel": Benchmark("the textbook", "bytes sent over its figure", at_most=COUNTED),
    "distillation": Benchmark("a plain step and the teacher's forward pass", "time of a step over theirs", at_most=1.6),
    "estimate": Benchmark("a rehearsal on a pretended GPU", "counted over estimated, or inverse", at_most=1.02),
    "evaluation": Benchmark("transformers, as written and at its best", "speed over its", at_least=1.0),
    "experts": Benchmark("transformers' Mixtral block", "speed over its", at_least=1.1),
    "fp8": Benchmark("bf16", "training loss over that of bf16", at_most=1.02),
    "generation": Benchmark("transformers' generate, and a loop by hand", "speed over theirs", at_least=1.0),
    "gpu": Benchmark("plain PyTorch, also compiled", "speed over its best", at_least=1.0, needs_gpu=True),
    "grpo": Benchmark("transformers' Llama as trl takes it", "speed of a GRPO round over its", at_least=1.0),
    "guards": Benchmark("the same step without guards", "time of the processor over its", at_most=1.01),
    "hybrid_generation": Benchmark("transformers' generate of Nemotron-H", "speed over its", at_least=1.3),
    "hybrid_step": Benchmark("transformers' Nemotron-H at its best", "speed of a training step over its", at_least=1.6),
    "images": Benchmark("a bare loop of Pillow, and transformers' LLaVA", "speed over its target", at_least=1.0),
    "index_building": Benchmark("megatron-core's compiled helper", "time over its target", at_most=1.0),
    "lora": Benchmark("peft", "speed of a step with adapters over its", at_least=1.2),
    "muon": Benchmark("torch.optim.Muon", "time of an update over its", at_most=0.25),
    "node_copies": Benchmark("checkpoints on a disk", "their pause, or recovery, over that in memory"),
    "overlap": Benchmark("the same run without overlap", "time of a step on slow links over its", at_most=1.0),
    "parallel_efficiency": Benchmark("one rank of two threads", "efficiency of data parallelism", at_least=0.9),
    "pipeline_bubble": Benchmark("the simulator", "time of a step over the simulated one", at_most=1.05),
    "preferences": Benchmark("transformers' Llama as trl takes it", "speed of a DPO step over its", at_least=1.2),
    "preprocessing": Benchmark("a bare loop over the tokenizers library", "speed over its", at_least=0.95),
    "quantizing": Benchmark("llm-compressor, or transformers' load and save", "speed over its", at_least=1.0),
    "recomputation": Benchmark("a rehearsal on a pretended GPU", "counted over estimated, or inverse", at_most=1.02),
    "sampler": Benchmark("greedy choice", "time over its"),
    "samples": Benchmark("mock data", "time over its target, and of a step over that on mock data", at_most=1.05),
    "serving": Benchmark("the engine without a server", "time over its", at_most=1.05),
    "slow_link": Benchmark("data parallelism over the same link", "time of a step over its", at_most=1.0),
    "startup": Benchmark("none: a time that feels immediate", "time over its target", at_most=1.0),
    "state_space": Benchmark("transformers' Mamba-2 mixer", "speed between projections over its best", at_least=2.0),
    "training_step": Benchmark("transformers, and of GPT plain PyTorch", "speed over the best peer's", at_least=1.2),
    "zero": Benchmark("ZeRO 1, and torch's FSDP2", "time of a step over ZeRO 1's, memory over FSDP2's", at_most=1.1),
}  # fmt: skip


def first_line(name: str) -> str:
    """What a benchmark measures: the first sentence of its docstring, without importing it."""
    described = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(described.partition("\n\n")[0].split())
