"""Regular expressions of files: what each matches, in a limited time, and without a process where none is needed."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any

import pytest
import torch

from megatron.core.conversion import matching
from megatron.core.conversion.huggingface.compressed_tensors import read_compressed
from megatron.core.conversion.matching import Pattern, matches_of
from megatron.core.conversion.peft.settings import PeftSettings
from megatron.core.conversion.portable import LazyTensor
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

NAMES = [f"model.layers.{layer}.{name}" for layer in range(11) for name in ("attn.q_proj", "mlp.up_proj")]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of processes that are started."""
    started: list[Any] = []
    run = subprocess.run

    def counted(command: Any, **options: Any) -> Any:
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return started


def test_a_folder_starts_one_process_at_most(processes: list[Any]) -> None:
    """Loading took a process for each kind of pattern; names alone, as most folders have, need none."""
    plain = PeftSettings(
        "f", 4, 8, rank_pattern={"layers.1.attn.q_proj": 2, r"layers\.2\.attn.q_proj": 3}, targets=["q_proj", "up_proj"]
    )
    found = plain.of_modules(NAMES)
    assert [found[name].rank for name in NAMES[:6]] == [4, 4, 2, 4, 3, 4] and not processes
    several = PeftSettings(
        "f",
        4,
        8,
        rank_pattern={r"layers\.(1|2)\..*": 2},
        alpha_pattern={r".*\.10\.attn\.q_proj": 1, "up_proj": 2},
        excluded=r".*\.3\..*",
        targets=r".*\.(q|up)_proj",
        layers_patterns=["layers"],
    )
    found = several.of_modules(NAMES)
    assert len(processes) == 1
    assert [found[name].rank for name in NAMES[:6]] == [4, 4, 2, 2, 2, 2]
    assert (found[NAMES[20]].scale, found[NAMES[21]].scale, found[NAMES[0]].scale) == (0.25, 0.5, 2.0)
    assert {name for name in NAMES if not found[name].is_named} == {*NAMES[6:8]}


def test_a_whole_name_or_its_beginning(processes: list[Any]) -> None:
    """``target_modules: model.layers.1`` as a pattern is peft's name of one module, not of what begins like it."""
    patterns = [Pattern("model.layers.1", whole=True), Pattern("model.layers.1"), Pattern(NAMES[2], whole=True)]
    for more in (0, 1):
        found = matches_of([*patterns, *[Pattern("x*")] * more], NAMES, where="f")[:3]
        assert [[*each] for each in found] == [[], [*NAMES[2:4], *NAMES[20:]], [NAMES[2]]]
    assert len(processes) == 1


def test_layers_are_found_by_patterns() -> None:
    """``layers_pattern`` says where the number of a layer is: 1 isn't 10, nor is a name that has no number."""
    settings = PeftSettings("f", 4, 8, targets=["q_proj"], layers=[1, 3], layers_patterns=["blocks", "lay.*"])
    assert {name for name, own in settings.of_modules(NAMES).items() if own.is_named} == {NAMES[2], NAMES[6]}


@pytest.mark.parametrize(
    ("pattern", "facts"),
    [
        (r"(\w+\.?)+!", ("takes more than 0.1 s",)),
        ("(", ("is no regular expression",)),
        ("a" * 1001, ("1,001", "1,000")),
        ("a{4294967296}", ("is no regular expression",)),
    ],
    ids=["catastrophic", "none", "long", "large"],
)
def test_patterns_that_hang_or_are_none(pattern: str, facts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pattern of adapter_config.json or of quantization_config kept the loader busy for ever."""
    monkeypatch.setattr(matching, "SECONDS", 0.1 if pattern.endswith("!") else 60.0)
    with expect_error(CheckpointError, "f: ", *facts):
        matches_of([Pattern(pattern)], NAMES, where="f")


def test_targets_of_a_compressed_folder(processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of layers are named by patterns, which are matched once for all tensors and not once for each."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {str(each): {"targets": ["re:(a|b).*", rf"re:.*\.{each}\..*"], "weights": weights} for each in range(3)}
    tensors = {f"{name}.bias": LazyTensor((1,), torch.float32, partial(torch.zeros, 1)) for name in NAMES}
    settings = {"format": "int-quantized", "config_groups": groups}
    assert [*read_compressed(settings, tensors, where="f")[0]] == [*tensors]
    assert len(processes) == 1
    monkeypatch.setattr(matching, "SECONDS", 0.1)
    groups["0"]["targets"] = [r"re:(\w+\.?)+!"]
    with expect_error(CheckpointError, "f/config.json: targets: ", "takes more than 0.1 s"):
        read_compressed(settings, tensors, where="f")
