"""tools/preprocess_sft.py, and training on what it writes: loss on the answers, and on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from tests.unit.tools.conftest import write_lines
from tools import preprocess_sft

CHAT = {
    "messages": [
        {"role": "system", "content": "the fox"},
        {"role": "user", "content": "quick?"},
        {"role": "assistant", "content": "brown, lazy"},
        {"role": "user", "content": "dog"},
        {"role": "assistant", "content": "over"},
    ]
}
PAIR = {"prompt": "quick brown", "completion": " fox jumps"}


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> RustTokenizer:
    return load(str(tokenizer_folder), extra_ids=0)


@pytest.fixture
def flags(tokenizer_folder: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder)]


def convert(folder: Path, records: list[dict[str, Any]], flags: list[str], *more: str) -> str:
    source = write_lines(folder / "in.jsonl", records)
    preprocess_sft.main(["--input", str(source), "--output-prefix", str(folder / "sft"), *flags, *more])
    return str(folder / "sft")


def learned_texts(prefix: str, tokenizer: RustTokenizer) -> list[list[str]]:
    """Stretches of learned text of each document."""
    data, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    found = []
    for number in range(len(data)):
        ids, mask = data[number], targets[number]
        assert len(ids) == len(mask)
        borders = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        found.append(
            [tokenizer.detokenize(ids[start:stop].tolist()) for start, stop in zip(borders[::2], borders[1::2])]
        )
    return found


def test_only_answers_are_learned(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """With the ends of turns, from which the model learns to stop; nobody learns to speak for the user."""
    prefix = convert(tmp_path, [CHAT, PAIR], flags)
    assert learned_texts(prefix, tokenizer) == [
        ["brown, lazy<|im_end|>\n", "over<|im_end|>\n<|endoftext|>"],
        [" fox jumps<|endoftext|>"],
    ]
    whole = tokenizer.detokenize(IndexedDataset(prefix)[0].tolist())
    assert whole.startswith(
        "<|im_start|>system\nthe fox<|im_end|>\n<|im_start|>user\nquick?<|im_end|>\n<|im_start|>ass"
    )


def test_prompts_have_the_tokens_they_are_asked_with(
    tmp_path: Path, flags: list[str], tokenizer: RustTokenizer
) -> None:
    """Encoded in one piece with the answer, the last token of the prompt could swallow the answer's first letter."""
    prefix = convert(tmp_path, [PAIR], flags)
    ids = IndexedDataset(prefix)[0].tolist()
    prompt = tokenizer.tokenize("quick brown")
    assert ids == [*prompt, *tokenizer.tokenize(" fox jumps"), tokenizer.eod]
    assert IndexedDataset(f"{prefix}_targets")[0].tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_other_formats(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    more = ("--turn-start", "{role}: ", "--turn-end", "\\n", "--learned-role", "user")
    prefix = convert(tmp_path, [CHAT], flags, *more)
    assert learned_texts(prefix, tokenizer) == [["quick?\n", "dog\n"]]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "fox"}, r'neither "messages" nor "prompt" and "completion" \(keys are text\)'),
        ({"messages": "fox"}, '"messages" is not a list'),
        ({"messages": [{"role": "user"}]}, 'message 0 has no "role" and "content"'),
        ({"messages": [{"role": "user", "content": 5}]}, "content of 0 is not a string"),
        ({"messages": [{"role": "user", "content": "fox"}]}, "nothing to learn: no turn of the assistant"),
        ({"prompt": "fox", "completion": ""}, "nothing to learn"),
    ],
)
def test_bad_lines(tmp_path: Path, flags: list[str], record: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=rf"in.jsonl:2: {reason}"):
        convert(tmp_path, [PAIR, record], flags)
    assert not list(tmp_path.glob("sft*"))
    assert len(IndexedDataset(convert(tmp_path, [PAIR, record], flags, "--on-bad-line", "skip"))) == 1


@pytest.mark.parametrize("packing", ["stream", "padding-free", "best-fit"])
def test_training_learns_the_targets(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer, packing: str) -> None:
    """In every way to fill samples the labels that count are the tokens that are to be learned, each once."""
    prefix = convert(tmp_path, [CHAT, PAIR] * 20, flags)
    config = DataConfig(seq_length=150, train_data_path=(prefix,), sft=True, packing=packing)  # type: ignore[arg-type]
    train = build_gpt_splits(config, seed=1, sizes=SplitSizes(None, 0, 0), tokenizer=tokenizer).train
    assert train is not None
    data, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    wanted = np.concatenate([data[number][targets[number] == 1] for number in range(len(data))])
    samples = [train[index] for index in range(len(train))]
    learned = np.concatenate([sample["labels"][sample["loss_mask"] > 0] for sample in samples])
    if packing == "best-fit":
        assert sorted(learned.tolist()) == sorted(wanted.tolist())
    else:
        assert len(wanted) - 150 < len(learned) <= len(wanted)
    quick = tokenizer.tokenize("quick?")[0]
    assert quick not in learned


def test_data_without_targets(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Training on everything, or with another file's mask, would be a silent mistake."""
    prefix = convert(tmp_path, [PAIR], flags)
    config = DataConfig(seq_length=4, train_data_path=(prefix,), sft=True, packing="best-fit")
    with IndexedDatasetWriter(f"{prefix}_targets", np.uint8) as writer:
        writer.add_document([1, 0])
    with pytest.raises(DataError, match="have documents of different lengths: write both again"):
        build_gpt_splits(config, seed=1, sizes=SplitSizes(1, 0, 0), tokenizer=tokenizer)
    Path(f"{prefix}_targets.idx").unlink()
    with pytest.raises(DataError, match="_targets.idx is missing: with --sft it marks the tokens with a loss"):
        build_gpt_splits(config, seed=1, sizes=SplitSizes(1, 0, 0), tokenizer=tokenizer)


def test_chat_templates(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Nothing is added to what the template writes; pairs are written as without one."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    prefix = convert(tmp_path, [CHAT, PAIR], flags, "--chat-template", str(template))
    assert learned_texts(prefix, tokenizer) == [
        ["[assistant]brown, lazy\n", "[assistant]over\n"],
        [" fox jumps<|endoftext|>"],
    ]
    assert tokenizer.detokenize(IndexedDataset(prefix)[0].tolist()).startswith("[system]the fox\n[user]quick?\n")
    for more, reason in (
        (("--turn-end", "x"), "--turn-end and --chat-template both describe the format of turns"),
        (
            ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
            "needs a tokenizer that reports positions in the text",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            convert(tmp_path, [CHAT], flags if len(more) == 2 else [], "--chat-template", str(template), *more)
