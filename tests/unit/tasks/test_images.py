"""CAPTION and VQA: answers are those of whole forward passes, at any layout, and what can't be asked is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="pictures are read with the extra images")

from PIL import Image

from megatron.config.parse import parse_run
from megatron.config.vision import VisionConfig
from megatron.core.images.decoding import decoded
from megatron.core.images.prompts import CutImage
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError, DataError
from megatron.training.checkpoints.loading import saved_config
from megatron.training.checkpoints.saving import Saver
from megatron.training.evaluation.image_tasks.scoring import accuracy, bleu, most_frequent, normalized
from megatron.training.loop import train_and_save
from megatron.training.run.run import Run
from tasks import main as tasks
from tasks.registry import TASKS
from tasks.settings import TaskConfig
from tests.harness.ranks import run_ranks
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error
from tests.unit.training.evaluation.test_task_scores import Seen

VISION = (
    "--num-layers 2 --vision-model-type siglip --vision-num-layers 1 --vision-hidden-size 8 "
    "--vision-num-attention-heads 2 --vision-ffn-hidden-size 8 --img-h 8 --img-w 8 --patch-dim 4 --seq-length 24"
)
TEMPLATE = (
    "{% for m in messages %}{{ '7 ' if m.role == 'user' else ' ' }}{{ m.content }}{{ ' 8' if m.role == 'user' else "
    "' 9 ' }}{% endfor %}"
)


def write(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, which reads numbers and images, with files of questions beside pictures."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "said").mkdir()
    for number, color in enumerate(("red", "green", "blue", "white", "gray")):
        image = Image.new("RGB", (8 + number, 8), color)
        image.putpixel((number, 2), (7, 90, 200))
        image.save(folder / f"{color}.png")
    colors = ("red", "green", "blue", "white", "gray")
    questions = [{"image": f"{each}.png", "question": "3 1", "answers": ["4", "11"]} for each in colors]
    turns = [("human", "5 <image> 6"), ("gpt", "12"), ("human", "2"), ("gpt", "13 14")]
    talk = {"image": "red.png", "id": "talk", "conversations": [{"from": who, "value": said} for who, said in turns]}
    write(folder, "questions.jsonl", [*questions, talk])
    (folder / "more.json").write_text(json.dumps([questions[1]]))
    captions = [{"image": f"{each}.png", "caption": f"{10 + n} 11 12"} for n, each in enumerate(colors[:4])]
    several = {"image": "gray.png", "captions": ["20 21 22", "23 24"]}
    write(folder, "captions.jsonl", [*captions, several])
    (folder / "template.jinja").write_text(TEMPLATE)
    run = saved(folder, "model", VISION, "vlm")
    run.models[0].eval()
    RUNS[folder] = run
    return folder


RUNS: dict[Path, Run] = {}


def saved(folder: Path, name: str, flags: str, family: str) -> Run:
    run = tiny_run(ParallelContext.single(), f"--mock-data {flags} --save {folder}/{name}", family=FAMILIES[family])
    Saver(run).save()
    return run


def measured(context: ParallelContext, flags: list[str]) -> dict[str, float]:
    """The numbers of a task on this rank."""
    task = TASKS[flags[flags.index("--task") + 1]]
    groups, ranks = (TaskConfig, *FAMILIES["vlm"].groups), context.mesh.world_size
    config = parse_run(
        flags, world_size=ranks, extra_groups=groups, checkpoint_config=saved_config, defaults=task.defaults
    )
    return dict(task.load()(config, context).metrics)


def flags_of(folder: Path, task: str, *files: str) -> list[str]:
    words = ["--task", task, "--load", f"{folder}/model", "--valid-data", *(f"{folder}/{each}" for each in files)]
    return [*words, "--without-images", "--tokens-to-generate", "4", "--chat-template", f"{folder}/template.jinja"]


def logits_of(folder: Path, ids: list[int], image: str | None) -> torch.Tensor:
    """Log-probabilities from one forward pass of all ``ids``, in which -1 is a place of the image."""
    run, tokens = RUNS[folder], torch.tensor([ids])
    places = torch.where(tokens < 0, (tokens < 0).cumsum(1) - 1, -1)
    vision = VisionConfig.among(run.config.extra)
    images = None
    if image is not None:
        images = torch.from_numpy(CutImage.of(decoded((folder / image).read_bytes()), vision).tiles)
    with torch.no_grad():
        out = run.models[0](tokens.clamp(min=0), images=images, image_places=None if images is None else places)
    return out.logits()[0].log_softmax(-1)  # type: ignore[no-any-return]


def answer_of(folder: Path, ids: list[int], image: str | None) -> str:
    said = list[int]()
    for _ in range(4):
        said.append(int(logits_of(folder, [*ids, *said], image)[-1].argmax()))
    return " ".join(map(str, said))


def test_answers_and_losses_are_those_of_whole_forward_passes(folder: Path) -> None:
    """A picture at another place, a template that is not the model's, or a loss of the question's tokens, too."""
    flags = [*flags_of(folder, "VQA", "questions.jsonl", "more.json"), "--predictions-dir", f"{folder}/said"]
    found = measured(ParallelContext.single(), flags)
    said = [json.loads(line) for line in (folder / "said/questions.jsonl").read_text().splitlines()]
    image, ask = [-1] * 4, {"red": [7, 5, *[-1] * 4, 6, 8]}
    for each, color in zip(said, ("red", "green", "blue", "white", "gray"), strict=False):
        assert each["answer"] == answer_of(folder, [7, *image, 3, 1, 8], f"{color}.png")
        assert each["answer without images"] == answer_of(folder, [7, 3, 1, 8], None)
    first, second = said[5:]
    assert first["answer"] == answer_of(folder, ask["red"], "red.png") and first["id"] == second["id"] == "talk"
    assert second["answer"] == answer_of(folder, [*ask["red"], 12, 9, 7, 2, 8], "red.png")
    assert found["questions"] == 8 and (folder / "said/more.jsonl").read_text().count("\n") == 1

    captions = measured(ParallelContext.single(), flags_of(folder, "CAPTION", "captions.jsonl"))
    right = [[10, 11, 12], [11, 11, 12], [12, 11, 12], [13, 11, 12], [20, 21, 22], [23, 24]]
    names = ["red", "green", "blue", "white", "gray", "gray"]
    nats = 0.0
    for ids, name in zip(right, names, strict=True):
        table = logits_of(folder, [*image, *ids], f"{name}.png")[3:-1]
        nats -= float(table.gather(1, torch.tensor(ids)[:, None]).sum())
    assert captions["loss"] == pytest.approx(nats / 17, rel=1e-5) and captions["tokens"] == 17
    assert captions["captions"] == 5 and captions["loss without images"] != captions["loss"]


@pytest.mark.slow(reason="tests/unit/inference/test_images.py has layouts of the engine, tests of lm_eval their shares")
@pytest.mark.parametrize("layout", ["tp=2 pp=2", "dp=2", "cp=2", "dp=3"])
def test_scores_of_a_layout_are_those_of_one_rank(folder: Path, layout: str) -> None:
    """Questions that two ranks answered, or none, would be counted twice or not at all."""
    axes: dict[str, Any] = {axis: int(size) for axis, size in (word.split("=") for word in layout.split())}
    named = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
    }
    sizes = [word for axis, size in axes.items() if axis in named for word in (named[axis], str(size))]
    for task, file in (("VQA", "questions.jsonl"), ("CAPTION", "captions.jsonl")):
        flags = flags_of(folder, task, file)
        alone = measured(ParallelContext.single(), flags)
        for found in run_ranks(measured, [*flags, *sizes], **axes):
            assert found == pytest.approx(alone, rel=1e-5)


BAD: dict[str, tuple[Any, str]] = {
    "no such image": ({"image": "none.png", "question": "1", "answer": "2"}, "none.png"),
    "an image outside": ({"image": "../red.png", "question": "1", "answer": "2"}, "leads out"),
    "no image": ({"question": "1", "answer": "2"}, '"image"'),
    "no answer": ({"image": "red.png", "question": "1"}, '"answer"'),
    "an empty answer": ({"image": "red.png", "question": "1", "answers": [" "]}, "an answer"),
    "two kinds of answers": ({"image": "red.png", "question": "1", "answer": "1", "answers": ["2"]}, "both"),
    "a question alone": ({"image": "red.png", "conversations": [{"from": "human", "value": "<image>1"}]}, "answer"),
    "too long": ({"image": "red.png", "question": "1 " * 30, "answer": "1"}, "24"),
    "no object": ([1], "a list"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_what_cannot_be_asked_is_told_by_file_and_line(folder: Path, mistake: str) -> None:
    """Else a score would be that of other questions than the file's."""
    record, words = BAD[mistake]
    good = {"image": "red.png", "question": "3", "answer": "4"}
    path = write(folder, "bad.jsonl", [good, record])
    with expect_error(DataError, f"{path}:2", words, exit_code=2):
        measured(ParallelContext.single(), flags_of(folder, "VQA", "bad.jsonl"))


def test_a_model_of_texts_is_refused(folder: Path) -> None:
    """It would answer blindly, and its score would look like that of a poor reader of images."""
    saved(folder, "texts", "", "gpt")
    flags = [word.replace(f"{folder}/model", f"{folder}/texts") for word in flags_of(folder, "VQA", "questions.jsonl")]
    with expect_error(ConfigError, "--task VQA", exit_code=2):
        tasks.settings(flags, TASKS["VQA"])
    plain = flags_of(folder, "VQA", "questions.jsonl")
    with expect_error(ConfigError, "--chat-template", exit_code=2):
        measured(ParallelContext.single(), plain[: plain.index("--chat-template")])


def test_losses_are_refused_where_words_see_later_ones(folder: Path) -> None:
    """The sentence was about a request's prompt_logprobs, which no flag of the task is."""
    saved(folder, "prefix", f"{VISION} --image-attention prefix", "vlm")
    plain = flags_of(folder, "CAPTION", "captions.jsonl")
    flags = [each.replace(f"{folder}/model", f"{folder}/prefix") for each in plain]
    with expect_error(ConfigError, "--task CAPTION", "--image-attention prefix", "--task VQA", exit_code=2):
        measured(ParallelContext.single(), flags)


def test_answers_are_compared_as_in_vqa() -> None:
    """Rules of the benchmark: how an answer is spelled is not what it says, and three of ten people are enough."""
    assert normalized("The  Two dogs, and a cat!") == "2 dogs and cat"
    assert normalized("1,000.50 it's red-brown.") == "1000.50 its red brown"
    assert accuracy("Yes.", ["yes"]) == 1 and accuracy("no", ["yes", "maybe"]) == 0
    ten = ["2", "two", "2"] + ["3"] * 7
    assert accuracy("two", ten) == pytest.approx((3 * 2 / 3 + 7) / 10)
    assert accuracy("3", ten) == 1 and accuracy("4", ten) == 0
    assert most_frequent([["a b"], ["The A b"], ["c"]]) == pytest.approx(2 / 3)
    assert bleu(["a dog runs in the park"], [["the dog runs in a park"]]) == pytest.approx(1)
    assert bleu(["one two"], [["one two", "one and two or three"]]) == 0.0
    assert bleu(["one two"], [["one two"]]) is None
    long = ["a dog runs in the park with one ball", "two cats sleep on the old red sofa today"]
    right = [["a dog runs in the park with balls", "dogs run"], ["two cats sleep on a red sofa"]]
    from nltk.translate.bleu_score import corpus_bleu

    split = [[normalized(each).split() for each in texts] for texts in (*right, long)]
    assert bleu(long, right) == pytest.approx(corpus_bleu(split[:2], split[2]))
    assert bleu([*long, "red"], [*([each] for each in long), ["red"]]) == pytest.approx(1)


@pytest.mark.slow(reason="tests/unit/training/evaluation/test_task_scores.py has the way of scores into curves")
def test_scores_while_a_model_trains_are_those_of_its_checkpoint(folder: Path) -> None:
    """An engine that kept weights, or features, of an earlier step would score another model."""
    lines = [{"image": f"{each}.png", "prompt": "<image> 4", "completion": "5 6 7 8"} for each in ("red", "blue")]
    path = write(folder, "pairs.jsonl", lines)
    asked = f"--eval-tasks CAPTION={path} VQA={path} --eval-tasks-interval 1 --save {folder}/trained --save-interval 1"
    run = tiny_run(ParallelContext.single(), f"--mock-data {VISION} {asked}", family=FAMILIES["vlm"])
    seen = Seen(run)
    train_and_save(run)
    assert run.models[0].training and list(seen.numbers) == [1, 2, 3]
    for step in (2, 3):
        words = f"--task CAPTION --load {folder}/trained --ckpt-step {step} --valid-data {path}"
        found = measured(ParallelContext.single(), words.split())
        assert seen.numbers[step]["CAPTION loss"] == pytest.approx(found["loss"], rel=1e-5)
    with expect_error(DataError, f"{folder}/bad.jsonl:1"):
        bad = write(folder, "bad.jsonl", [{"image": "none.png", "prompt": "<image>", "completion": "5"}])
        wrong = f"--mock-data {VISION} --eval-tasks VQA={bad}"
        train_and_save(tiny_run(ParallelContext.single(), wrong, family=FAMILIES["vlm"]))
