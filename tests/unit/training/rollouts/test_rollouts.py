"""Training on answers that the model itself gives: at any layout, from the middle on, and when rewards fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.library.opening import load
from megatron.training.evaluation.parity import Part, parts_of
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.metrics import Evaluation
from megatron.training.rollouts.rated import RolloutError
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
    held_out = [{"prompt": f"{n} {n + 1}", "bonus": 0.5} for n in range(20, 25)]
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in held_out), encoding="utf-8")
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


def evaluated(base: Path) -> str:
    """Flags of a run that answers held-out prompts at random, which is told apart by a few bits of the weights."""
    return (
        f"--grpo-eval-prompts {base}/held_out.jsonl --grpo-eval-temperature 0.7 --eval-interval 2 --eval-iters 1 "
        "--train-iters 7"
    )


def train(flags: str, rewards: dict[int, float] | None = None) -> Run:
    """The whole run, in fp64; ``rewards`` gets those of held-out prompts, by iteration."""

    def note(run: Run, found: Mapping[str, Evaluation]) -> None:
        if rewards is not None:
            total, count = found[""].totals["reward"]
            rewards[run.progress.iteration] = total / count

    context = ParallelContext.single(dtype=torch.float64)
    return train_from_start_to_end(tiny_config(flags), GPT, context, started=0.0, evaluated=note)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {entry.name: entry.tensor.clone() for entry in run.model_state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def held_out(base: Path) -> dict[int, float]:
    """Rewards of held-out prompts in a run of seven steps."""
    rewards = dict[int, float]()
    train(flags_of(base, evaluated(base)), rewards)
    assert list(rewards) == [0, 2, 4, 6, 7] and len({*rewards.values()}) > 2
    return rewards


@pytest.fixture(scope="module")
def whole(base: Path) -> dict[str, torch.Tensor]:
    """Weights after seven steps, the last three of which are on the second answers."""
    return weights(train(flags_of(base, "--train-iters 7")))


def test_a_run_goes_on_in_the_middle_of_answers(
    base: Path, tmp_path: Path, whole: dict[str, torch.Tensor], held_out: dict[int, float]
) -> None:
    """A run that goes on has other weights than those that gave the answers, and than the initial ones: ratios and
    divergences of its own would begin at 1 and 0. Held-out prompts change nothing of it, and get the same answers.
    """
    saving = f"{evaluated(base)} --save {tmp_path}/run --load {tmp_path}/run --save-interval 3"
    rewards = dict[int, float]()
    train(flags_of(base, f"--exit-interval 3 {saving}"), rewards)
    [kept] = (tmp_path / "run").glob("iter_*/answers.npz")
    for answer in read(kept):  # these weights are both those that gave them and the initial ones
        assert answer.old is not None and answer.reference is not None and max(answer.old) < 0
        assert np.array_equal(answer.old, answer.reference)
    again = train(flags_of(base, saving), rewards)
    assert again.progress.iteration == 7 and rewards == held_out
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


def test_an_evaluation_that_fails_is_made_up_for(base: Path, tmp_path: Path, held_out: dict[int, float]) -> None:
    """The run went on with the step after it, and the curve of held-out rewards had a hole."""
    rewards, wrong = (
        dict[int, float](),
        REWARDS.replace("    numbers", "    assert len(bonus) != 5, 'held out'\n    numbers"),
    )
    saving = f"{evaluated(base)} --save {tmp_path}/run --load {tmp_path}/run"
    flags = flags_of(base, saving).replace(f"{base}/rewards.py", f"{tmp_path}/rewards.py")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    train(f"{flags} --exit-interval 1", rewards)
    (tmp_path / "rewards.py").write_text(wrong, encoding="utf-8")
    with expect_error(RolloutError, f"{tmp_path}/rewards.py:low", "held out"):
        train(flags, rewards)
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    train(flags, rewards)
    assert rewards == held_out
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = {each["iteration"]: each["losses"]["reward"] for each in events if each["event"] == "validation"}
    assert told == held_out


def at_layout(context: ParallelContext, flags: str) -> tuple[dict[str, list[Part]], dict[int, float]]:
    """This rank's parts of the weights after the run, and rewards of held-out prompts."""
    config, rewards = tiny_config(flags, ranks=context.mesh.world_size), dict[int, float]()

    def note(run: Run, found: Mapping[str, Evaluation]) -> None:
        total, count = found[""].totals["reward"]
        rewards[run.progress.iteration] = total / count

    run = train_from_start_to_end(config, GPT, context_of(config, context), started=0.0, evaluated=note)
    return parts_of(run.whole_model_state(), run.context.mesh), rewards


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
        pytest.param(
            "--pipeline-model-parallel-size 2 --context-parallel-size 2 --zero-stage 1", marks=pytest.mark.slow
        ),
    ],
)
def test_answers_are_the_same_at_any_layout(
    base: Path, whole: dict[str, torch.Tensor], held_out: dict[int, float], layout: str
) -> None:
    """Data-parallel ranks answer prompts of their own, with random numbers of the prompt's: other ones would be other
    samples, and an initial model that isn't whole another divergence.
    """
    flags = flags_of(base, f"{evaluated(base)} {layout}")
    config = tiny_config(flags, ranks=4)
    ranks = run_ranks(at_layout, flags, **axes_of(config), dtype=torch.float64)
    for found, rewards in ranks:
        assert rewards == held_out
        for name, parts in found.items():
            for part in parts:
                here = whole[f"model.{name}"][tuple(slice(o, o + n) for o, n in zip(part.offsets, part.values.shape))]
                torch.testing.assert_close(part.values, here, rtol=0, atol=1e-9, msg=name)


def test_held_out_prompts_are_answered_by_the_likeliest_tokens(base: Path, tmp_path: Path) -> None:
    """Without training, too: the answers that the saved model gives to its users, and their mean reward."""
    model = load(base / "saved")
    rewards, expected = dict[int, float](), []
    for line in (base / "held_out.jsonl").read_text().splitlines():
        prompt = [int(word) for word in json.loads(line)["prompt"].split()]
        answer = model.generate(prompt, max_new_tokens=6, temperature=0.0)
        expected.append(sum(each < 25 for each in answer) / 6 + 0.5)
    held_out = f"--grpo-eval-prompts {base}/held_out.jsonl --eval-iters 1"
    train(flags_of(base, f"--skip-train {held_out}"), rewards)
    assert rewards == {0: pytest.approx(sum(expected) / len(expected))}
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1"}\n', encoding="utf-8")
    with expect_error(DataError, f"{other}:1", f"{base}/prompts.jsonl:1", '"bonus"'):
        train(flags_of(base, held_out.replace(f"{base}/held_out.jsonl", str(other))))


@pytest.mark.slow  # 50 steps; what the steps compute is tested against trl and at every layout
@pytest.mark.parametrize(("how", "least"), [("--lr 1e-2", 1.2), ("--lr 2e-2 --lora-rank 4", 1.05)])
def test_rewards_rise(base: Path, how: str, least: float) -> None:
    """What is rewarded becomes likelier: of numbers, 0.43 are below 25 before, 0.9 after. Adapters beside a frozen base
    don't get as far, as the last norm bounds its logits.
    """
    sizes = "--grpo-prompts-per-step 8 --grpo-group-size 8 --global-batch-size 64 --micro-batch-size 16"
    flags = f"{sizes} --grpo-iterations 1 --grpo-kl-beta 0 --grpo-eval-prompts {base}/prompts.jsonl {how}"
    rewards = dict[int, float]()
    train(
        flags_of(base, f"{evaluated(base)} {flags} --grpo-eval-temperature 1 --train-iters 25 --eval-interval 25"),
        rewards,
    )
    assert rewards[0] < 0.75 and rewards[25] > least


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
        "--grpo-eval-prompts x.jsonl": ["--eval-iters 0", "--grpo-eval-prompts"],
        "--eval-iters 1 --grpo-eval-temperature 0.5": ["--grpo-eval-temperature 0.5", "--grpo-eval-prompts"],
        "--eval-iters 1 --skip-train": ["--skip-train", "--grpo-eval-prompts"],
    }.items():
        with expect_error(ConfigError, *words):
            tiny_config(flags_of(base, more))
    with expect_error(ConfigError, "--grpo-group-size 4"):
        tiny_config("--mock-data --grpo-group-size 4")
    with expect_error(ConfigError, "--grpo-prompts", "--reward-function"):
        tiny_config(f"--load x --perform-rl-step {SIZES}")
