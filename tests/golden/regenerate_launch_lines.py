"""Write what becomes of public launch lines: python -m tests.golden.regenerate_launch_lines; review the difference."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.parse import parse_run
from megatron.config.rules.sizes import length_in
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError

GOLDEN = Path(__file__).with_name("launch_lines.txt")


@dataclass(frozen=True)
class LaunchLine:
    """A block of the file; ``config`` is the text of DeepSpeed's configuration file, or nothing."""

    title: str
    config: str
    flags: str
    outcome: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Ranks the line is started on."""
        return int(self.title.split()[-2])

    @property
    def family(self) -> str:
        """The model family whose program the line starts."""
        return next((name for name in FAMILIES if f", {name}, " in self.title), "gpt")


def read_launch_lines() -> list[LaunchLine]:
    """Every block of the file."""
    blocks = [block.splitlines() for block in GOLDEN.read_text(encoding="utf-8").split("\n\n")]
    return [
        LaunchLine(
            title=lines[0],
            config="".join(line for line in lines if line.startswith("{")),
            flags="".join(line for line in lines if line.startswith("--")),
            outcome=tuple(line for line in lines if line[:2] in ("= ", "+ ", "- ")),
        )
        for lines in blocks
        if lines[0].startswith("$")
    ]


def outcome_of(line: LaunchLine, folder: Path) -> tuple[str, ...]:
    """What the line resolves to and which flags are remarked upon, or why it is refused."""
    path = folder / "ds.json"
    path.write_text(line.config, encoding="utf-8")
    words = shlex.split(line.flags.replace("DS_CONFIG", str(path)))
    try:
        run = parse_run(words, world_size=line.ranks, extra_groups=FAMILIES[line.family].groups)
    except ConfigError as error:
        sentences = re.sub(r"^\d+ problems in the settings:\n|^ +\d+\. ", "", str(error), flags=re.M)
        return tuple(f"- {sentence}" for sentence in sentences.replace(str(path), "DS_CONFIG").splitlines())
    remarked = " ".join(dict.fromkeys(flag for note in run.notes for flag in _subject(note)))
    return (f"= {'; '.join(_summary(run))}", *([f"+ {remarked}"] if remarked else []))


def _subject(note: str) -> list[str]:
    """The flags that a remark is about: those it begins with."""
    head = re.split(r": | ha[sv]e? no effect| with | without ", note)[0]
    return re.findall(r"--[\w-]+", head)


def _summary(run: RunConfig) -> Iterator[str]:
    model, sizes, optimizer, training = run.model, run.parallel, run.optimizer, run.training
    yield f"{run.num_layers} layers of {model.hidden_size}, ffn {model.ffn_hidden_size} {model.nonlinearity}"
    yield f"{model.num_attention_heads} heads, {model.num_query_groups} groups"
    yield f"{model.position_embedding_type} {model.rotary_base:g}, {model.normalization} {model.norm_epsilon:g}"
    yield f"{run.tokenizer.tokenizer_type}"
    yield f"tp {sizes.tensor_model_parallel_size} pp {sizes.pipeline_model_parallel_size} dp {run.data_parallel_size}"
    yield f"ZeRO {sizes.zero_stage}, {run.precision.params_dtype}"
    yield f"recompute {training.recompute_granularity} {training.recompute_method or ''}".strip()
    yield f"{training.global_batch_size} samples of {run.data.seq_length} in {training.micro_batch_size}"
    yield f"{run.train_iters} steps"
    warmup = optimizer.lr_warmup_fraction or length_in(run, "samples", "lr_warmup")
    yield f"lr {optimizer.lr or 0:g} to {optimizer.min_lr:g}, {optimizer.lr_decay_style}, warm-up {warmup:g}"
    decay = length_in(run, "samples", "lr_decay") or run.train_samples
    yield f"decay over {decay} samples, clip {optimizer.clip_grad:g}"


def write() -> None:
    """Put today's outcome of every line into the file."""
    text = GOLDEN.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for line in read_launch_lines():
            start = text.index(line.title + "\n")
            end = text.find("\n\n", start)
            parts = [line.title, *([line.config] if line.config else []), line.flags, *outcome_of(line, Path(folder))]
            text = text[:start] + "\n".join(parts) + (text[end:] if end >= 0 else "\n")
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
