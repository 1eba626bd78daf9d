"""``megatron COMMAND …``, also ``python -m megatron`` and ``torchrun -m megatron``: runs one of the programs."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

from megatron.config.suggestions import did_you_mean
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError, run_command

PROGRAMS = {
    **{f"pretrain-{name}": f"pretrain_{name}.py" for name in (*FAMILIES, "mamba", "hybrid")},
    "train-tokenizer": "tools/train_tokenizer.py",
    "preprocess-data": "tools/preprocess_data.py",
    "preprocess-images": "tools/preprocess_images.py",
    "preprocess-sft": "tools/preprocess_sft.py",
    "preprocess-preferences": "tools/preprocess_preferences.py",
    "merge-datasets": "tools/merge_datasets.py",
    "inspect-dataset": "tools/inspect_dataset.py",
    "prepare-cache": "tools/prepare_cache.py",
    "make-stdlib-corpus": "tools/make_stdlib_corpus.py",
    "check-parity": "tools/check_parity.py",
    "rehearse": "tools/rehearse.py",
    "print-schedule": "tools/print_schedule.py",
    "plot-loss": "tools/plot_loss.py",
    "report": "tools/report.py",
    "inspect-checkpoint": "tools/checkpoint/inspect_checkpoint.py",
    "convert-checkpoint": "tools/checkpoint/convert.py",
    "upcycle-checkpoint": "tools/checkpoint/upcycle.py",
    "add-vision-encoder": "tools/checkpoint/add_vision_encoder.py",
    "prune-checkpoint": "tools/checkpoint/prune.py",
    "average-checkpoints": "tools/checkpoint/average.py",
    "check-health": "tools/check_health.py",
    "check-launch": "tools/check_launch.py",
    "check-widths": "tools/check_widths.py",
    "quantize": "tools/quantize.py",
    "score-with-teacher": "tools/score_with_teacher.py",
    "evaluate": "tasks/main.py",
    "lm-eval": "tasks/lm_eval.py",
    "generate-text": "tools/text_generation_cli.py",
    "serve-text": "tools/run_text_generation_server.py",
    "fill-mask": "tools/fill_mask.py",
    "fill-spans": "tools/fill_spans.py",
}
"""Command -> its file, below the folder of programs."""
BY_FILE = {Path(path).stem.replace("_", "-"): path for path in PROGRAMS.values() if path != "tasks/main.py"}
"""Command named after its file -> the file: documents say ``python tools/text_generation_cli.py``."""


def programs_folder() -> Path:
    """Where the programs are: in a wheel beside this file, in a checkout its root."""
    in_a_wheel = Path(__file__).parent / "programs"
    return in_a_wheel if in_a_wheel.is_dir() else Path(__file__).parents[1]


def main() -> None:
    """Run the program that the first word names, with the other words as its command line."""
    run_command(_run)


def _run() -> None:
    command, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if command in ("--help", "-h"):
        print("\n".join(_help()))  # noqa: T201  (what --help is for)
        return
    known = {**BY_FILE, **PROGRAMS}
    program = known.get(command.replace("_", "-"))
    if program is None:
        raise ConfigError(f"there is no command {command}{did_you_mean(command, known)}; megatron --help lists them")
    path = str(programs_folder() / program)
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def _help() -> list[str]:
    lines = [
        "usage: megatron COMMAND --flag value ...",
        "       torchrun --nproc_per_node=N -m megatron COMMAND ...",
        "",
    ]
    for command, path in PROGRAMS.items():
        described = ast.get_docstring(ast.parse((programs_folder() / path).read_text(encoding="utf-8"))) or ""
        lines.append(f"  {command:<19} {re.split('[.:;]', described)[0]}")
    return [*lines, "", "megatron COMMAND --help shows the flags of a command."]


if __name__ == "__main__":
    main()
