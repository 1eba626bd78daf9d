"""A reward function of a user's: what it is called with, and one sentence for each thing that it does wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.config.grpo import RewardSettings
from megatron.errors import ConfigError
from megatron.training.rollouts.rewards import RewardFunction
from tests.harness.sentences import expect_error

FUNCTIONS = """
import os, subprocess, sys, time

def right(prompts, completions, completion_ids, answer, **others):
    print("x" * 1_000_000, flush=True)
    assert sys.stdin.read() == "" and "RANK" not in os.environ
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]

def raises(completions, **others):
    return 1 / 0

def hangs(completions, **others):
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)

def nan(completions, **others):
    return [1.0, float("nan")]

def words(completions, **others):
    return [1.0, "good"]

def few(completions, **others):
    return [1.0]

def one(completions, **others):
    return 1.0

def leaves(completions, **others):
    print("the model is bad", file=sys.stderr, flush=True)
    os._exit(3)

def exits(completions, **others):
    sys.exit("enough")

def overflows(completions, **others):
    return [1.0, 10**400]

def empties(completions, **others):
    completions.clear()
    return []

def writes(completions, **others):
    for file in range(3, 20):
        try:
            os.write(file, b"rewards\\n")
        except OSError:
            pass
    return [1.0, 1.0]

CALLS = []

def forks(completions, **others):
    CALLS.append(1)
    os.fork()
    return [float(len(CALLS))] * 2

def large(completions, **others):
    return [float(len(bytearray(1 << 33)))] * 2
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with functions."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def rewards(file: Path, name: str, *, timeout: float = 60.0) -> list[float | None]:
    """What a function says of two answers."""
    settings = RewardSettings(f"{file}:{name}", timeout, 1.0)
    function = RewardFunction(settings)
    try:
        return function(
            prompts=["1+1=", "2+2="], completions=["2", "5"], completion_ids=[[2], [5]], others={"answer": ["2", "4"]}
        )
    finally:
        function.close()


def test_a_function_gets_fields_and_may_print(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function prints must neither stop the run nor be taken for its answer."""
    monkeypatch.setitem(os.environ, "RANK", "3")
    assert rewards(file, "right") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["ZeroDivisionError", "line 10"]),
        ("overflows", ["completion 1", "'5'"]),
        ("empties", ["0 rewards for 2"]),
        ("writes", ["pipe"]),
        ("nan", ["nan", "completion 1", "'5'"]),
        ("words", ["'good'"]),
        ("few", ["1 rewards for 2"]),
        ("one", ["1.0"]),
        ("leaves", ["exit code 3", "the model is bad"]),
        ("exits", ["SystemExit: enough"]),
        ("large", ["--reward-memory-gb 1"]),
        ("missing", ["no function missing"]),
    ],
)
def test_each_mistake_is_a_sentence(file: Path, name: str, words: list[str]) -> None:
    """A run that goes on with such rewards would learn from nothing."""
    with expect_error(ConfigError, f"{file}:{name}", *words):
        rewards(file, name)


def test_a_function_that_hangs_is_ended(file: Path) -> None:
    """A hanging function stopped the whole run for ever; what it has started ends with it."""
    with expect_error(ConfigError, f"{file}:hangs", "--reward-timeout 0.2"):
        rewards(file, "hangs", timeout=0.2)


def test_a_copy_of_the_process_gives_no_rewards(file: Path) -> None:
    """A function that forks answered each question twice, so that all later answers got the rewards of earlier ones."""
    function = RewardFunction(RewardSettings(f"{file}:forks", 60.0, 1.0))
    try:
        for call in (1, 2, 3):
            time.sleep(0.05)  # in which a copy would answer
            assert function(prompts=[], completions=["2", "5"], completion_ids=[], others={}) == [call, call]
    finally:
        function.close()


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """Found before the first answer is generated."""
    file = tmp_path / "rewards.py"
    file.write_text("def reward(:\n", encoding="utf-8")
    with expect_error(ConfigError, f"{file}:reward", "SyntaxError", "line 1"):
        rewards(file, "reward")
    with expect_error(ConfigError, "--reward-function other.py", "NAME"):
        RewardSettings("other.py", 1.0, 1.0).place  # noqa: B018
    with expect_error(ConfigError, "--reward-function other.py:reward"):
        RewardSettings("other.py:reward", 1.0, 1.0).place  # noqa: B018
