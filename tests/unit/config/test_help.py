"""--help: what the command alone has comes first, with the defaults of that command, as wide as the terminal."""

from __future__ import annotations

import pytest

from megatron.config.data import DataConfig
from megatron.config.help import format_help
from megatron.config.moe import MoEConfig
from megatron.config.parse import parse_run
from megatron.config.trained_model import TrainedModelConfig
from tasks.settings import TaskConfig
from tests.harness.sentences import check_line


def test_a_task_opens_with_its_own_flags_and_requires_only_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """tasks/main.py --help began with --num-layers N (required), which the checkpoint gives."""
    defaults = {"use_checkpoint_args": True, "micro_batch_size": 8}
    with pytest.raises(SystemExit):
        parse_run(["--help"], prog="tasks/main.py", extra_groups=(TaskConfig,), defaults=defaults)
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("task: Flags of tasks/main.py alone.") < text.index("model: The transformer.")
    check_line(text, "--num-layers")
    assert "(default: 8)" in text.partition("--micro-batch-size N")[2][:80]
    check_line(text.partition("--use-checkpoint-args")[2][:120], "default")
    assert text.count("(required)") == 1  # --task


@pytest.mark.parametrize("columns", [72, 80, 160, 250])
def test_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 80 to 120 columns whatever there was room for."""
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = max(map(len, format_help([DataConfig], prog="pretrain_gpt.py").splitlines()))
    assert columns - 15 < widest <= max(columns, 90)


def test_headings_are_words() -> None:
    """Not "trainedmodel", and not "mo e"."""
    assert "\nmoe: Mixture of experts" in format_help([MoEConfig], prog="tool")
    assert "\ntrained model: " in format_help([TrainedModelConfig], prog="tool")
