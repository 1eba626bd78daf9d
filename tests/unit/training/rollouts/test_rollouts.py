"""Training on answers that the model itself gives: at any layout, from the middle on, and when rewards fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.evaluation.parity import Part, parts_of
from megatron.training.loop import train_from_start_to_end
from megatron.training.rollouts.collecting import RolloutError
from megatron.training.rollouts.reference import ReferenceWeights
from megatron.training.rollouts.stored import read
from megatron.training.run.run import Run
from tests.harness import run_ranks
from tests.harness.runs import axes_of, context_of, saved_model, tiny_config, tiny_run
from tests.harness.sentences import expect_error

GPT = FAMILIES["gpt"].train_spec
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"
SIZES = (
    "--grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 2 --grpo-max-new-tokens 6 --grpo-kl-beta 0.05 "
    "--micro-batch-size 2 --global-batch-size 8 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2 --lr 1e-2"
)
"""Four steps on the answers that are made at a time."""
REWARDS = """
def low(completions, bonus, **others):
    numbers = [[int(word) for word in text.split()] for text in completions]
    return [sum(each < 25 for each in row) / 6 + more for row, more in zip(numbers, bonus)]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model in ``saved``, prompts, and a reward for numbers below 25."""
    folder = tmp_path_factory.mktemp("base")
    saved_model(folder, "gpt", flags=f"--seed 5 {NO_DROPOUT}")
    write_prompts(folder / "prompts.jsonl", 7)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return folder


def write_prompts(path: Path, count: int) -> None:
    """Prompts of some numbers, one of which is too long."""
    lines = [{"prompt": " ".join(map(str, range(n + 1))), "bonus": n / 10} for n in (*range(count), 12)]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")


def flags_of(base: Path, more: str = "") -> str:
    """A run from the model."""
    return (
        f"--pretrained-checkpoint {base}/saved --tokenizer-type NullTokenizer {NO_DROPOUT} --perform-rl-step "
        f"--grpo-prompts {base}/prompts.jsonl --reward-function {base}/rewards.py:low {SIZES} {more}"
    )


def train(flags: str) -> Run:
    """The whole run, in fp64."""
    return train_from_start_to_end(tiny_config(flags), GPT, ParallelContext.single(dtype=torch.float64), started=0.0)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {entry.name: entry.tensor.clone() for entry in run.model_state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def whole(base: Path) -> dict[str, torch.Tensor]:
    """Weights after seven steps, the last three of which are on the second answers."""
    return weights(train(flags_of(base, "--train-iters 7")))


def test_a_run_goes_on_in_the_middle_of_answers(base: Path, tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    """A run that goes on has other weights than those that gave the answers, and than the initial ones: ratios and
    divergences of its own would begin at 1 and 0.
    """
    saving = f"--save {tmp_path}/run --load {tmp_path}/run --save-interval 3"
    train(flags_of(base, f"--train-iters 7 --exit-interval 3 {saving}"))
    [kept] = (tmp_path / "run").glob("iter_*/answers.npz")
    for answer in read(kept):  # these weights are both those that gave them and the initial ones
        assert answer.old is not None and answer.reference is not None and max(answer.old) < 0
        assert np.array_equal(answer.old, answer.reference)
    again = train(flags_of(base, f"--train-iters 7 {saving}"))
    assert again.progress.iteration == 7
    assert same(weights(again), whole)


def test_initial_weights_are_there_for_a_while(base: Path) -> None:
    """What has been learned must be back when they have been used."""
    run = tiny_run(ParallelContext.single(dtype=torch.float64), flags_of(base))
    initial, reference = weights(run), ReferenceWeights(run, None)
    for entry in run.model_state():
        entry.tensor.add_(1.0)
    learned = weights(run)
    with reference.in_place():
        assert same(weights(run), initial)
    assert same(weights(run), learned)


def test_a_checkpoint_is_continued_as_it_was(base: Path, tmp_path: Path) -> None:
    """Other prompts, other sizes in the middle of answers, or other initial weights are another run."""
    mine = tmp_path / "base"
    shutil.copytree(base, mine)
    saving = f"--train-iters 7 --save {tmp_path}/run --load {tmp_path}/run --save-interval 3"
    train(flags_of(mine, f"{saving} --exit-interval 3"))
    with expect_error(CheckpointError, "--grpo-group-size 4"):
        train(flags_of(mine, f"{saving} --grpo-group-size 8"))
    write_prompts(mine / "prompts.jsonl", 6)
    with expect_error(CheckpointError, f"--grpo-prompts {mine}/prompts.jsonl"):
        train(flags_of(mine, saving))
    write_prompts(mine / "prompts.jsonl", 7)
    shutil.rmtree(mine / "saved")
    with expect_error(CheckpointError, f"{mine}/saved", "--grpo-kl-beta 0"):
        train(flags_of(mine, saving))


def test_a_reward_that_fails_costs_nothing(
    base: Path, tmp_path: Path, whole: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing mistake in a rare branch ended a run hours after its last checkpoint."""
    rare = "CALLS = []\n" + REWARDS.replace(
        "    numbers", "    CALLS.append(1)\n    assert len(CALLS) < 2, 'never seen'\n    numbers"
    )
    (tmp_path / "rewards.py").write_text(rare, encoding="utf-8")
    saving = f"--train-iters 7 --save {tmp_path}/run --load {tmp_path}/run"
    flags = flags_of(base, saving).replace(f"{base}/rewards.py", f"{tmp_path}/rewards.py")
    with expect_error(RolloutError, f"{tmp_path}/rewards.py:low", "never seen"):
        train(flags)
    assert "successfully saved checkpoint from iteration       4" in capsys.readouterr().out
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    assert same(weights(train(flags)), whole)


def at_layout(context: ParallelContext, flags: str) -> tuple[dict[str, list[Part]], float]:
    """This rank's parts of the weights after the run."""
    config = tiny_config(flags, ranks=context.mesh.world_size)
    run = train_from_start_to_end(config, GPT, context_of(config, context), started=0.0)
    return parts_of(run.whole_model_state(), run.context.mesh), 0.0


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
        pytest.param(
            "--pipeline-model-parallel-size 2 --context-parallel-size 2 --zero-stage 1", marks=pytest.mark.slow
        ),
    ],
)
def test_answers_are_the_same_at_any_layout(base: Path, whole: dict[str, torch.Tensor], layout: str) -> None:
    """Data-parallel ranks answer prompts of their own, with random numbers of the prompt's: other ones would be other
    samples, and an initial model that isn't whole another divergence.
    """
    flags = flags_of(base, f"--train-iters 7 {layout}")
    config = tiny_config(flags, ranks=4)
    ranks = run_ranks(at_layout, flags, **axes_of(config), dtype=torch.float64)
    for found, _ in ranks:
        for name, parts in found.items():
            for part in parts:
                here = whole[f"model.{name}"][tuple(slice(o, o + n) for o, n in zip(part.offsets, part.values.shape))]
                torch.testing.assert_close(part.values, here, rtol=0, atol=1e-9, msg=name)


@pytest.mark.slow
def test_rewards_rise(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is rewarded becomes likelier, with adapters beside a frozen base, too."""
    train(flags_of(base, "--train-iters 40 --lora-rank 4 --lr 5e-2 --grpo-iterations 1 --log-interval 40"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("answers ")]
    rewards = [float(line.split("reward ")[1].split()[0]) for line in lines]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "1", "bonus": 1', ["prompts.jsonl:9", "not JSON"]),
        ('{"text": "1"}', ["prompts.jsonl:9", "prompt"]),
        ('{"prompt": "1"}', ["prompts.jsonl:9", '"bonus"']),
        ('{"messages": [], "bonus": 1}', ["prompts.jsonl:9", "messages"]),
        ('{"messages": [{"role": "user", "content": "1"}], "bonus": 1}', ["prompts.jsonl:9", "chat template"]),
        ('{"prompt": "1", "bonus": 1, "completions": 2}', ["prompts.jsonl:9", "completions"]),
    ],
)
def test_prompts_are_checked(base: Path, tmp_path: Path, line: str, words: list[str]) -> None:
    """A line that is skipped, or read as something else, would change what is learned."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text((base / "prompts.jsonl").read_text() + line + "\n", encoding="utf-8")
    with expect_error(DataError, *words):
        train(flags_of(base, f"--train-iters 1 --grpo-prompts {prompts}"))


def test_settings_that_cannot_work_are_refused(base: Path) -> None:
    """Each would train something else than what was asked for, or nothing."""
    for more, words in {
        "--global-batch-size 6": ["--global-batch-size 6", "16"],
        "--grpo-max-new-tokens 16": ["--grpo-max-new-tokens 16", "--seq-length 16"],
        "--hidden-dropout 0.1": ["--hidden-dropout 0.1"],
        "--data-path x": ["--data-path"],
        "--preference-loss dpo": ["--preference-loss"],
    }.items():
        with expect_error(ConfigError, *words):
            tiny_config(flags_of(base, more))
    with expect_error(ConfigError, "--grpo-group-size 4"):
        tiny_config("--mock-data --grpo-group-size 4")
    with expect_error(ConfigError, "--grpo-prompts", "--reward-function"):
        tiny_config(f"--load x --perform-rl-step {SIZES}")
