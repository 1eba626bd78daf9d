"""Tools that take the flags of a training run take all of them, and know its ranks as the run does."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.run import RunConfig
from tests.unit.config.command_lines import parse, words
from tools import check_parity, inspect_dataset, prepare_cache

ARCHITECTURE = "--num-layers --hidden-size --num-attention-heads"


class WorkBegunError(Exception):
    """Where the tool would begin to work."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The run that each tool has understood; its work is left out."""
    found: list[RunConfig] = []

    def stop(config: RunConfig, *_: object) -> Any:
        found.append(config)
        raise WorkBegunError

    monkeypatch.setattr(check_parity, "report", stop)
    monkeypatch.setattr(inspect_dataset, "show_sample", stop)
    monkeypatch.setattr("megatron.training.run.data.offline_splits", stop)
    return found


@pytest.mark.parametrize(
    ("tool", "own"), [(check_parity, ""), (inspect_dataset, "--sample 3"), (prepare_cache, "")], ids=lambda each: ""
)
def test_architecture_of_a_checkpoint_is_taken(
    tool: Any, own: str, seen: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--use-checkpoint-args ended these tools with a traceback."""
    saved = parse("--num-layers 6").to_json()
    monkeypatch.setattr("megatron.training.checkpoints.loading.saved_config", lambda load, step: saved)
    flags = f"--use-checkpoint-args --load here --max-position-embeddings 64 {own}"
    with pytest.raises(WorkBegunError):
        tool.main(words(flags, without=ARCHITECTURE))
    assert seen[0].model.num_layers == 6


def test_ranks_are_those_of_the_launcher(seen: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE stands for the ranks of a layout that needs them."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(WorkBegunError):
        prepare_cache.main(words("--tensor-model-parallel-size 4"))
    assert (seen[0].world_size, seen[0].data_parallel_size) == (8, 2)
