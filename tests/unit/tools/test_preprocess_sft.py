"""tools/preprocess_sft.py, and training on what it writes: loss on the answers, and on nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets import cut_documents
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import ChatFormat
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import check_line, expect_error
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
    ("record", "facts"),
    [
        ({"text": "fox"}, ['"messages"', '"prompt"', '"completion"', "text"]),
        ({"messages": "fox"}, ['messages is "fox"']),
        ({"messages": [{"role": "user"}]}, ["messages[0]", '"user"', "content"]),
        ({"messages": [{"role": "assistant"}]}, ["messages[0]", "content", "tool_calls"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content is 5"]),
        ({"messages": [{"role": "user", "content": "fox"}]}, ["assistant"]),
        ({"prompt": "fox", "completion": ""}, []),
    ],
)
def test_bad_lines(tmp_path: Path, flags: list[str], record: dict[str, Any], facts: list[str]) -> None:
    with expect_error(DataError, f"{tmp_path / 'in.jsonl'}:2", *facts):
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


@pytest.mark.parametrize("packing", ["stream", "padding-free", "best-fit"])
def test_prompts_longer_than_a_sample(
    tmp_path: Path, flags: list[str], tokenizer: RustTokenizer, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps had no loss, and nothing said why."""
    long = {"prompt": "quick " * 100, "completion": "fox"}
    prefix = convert(tmp_path, [long, long, PAIR, PAIR], flags)

    def described(seq_length: int) -> tuple[str, str]:
        """The line of the report, and what it should end with if all samples are read."""
        config = DataConfig(seq_length=seq_length, train_data_path=(prefix,), sft=True, packing=packing)  # type: ignore[arg-type]
        train = build_gpt_splits(config, seed=1, sizes=SplitSizes(None, 0, 0), tokenizer=tokenizer).train
        assert train is not None
        [line] = train.describe()
        empty = sum(not train[index]["loss_mask"].any() for index in range(len(train)))
        return line, f", {empty} of {len(train)} samples have no loss"

    line, counted = described(16)
    assert line.endswith(f", 2 of 4 conversations are longer than --seq-length 16 and cut{counted}")
    assert not counted.startswith(", 0 of")
    monkeypatch.setattr(cut_documents, "_MOST_TOKENS", 0)  # a hundred are read
    assert re.search(r"and cut, about 9\d\.0% of \d+ samples have no loss$", described(1)[0])
    if packing == "best-fit":
        assert "conversations" not in described(300)[0]


def test_data_without_targets(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Training on everything, or with another file's mask, would be a silent mistake."""
    prefix = convert(tmp_path, [PAIR], flags)
    config = DataConfig(seq_length=4, train_data_path=(prefix,), sft=True, packing="best-fit")
    with IndexedDatasetWriter(f"{prefix}_targets", np.uint8) as writer:
        writer.add_document([1, 0])
    with expect_error(DataError):
        build_gpt_splits(config, seed=1, sizes=SplitSizes(1, 0, 0), tokenizer=tokenizer)
    Path(f"{prefix}_targets.idx").unlink()
    with expect_error(DataError, "sft_targets.idx", "--sft"):
        build_gpt_splits(config, seed=1, sizes=SplitSizes(1, 0, 0), tokenizer=tokenizer)


def test_chat_templates(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Only an end where the template has none is added to what it writes; pairs are written as without one."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    prefix = convert(tmp_path, [CHAT, PAIR], flags, "--chat-template", str(template))
    assert learned_texts(prefix, tokenizer) == [
        ["[assistant]brown, lazy\n", "[assistant]over\n<|endoftext|>"],
        [" fox jumps<|endoftext|>"],
    ]
    assert tokenizer.detokenize(IndexedDataset(prefix)[0].tolist()).startswith("[system]the fox\n[user]quick?\n")
    for more in (("--turn-end", "x"), ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9")):
        with expect_error(ConfigError, "--chat-template"):
            convert(tmp_path, [CHAT], flags if len(more) == 2 else [], "--chat-template", str(template), *more)


def test_the_format_and_ends_are_stored(tmp_path: Path, flags: list[str]) -> None:
    """After fine-tuning nobody knew how to ask the model, nor where its answers end."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}<|endoftext|>{% endfor %}")
    cases: list[tuple[list[dict[str, Any]], tuple[str, ...], ChatSettings]] = [
        ([CHAT], (), ChatSettings(template=ChatFormat().source, end_tokens=())),
        ([CHAT, PAIR], ("--chat-template", str(template)), ChatSettings(template=template.read_text(), end_tokens=())),
        ([PAIR], (), ChatSettings(template=None, end_tokens=())),
    ]
    for records, more, expected in cases:
        metadata = DatasetMetadata.read(convert(tmp_path, records, flags, *more))
        assert metadata is not None
        assert metadata.chat == expected


def test_what_the_summary_says(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each was silent: answers that never learn to stop, marks in pieces, turns that aren't trained on, the form."""
    source = write_lines(tmp_path / "in.jsonl", [{"conversations": [{"from": "gpt", "value": "fox"}]}])
    bad = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "dog", "weight": 0}]}
    prefix = convert(tmp_path, [bad, PAIR, json.loads(source.read_text())], flags)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "conversations  3",
        "read as        messages (1), prompt and completion (1), ShareGPT's conversations (1)",
        said[2],
        'answers        4: 2 end with "<|endoftext|>" (id 0)',
        "not trained    1 turn of the assistant with weight 0",
        f"wrote          {prefix}.{{bin,idx,meta.json}} and {prefix}_targets.*",
        'remark: the format has no end of an answer: 1 of 4 answers are trained to end with "<|endoftext|>" (id 0), '
        "which is put behind the conversation",
        "remark: 2 of 4 answers never learn to stop: what follows them is ordinary text; end turns with a single token",
        "remark: the tokenizer cuts marks of turns into pieces, which answers will show: <|im_start|> (12 tokens), "
        "<|im_end|> (9 tokens)",
        "remark: to end turns with a single token, give --turn-start '{role}:\\n' --turn-end '<|endoftext|>\\n', or a "
        "tokenizer that has marks of turns",
    ]
    # The advice works.
    convert(tmp_path, [CHAT], flags, "--turn-start", "{role}:\\n", "--turn-end", "<|endoftext|>\\n")
    said = capsys.readouterr().out.splitlines()
    assert 'answers        2: 2 end with "<|endoftext|>" (id 0)' in said
    assert not any(line.startswith("remark") for line in said)


def test_advice_for_a_tokenizer_without_special_tokens(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT2BPETokenizer takes <|endoftext|> in a text for ordinary characters."""
    files = ["--vocab-file", str(tokenizer_folder / "vocab.json"), "--merge-file", str(tokenizer_folder / "merges.txt")]
    convert(tmp_path, [CHAT], files)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "remark: to end turns with a single token, give --tokenizer-type HuggingFaceTokenizer and the folder of a "
        "tokenizer.json that has marks of turns (tools/train_tokenizer.py --special-tokens makes one)"
    )


def test_other_remarks(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A template whose marked answers have no end, one whose end is within answers, and one that nobody uses."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    convert(tmp_path, [CHAT], flags, "--chat-template", str(template))
    check_line(capsys.readouterr().out, "generation", "5", "5")
    lines = {"messages": [{"role": "assistant", "content": "fox\n\nfox"}]}
    convert(tmp_path, [lines], flags, "--turn-start", "{role}:", "--turn-end", "\\n")
    said = capsys.readouterr().out
    assert re.search(r'remark: "\\n" \(id \d+\) ends 1 answers and is 2 times within one, so it is no end token', said)
    folder = tmp_path / "folder"
    shutil.copytree(flags[-1], folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    convert(tmp_path, [CHAT], [*flags[:-1], str(folder)])
    check_line(capsys.readouterr().out, "--chat-template")


def test_tool_calls_are_written_once(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Arguments are JSON text in OpenAI's files; the template encoded them a second time, into the targets."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "fox"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "quick"}], "name": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "assistant", "content": "dog", "tool_calls": None},
    ]
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls is defined %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}<|endoftext|>{% endfor %}"
    )
    prefix = convert(tmp_path, [{"messages": messages}], flags, "--chat-template", str(template))
    assert learned_texts(prefix, tokenizer) == [
        ['assistant:{"a": "fox"}<|endoftext|>', "assistant:dog<|endoftext|>"],
    ]


def test_one_json_list(tmp_path: Path, flags: list[str], tokenizer: RustTokenizer) -> None:
    """Alpaca's own file is a list over many lines."""
    records = [{"instruction": "quick", "input": "", "output": "fox"}, {"instruction": "lazy", "output": "dog"}]
    (tmp_path / "alpaca.json").write_text(json.dumps(records, indent=4))
    prefix = str(tmp_path / "sft")
    preprocess_sft.main(["--input", str(tmp_path / "alpaca.json"), "--output-prefix", prefix, *flags])
    assert learned_texts(prefix, tokenizer) == [["fox<|im_end|>\n<|endoftext|>"], ["dog<|im_end|>\n<|endoftext|>"]]
