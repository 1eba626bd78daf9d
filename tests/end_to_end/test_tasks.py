"""What training learns shows in the score, which is the same number wherever it is measured."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from tests.end_to_end.commands import run

SUBJECTS = ("The keeper", "A sailor", "The old captain", "Nobody on the island")
VERBS = ("mended the lamp", "saw the light", "remembered the storm", "wrote into the log")
ENDS = ("in the winter", "before the war", "on a clear night", "when the tide was low")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --position-embedding-type rope "
    "--micro-batch-size 8 --global-batch-size 8 --train-iters 60 --lr 1e-2 --lr-decay-style cosine --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.08 --eval-iters 0 --save-interval 60 "
    "--log-interval 60"
)


def documents(seed: int, count: int) -> list[str]:
    """Little stories; what comes next is partly known and partly not."""
    rng = random.Random(seed)
    return [
        " ".join(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(ENDS)}." for _ in range(8))
        for _ in range(count)
    ]


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, data and a GPT of sixty steps, each made by its command."""
    folder = tmp_path_factory.mktemp("tasks")
    write(folder / "train.jsonl", documents(1, 200))
    write(folder / "heldout.jsonl", documents(2, 30))
    run("tools/train_tokenizer.py", f"--input {folder}/train.jsonl --vocab-size 300 --output-dir {folder}/bpe")
    vocabulary = (
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/bpe/vocab.json --merge-file {folder}/bpe/merges.txt"
    )
    made = f"--input {folder}/train.jsonl --output-prefix {folder}/data --append-eod --workers 1"
    run("tools/preprocess_data.py", f"{made} {vocabulary}")
    run("pretrain_gpt.py", f"{MODEL} --train-data-path {folder}/data_text_document {vocabulary} --save {folder}/gpt")
    return folder


def test_a_trained_model_is_far_better_than_counting_and_the_same_everywhere(folder: Path) -> None:
    """Uniform guessing, word frequencies, a GPT: each far better than the one before, on documents none has seen."""
    bpe = tokenizers.ByteLevelBPETokenizer(f"{folder}/bpe/vocab.json", f"{folder}/bpe/merges.txt")
    seen, held = ([id for text in documents(*which) for id in bpe.encode(text).ids] for which in ((1, 200), (2, 30)))
    counts = Counter(seen)
    unigram = -sum(math.log((counts[id] + 1) / (len(seen) + 300)) for id in held) / len(held)
    flags = f"--task LM --load {folder}/gpt --valid-data {folder}/heldout.jsonl --result-file {folder}/result.json"
    run("tasks/main.py", flags)
    alone = json.loads((folder / "result.json").read_text())["metrics"]
    assert unigram < math.log(300) - 1.0
    assert alone["loss"] < unigram / 3
    run(
        "tasks/main.py",
        f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 3",
        ranks=4,
    )
    assert json.loads((folder / "result.json").read_text())["metrics"] == pytest.approx(alone, rel=1e-6)
