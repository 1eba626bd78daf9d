"""tools/preprocess_preferences.py: pairs of answers in the forms that data sets have, and lines that hold none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import DataError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.tools.conftest import write_lines
from tools import preprocess_preferences


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ASKED, BROWN, LAZY = said("user", "quick?"), said("assistant", "brown"), said("assistant", "lazy dog")
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "quick", "chosen": " brown", "rejected": " lazy dog"},
    "texts that begin alike": {"chosen": "quick brown", "rejected": "quick lazy dog"},
    "messages": {"prompt": [ASKED], "chosen": [BROWN], "rejected": [LAZY]},
    "conversations": {"chosen": [ASKED, BROWN], "rejected": [ASKED, LAZY]},
    "conversations, and their prompt as a text": {
        "prompt": "quick?",
        "chosen": [ASKED, BROWN],
        "rejected": [ASKED, LAZY],
    },
    "texts that begin with their prompt": {"prompt": "quick", "chosen": "quick brown", "rejected": "quick lazy dog"},
    "a conversation, and an answer": {"prompt": [ASKED], "chosen": [ASKED, BROWN], "rejected": [LAZY]},
    "an answer, and a conversation": {"prompt": "quick?", "chosen": "brown", "rejected": [ASKED, LAZY]},
    "messages, and texts": {"prompt": [ASKED], "chosen": "brown", "rejected": "lazy dog"},
}
BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one side": ({"prompt": "a", "chosen": "b"}, ("rejected", "missing")),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": " "}, ("rejected", "empty")),
    "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("the same",)),
    "the same behind the prompt": ({"prompt": [ASKED], "chosen": [ASKED, LAZY], "rejected": [LAZY]}, ("the same",)),
    "a number": ({"prompt": "a", "chosen": 5, "rejected": "b"}, ("chosen", "5")),
    "a prompt of another type": ({"prompt": 5, "chosen": "a", "rejected": "b"}, ("prompt", "5")),
    "a rated answer among pairs": ({"prompt": "a", "completion": "b", "label": True}, ("pair",)),
    "a pair with a label": ({**FORMS["texts"], "label": True}, ("chosen", "label")),
    "no label": ({"prompt": "a", "completion": "b"}, ("label", "missing")),
    "an empty label": ({"prompt": "a", "completion": "b", "label": None}, ("label", "missing")),
    "a label of another type": ({"prompt": "a", "completion": "b", "label": 1}, ("label", "1")),
    "a label without an answer": ({"prompt": "a", "label": True}, ("completion", "missing")),
    "a rated answer without a prompt": ({"completion": "a", "label": True}, ("prompt", "missing")),
    "a prefix": ({"chosen": [ASKED], "rejected": [ASKED, LAZY]}, ("chosen", "empty")),
    "no answer": ({"prompt": "a", "chosen": [ASKED], "rejected": [LAZY]}, ("chosen",)),
    "a message without a role": ({"chosen": [{"content": "a"}], "rejected": [LAZY]}, ("chosen", "role")),
    "a list": ([1, 2], ()),
}


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> RustTokenizer:
    return load(str(tokenizer_folder), extra_ids=0)


def convert(folder: Path, records: list[Any], tokenizer_folder: Path, *more: str) -> str:
    source, prefix = write_lines(folder / "in.jsonl", records), str(folder / "pairs")
    tokens = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder)]
    preprocess_preferences.main(["--input", str(source), "--output-prefix", prefix, *tokens, *more])
    return prefix


def test_answers_of_all_forms(tmp_path: Path, tokenizer_folder: Path, tokenizer: RustTokenizer) -> None:
    """A form that is read otherwise trains on the prompt, or on a conversation without its end."""
    prefix = convert(tmp_path, [*FORMS.values()], tokenizer_folder)
    texts, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    assert np.diff(texts.boundaries).tolist() == [2] * len(FORMS)
    for number, form in enumerate(FORMS):
        is_chat = "texts" not in form or form == "messages, and texts"
        end = "<|im_end|>\n<|endoftext|>" if is_chat else "<|endoftext|>"
        prompts = []
        for side, answer in enumerate(("brown", "lazy dog")):
            ids, marks = texts[2 * number + side], targets[2 * number + side]
            learned = tokenizer.detokenize(ids[marks > 0].tolist())
            assert learned == ("" if is_chat else " ") + answer + end, form
            prompts.append(ids[marks == 0].tolist())
        assert prompts[0] == prompts[1] and tokenizer.detokenize(prompts[0]).count("quick") == 1, form


def test_an_answer_that_repeats_the_question_is_left(
    tmp_path: Path, tokenizer_folder: Path, tokenizer: RustTokenizer
) -> None:
    """Repeating it may be why the answer was rejected."""
    record = {"prompt": "quick", "chosen": " brown", "rejected": "quick lazy"}
    texts = IndexedDataset(convert(tmp_path, [record], tokenizer_folder))
    assert tokenizer.detokenize(texts[1].tolist()).startswith("quickquick lazy")


@pytest.mark.parametrize("name", BAD)
def test_bad_lines(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    """A line that is no pair stops the tool with its number, before anything is written."""
    record, facts = BAD[name]
    with expect_error(DataError, f"{tmp_path}/in.jsonl:2", "--on-bad-line skip", *facts):
        convert(tmp_path, [FORMS["texts"], record], tokenizer_folder)
    assert not list(tmp_path.glob("pairs*"))


def test_what_the_summary_says(tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Skipped lines are counted, and the longest pair says what --seq-length must hold."""
    convert(tmp_path, [FORMS["texts"], BAD["empty"][0], FORMS["messages"]], tokenizer_folder, "--on-bad-line", "skip")
    out, errors = capsys.readouterr()
    check_line(out, "pairs", 2, 1)
    check_sentence(errors.strip(), f"{tmp_path}/in.jsonl:2", "rejected")
    lengths = IndexedDataset(tmp_path / "pairs").lengths.reshape(-1, 2)
    assert f"longest pair   {(lengths - 1).sum(1).max()} tokens" in out


RATED: list[dict[str, Any]] = [
    {"prompt": "quick", "completion": " brown", "label": True},
    {"prompt": [ASKED], "completion": [LAZY], "label": False},
    {"prompt": "quick?", "completion": [BROWN], "label": False},
]


def test_answers_that_are_rated_alone(
    tmp_path: Path, tokenizer_folder: Path, tokenizer: RustTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer is on the side of its label, and the other side is empty; a label that is lost would teach what is
    undesirable.
    """
    prefix = convert(tmp_path, RATED, tokenizer_folder)
    texts, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    for number, answer in enumerate((" brown<|endoftext|>", *[f"{each}<|im_end|>" for each in ("lazy dog", "brown")])):
        side = int(not RATED[number]["label"])
        ids, marks = texts[2 * number + side], targets[2 * number + side]
        assert tokenizer.detokenize(ids[marks > 0].tolist()).startswith(answer)
        assert tokenizer.detokenize(ids[marks == 0].tolist()).count("quick") == 1
        assert not len(texts[2 * number + 1 - side])
    out = capsys.readouterr().out
    assert f"longest answer {texts.lengths.max() - 1} tokens" in out
    check_line(out, "labels", 1, 2, "--desirable-weight 2.00")
    convert(tmp_path, RATED[:1], tokenizer_folder)
    check_line(capsys.readouterr().out, "labels", 1, 0, "same label")


def test_a_pair_among_rated_answers_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    """DPO could not read the rest, and nobody asked for what is left out."""
    with expect_error(DataError, f"{tmp_path}/in.jsonl:2", "pair"):
        convert(tmp_path, [RATED[0], FORMS["texts"]], tokenizer_folder)
    with expect_error(DataError, f"{tmp_path}/in.jsonl:2", "empty"):
        convert(tmp_path, [RATED[0], {**RATED[0], "completion": ""}], tokenizer_folder)
