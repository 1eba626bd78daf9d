"""RACE, MNLI and QQP as a user runs them: from a pretrained BERT to scores, on several layouts, stopped and resumed."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint
from tests.end_to_end.commands import ROOT, assert_same_tensors, run, tensors
from tests.harness.sentences import check_line
from tests.tiers import tiers

TEXT = "the a cat sat on mat and dog ran to see what it was about but no one came by night or day so far"
WORDS = TEXT.split()
SIGNS = {"contradiction": "cat", "entailment": "dog", "neutral": "mat"}
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --num-workers 0 --init-method-std 0.1 "
    "--lr 2e-3"
)
TUNE = (
    "--num-workers 0 --micro-batch-size 4 --global-batch-size 8 --init-method-std 0.1 --lr 5e-3 "
    "--lr-decay-style constant --log-interval 100"
)


def sentence(rng: random.Random, *, without: tuple[str, ...] = ()) -> str:
    return " ".join(rng.choice([word for word in WORDS if word not in without]) for _ in range(5))


def mnli(rng: random.Random, count: int, *, wrong: float = 0.0) -> str:
    """A word of the second sentence gives the answer away, unless the label is ``wrong``."""
    rows = ["index\tpromptID\tpairID\tgenre\tb1\tb2\tp1\tp2\tsentence1\tsentence2\tlabel1\tgold_label"]
    for number in range(count):
        label = rng.choice(list(SIGNS))
        sign = rng.choice(list(SIGNS.values())) if rng.random() < wrong else SIGNS[label]
        second = f"{sign} {sentence(rng, without=tuple(SIGNS.values()))}"
        rows.append(f"{number}\t1\t1n\tg\t( )\t( )\t( )\t( )\t{sentence(rng)}\t{second}\t{label}\t{label}")
    return "".join(row + "\n" for row in rows)


def race(rng: random.Random, count: int) -> str:
    """The right option is the one with a cat in it."""
    lines = []
    for _ in range(count):
        options = [rng.choice(["dog", "mat", "night", "day"]) for _ in range(4)]
        right = rng.randrange(4)
        options[right] = "cat"
        content = {"article": sentence(rng), "questions": ["it was a _ ."], "options": [options]}
        lines.append(json.dumps(content | {"answers": ["ABCD"[right]]}))
    return "".join(line + "\n" for line in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary, a BERT of a few steps in ``bert``, and data of each task."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(1)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]) + "\n")
    texts = [" ".join(sentence(rng).capitalize() + "." for _ in range(6)) for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    vocabulary = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {folder}/vocab.txt"
    made = f"--input {folder}/text.jsonl --output-prefix {folder}/data --split-sentences --workers 1"
    run("tools/preprocess_data.py", f"{made} {vocabulary}")
    data = f"--data-path {folder}/data_text_sentence --split 100,0,0 {vocabulary} --eval-iters 0"
    length = f"--micro-batch-size 4 --train-iters 4 --save {folder}/bert --save-interval 4"
    run("pretrain_bert.py", f"{MODEL} {data} {length}")
    (folder / "MNLI").mkdir()
    (folder / "MNLI/train.tsv").write_text(mnli(rng, 163))
    (folder / "MNLI/dev_matched.tsv").write_text(mnli(rng, 37, wrong=0.3))
    (folder / "MNLI/dev_mismatched.tsv").write_text(mnli(rng, 21, wrong=0.3))
    unlabelled = [row.split("\t")[:10] for row in mnli(rng, 14).splitlines()]
    (folder / "MNLI/test_matched.tsv").write_text("".join("\t".join(row) + "\n" for row in unlabelled))
    for name, count in (("train", 61), ("dev/high", 19), ("dev/middle", 9)):
        (folder / "RACE" / name).mkdir(parents=True)
        (folder / "RACE" / name / "1.txt").write_text(race(rng, count))
    return folder


def tsv(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


def scores(log: str) -> dict[str, list[str]]:
    """``correct / total`` of each set and of all together, epoch by epoch."""
    pattern = r"^ >>? \|epoch: -?\d+\| (?:metrics for )?(\S+): correct / total = (\d+ / \d+)"
    found: dict[str, list[str]] = {}
    for name, share in re.findall(pattern, log, re.MULTILINE):
        found.setdefault(name, []).append(share)
    return found


def test_mnli_is_learned_and_scored_alike_everywhere(folder: Path, tmp_path: Path) -> None:
    """A pretrained BERT becomes better than guessing; what each epoch saved scores the same at every layout."""
    dev = f"--valid-data {folder}/MNLI/dev_matched.tsv {folder}/MNLI/dev_mismatched.tsv"
    start = f"--task MNLI --epochs 4 --train-data {folder}/MNLI/train.tsv --pretrained-checkpoint {folder}/bert"
    log = run("tasks/main.py", f"{start} {dev} {TUNE} --save {tmp_path} --load {tmp_path} --keep-last")
    check_line(
        log, f"{folder}/bert/iter_0000004", "classification_head.weight", "binary_head", "lm_head", "output_layer"
    )
    check_line(log, "--keep-last", "--task", "--valid-data")
    found = scores(log)
    assert list(found) == ["dev-matched", "dev-mismatched", "overall"]
    assert [share.split(" / ")[1] for share in found["overall"]] == ["58"] * 4
    assert int(found["overall"][-1].split(" / ")[0]) > 38
    assert re.search(r"^ >> \|epoch: 3\| overall: correct / total = \d+ / 58 = \d+\.\d{4} %$", log, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{n:07}" for n in (21, 42, 63, 84)]
    last = {name: shares[-1:] for name, shares in found.items()}
    predicted: dict[str, list[list[str]]] = {}
    for ranks, layout in (
        (1, ""),
        (2, "--micro-batch-size 3 --pipeline-model-parallel-size 2 --global-batch-size 6"),
        (2, "--micro-batch-size 4"),
        (2, "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--micro-batch-size 2 --context-parallel-size 2"),
    ):
        flags = (
            f"--task MNLI --epochs 0 --load {tmp_path} {dev} {folder}/MNLI/test_matched.tsv --num-workers 0 {layout}"
        )
        written = f"--result-file {tmp_path}/result.json --predictions-dir {tmp_path}/answers"
        log = run("tasks/main.py", f"{flags} {written}", ranks=ranks)
        assert scores(log) == last
        assert " >> |epoch: -1| overall: " in log
        check_line(log, "14", f"{tmp_path}/answers/test-matched.tsv")
        assert "test-matched) | lm loss" not in log, "without labels there is no loss"
        assert "the valid set test-matched has no labels: loss skipped" in log
        answers = {path.stem: tsv(path) for path in (tmp_path / "answers").iterdir()}
        predicted = predicted or answers
        assert answers == predicted, "no layout changes an answer"
    assert [len(predicted[name]) for name in ("dev-matched", "dev-mismatched", "test-matched")] == [38, 22, 15]
    for name in ("dev-matched", "dev-mismatched"):
        rows = tsv(folder / f"MNLI/{name.replace('-', '_')}.tsv")[1:]
        right = [row[-1] == answer for row, (_, answer) in zip(rows, predicted[name][1:], strict=True)]
        assert f"{sum(right)} / {len(rows)}" == last[name][0], "each answer stands beside its own text"
    assert predicted["test-matched"][0] == ["index", "prediction"]
    assert [index for index, _ in predicted["test-matched"][1:]] == [str(number) for number in range(14)]
    result = json.loads((tmp_path / "result.json").read_text())
    metrics = result["metrics"]
    assert f"{metrics['correct']} / {metrics['total']}" == last["overall"][0]
    assert metrics["dev-matched total"] == 37
    assert result["checkpoint"]["iteration"] == 84
    files = ["dev_matched.tsv", "dev_mismatched.tsv", "test_matched.tsv"]
    assert [Path(each["path"]).name for each in result["data"]] == files


@pytest.mark.parametrize(
    "layout",
    tiers(["--pipeline-model-parallel-size 2", "--use-distributed-optimizer"], first=[]),  # BERT's is in test_bert.py
)
def test_race_resumes_within_an_epoch(layout: str, folder: Path, tmp_path: Path) -> None:
    """A run that was stopped would go on with other questions, or ask some of them twice."""
    dev = f"--valid-data {folder}/RACE/dev/high {folder}/RACE/dev/middle"
    start = f"--task RACE --epochs 2 --train-data {folder}/RACE/train --pretrained-checkpoint {folder}/bert"
    flags = f"{start} {dev} {TUNE} {layout} --save-interval 11"
    whole = run("tasks/main.py", f"{flags} --save {tmp_path}/whole", ranks=2)
    halves = f"--save {tmp_path}/halves --load {tmp_path}/halves"
    run("tasks/main.py", f"{flags} {halves} --exit-interval 11", ranks=2)
    log = run("tasks/main.py", f"{flags} {halves}", ranks=2)
    assert_same_tensors(tmp_path / "whole/iter_0000016", tmp_path / "halves/iter_0000016")
    assert [share[-1:] for share in scores(whole).values()] == list(scores(log).values())
    assert list(scores(log)) == ["dev-high", "dev-middle", "overall"]
    assert scores(log)["overall"][0].endswith(" / 28")


def test_what_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    """A head of another task, a model without one, data that changed: each is said, and nothing is scored."""
    train, dev = f"--train-data {folder}/MNLI/train.tsv", f"--valid-data {folder}/MNLI/dev_matched.tsv"
    start = f"--task MNLI --epochs 1 {train} --pretrained-checkpoint {folder}/bert --save {tmp_path} {TUNE}"
    run("tasks/main.py", start)
    flags = f"--task QQP --epochs 0 --load {tmp_path} --valid-data {qqp(tmp_path)} --micro-batch-size 2"
    found = run("tasks/main.py", flags, expect=2)
    check_line(found, "bert-mnli")
    flags = f"--task MNLI --epochs 0 --load {folder}/bert {dev} --micro-batch-size 2"
    check_line(run("tasks/main.py", flags, expect=2), "bert-mnli")
    resumed = start.replace(train, f"--train-data {folder}/MNLI/dev_matched.tsv").replace("--epochs 1", "--epochs 9")
    expected = "the checkpoint's run trained on other files than"
    assert expected in run("tasks/main.py", f"{resumed} --load {tmp_path}", expect=2)
    unused = f"--task MNLI --epochs 0 --load {tmp_path}/new --save {tmp_path}/new {dev} --micro-batch-size 2"
    found = run("tasks/main.py", f"{unused} --pretrained-checkpoint {folder}/bert", expect=2)
    check_line(found, "bert-mnli")
    nothing = f"--task MNLI --epochs 1 {train} --save {tmp_path}/new --load {tmp_path}/new {TUNE} {MODEL}"
    found = run("tasks/main.py", f"{nothing} --no-use-checkpoint-args --vocab-file {folder}/vocab.txt", expect=2)
    check_line(found, "--pretrained-checkpoint")


@pytest.mark.parametrize("precision", tiers(["", "--bf16"], first=["--bf16"]))
def test_the_body_is_the_pretrained_one(precision: str, folder: Path, tmp_path: Path) -> None:
    """A weight that was not taken over would be random, and nobody see it but in the scores; also fp32 masters'."""
    data = f"--data-path {folder}/data_text_sentence --split 100,0,0 --vocab-file {folder}/vocab.txt --eval-iters 0"
    length = f"--micro-batch-size 4 --train-iters 2 --save {tmp_path}/bert --save-interval 2 --bert-no-binary-head"
    run("pretrain_bert.py", f"{MODEL} {data} {length}")
    start = f"--task QQP --epochs 1 --train-data {qqp(tmp_path)} --pretrained-checkpoint {tmp_path}/bert"
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    still = f"{TUNE} {precision} {layout} --lr 1e-30 --save {tmp_path}/qqp"
    log = run("tasks/main.py", f"{start} {still}", ranks=4)
    fresh = [f"{name}.{kind}" for name in ("classification_head", "pooler.dense") for kind in ("bias", "weight")]
    check_line(log, ", ".join(fresh), "lm_head", "output_layer")
    before, after = (tensors(find_checkpoint(tmp_path / name).path) for name in ("bert", "qqp"))
    prefix = "optimizer.fp32_param." if precision else "model."
    mine = {name.removeprefix(prefix): tensor for name, tensor in after.items() if name.startswith(prefix)}
    assert mine.keys() - set(fresh) == {name for name in mine if f"model.{name}" in before}
    for name in mine.keys() - set(fresh):
        assert torch.equal(mine[name], before[f"model.{name}"]), name


@pytest.mark.slow  # tests/parallel/test_freezing.py freezes and resumes
def test_a_frozen_body_and_then_a_trained_one(folder: Path, tmp_path: Path) -> None:
    """The head alone, then everything: weights that should have stayed moved, or the second run stopped for state of
    the optimizer that the first had no reason to save.
    """
    data = f"--train-data {folder}/MNLI/train.tsv --valid-data {folder}/MNLI/dev_matched.tsv {TUNE}"
    start = f"--task MNLI --pretrained-checkpoint {folder}/bert --save {tmp_path} --load {tmp_path} {data}"
    found = run("tasks/main.py", f"{start} --epochs 1 --freeze embedding.* encoders.*", expect=2)
    check_line(found, "--freeze encoders.*", "encoder.*")
    split = "--tensor-model-parallel-size 2 --freeze embedding.* encoder.*"
    assert "k frozen, " in run("tasks/main.py", f"{start} --epochs 1 {split}", ranks=2)
    pretrained = tensors(find_checkpoint(folder / "bert").path)
    halfway = tensors(find_checkpoint(tmp_path).path)
    body = {name for name in halfway if name.startswith(("model.embedding.", "model.encoder."))}
    assert all(torch.equal(halfway[name], pretrained[name]) for name in body)
    assert not torch.equal(halfway["model.pooler.dense.weight"], pretrained["model.pooler.dense.weight"])
    assert not any(name.startswith(("optimizer.exp_avg.encoder", "optimizer.exp_avg.embedding")) for name in halfway)
    found = run("tasks/main.py", f"{start} --epochs 2 --use-distributed-optimizer --freeze embedding.*", ranks=2)
    assert re.search(r"trained now: \d+ parameter tensors, which start with fresh optimizer state \(encoder", found)
    after = tensors(find_checkpoint(tmp_path).path)
    assert {name for name in body if torch.equal(after[name], halfway[name])} == {
        name for name in body if name.startswith("model.embedding.")
    }


@pytest.mark.slow  # two starts of Python; test_examples.py has the scripts of training
def test_example_is_sound_at_two_layouts() -> None:
    """The script for 8 GPUs is checked where there are none; its head promises what that prints."""
    script = ROOT / "examples/evaluate/race.sh"
    head = re.search(
        r"# Memory +(\S+ GB) a GPU, by --dry-run; with (.*): (\S+ GB)\.", script.read_text(encoding="utf-8")
    )
    assert head is not None
    for flags, promised in (([], head[1]), (head[2].split(), head[3])):
        words = ["bash", str(script), "--dry-run", "--no-check-files", *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "335,144,961 in the model" in done.stdout and "3 epochs of --train-data, whose length" in done.stdout
        assert re.search(rf"^   together +{promised}$", done.stdout, re.MULTILINE)


def qqp(folder: Path) -> Path:
    """A file of two questions."""
    rows = ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\twhat was it\tso far\t0")
    (folder / "dev.tsv").write_text("".join(row + "\n" for row in rows))
    return folder / "dev.tsv"
