"""WikiText's loss and LAMBADA's predictions are those that transformers gives with the same windows."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.zero_shot.lambada import sample_of
from tests.harness.data import shared_data
from tests.harness.evaluation import OPENINGS, WIKITEXT, WIKITEXT_AS_TEXT, SmallGPT2, run_task, small_gpt2


def loss_by_transformers(model: Any, ids: list[int], *, length: int, overlap: int, batch: int = 16) -> float:
    """Mean loss of all tokens but the first, by Megatron-LM's rule to the letter: windows padded to one length, and
    also those at the end that hold nothing but masked positions.
    """
    targets = len(ids) - 1
    count = max(math.ceil(max(targets - overlap, 0) / overlap) + 1, 1)
    total, scored = 0.0, 0
    for first in range(0, count, batch):
        rows = [ids[n * overlap : n * overlap + length + 1] for n in range(first, min(first + batch, count))]
        padded = torch.tensor([row + [0] * (length + 1 - len(row)) for row in rows])
        skipped = length - overlap if first else 0  # what none of these windows scores needs no logits
        with torch.no_grad():
            logprobs = model(padded[:, :-1], logits_to_keep=length - skipped).logits.log_softmax(-1)
        picked = logprobs.gather(-1, padded[:, 1 + skipped :, None])[..., 0].double()
        for number, row in enumerate(rows):
            begin = 0 if first + number == 0 else length - overlap
            end = len(row) - 1
            total -= picked[number, begin - skipped : end - skipped].sum().item() if end > begin else 0.0
            scored += max(0, end - begin)
    assert scored == targets
    return total / targets


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("overlap", [None, 1, 7, 64])
def test_wikitext(overlap: int | None, gpt2: SmallGPT2, tmp_path: Path) -> None:
    """The published number is a sum over exactly these windows; one token more or less context is another number."""
    path = write(tmp_path / "wiki.test.tokens", WIKITEXT)
    flags = ("--overlapping-eval", str(overlap)) if overlap else ()
    found = run_task(
        ParallelContext.single(), "--task", "WIKITEXT103", "--load", str(gpt2.native), "--valid-data", path, *flags
    )
    ids = gpt2.transformers_tokenizer()(WIKITEXT_AS_TEXT)["input_ids"]
    expected = loss_by_transformers(gpt2.transformers_model(), ids, length=64, overlap=overlap or 32)
    words = len(WIKITEXT.strip().split(" ")) - 1
    assert found.metrics["tokens"] == len(ids) - 1
    assert found.metrics["words"] == words
    assert found.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert found.metrics["token_ratio"] == (len(ids) - 1) / words
    assert found.metrics["adjusted_perplexity"] == pytest.approx(math.exp(expected * (len(ids) - 1) / words), rel=1e-4)


def test_lm(gpt2: SmallGPT2, tmp_path: Path) -> None:
    """Each document on its own, its first token given an end of document; bits by bytes of the text, not characters."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    texts = [f"{WIKITEXT_AS_TEXT} Überall – 塔", OPENINGS[0]]
    path = write(tmp_path / "texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = run_task(ParallelContext.single(), "--task", "LM", "--load", str(gpt2.native), "--valid-data", path).metrics
    nats, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        nats += loss_by_transformers(model, ids, length=64, overlap=32) * (len(ids) - 1)
        count += len(ids) - 1
    size = sum(len(text.encode()) for text in texts)
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, count, size)
    assert size > sum(map(len, texts))
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)


def predicted(model: Any, context: list[int], count: int) -> list[int]:
    """The model's next ``count`` tokens, each the likeliest."""
    ids = list(context)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def lambada_passages(gpt2: SmallGPT2) -> list[str]:
    """Openings that go on as the model would have it, and the same ones with a word that it doesn't expect."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    texts = []
    for opening in OPENINGS:
        for cut in range(len(words := opening.split()) - 1):
            start = " ".join(words[: len(words) - cut])
            texts += [start + tokenizer.decode(predicted(model, tokenizer(start)["input_ids"], 1)), f"{start} mistaken"]
    return texts


@pytest.mark.parametrize("strict", [False, True])
def test_lambada(strict: bool, gpt2: SmallGPT2, tmp_path: Path) -> None:
    """A sample counts when every token of what is asked for is the likeliest."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    texts = lambada_passages(gpt2)
    path = write(tmp_path / "passages.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    correct, nats = 0, 0.0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        context, target = ids[:-1], ids[-1:]
        if strict:
            word = text.split()[-1]
            context = tokenizer(text[: text.rfind(word)].strip())["input_ids"]
            target = tokenizer(" " + word)["input_ids"]
        correct += predicted(model, context, len(target)) == target
        with torch.no_grad():
            logprobs = model(torch.tensor([context + target])).logits[0].double().log_softmax(-1)
        nats -= sum(float(logprobs[len(context) - 1 + n, token]) for n, token in enumerate(target))
    flags = ("--strict-lambada",) if strict else ()
    found = run_task(
        ParallelContext.single(), "--task", "LAMBADA", "--load", str(gpt2.native), "--valid-data", path, *flags
    )
    assert 5 < correct < len(texts) / 2 + 5  # both answers occur
    assert (found.metrics["correct"], found.metrics["total"]) == (correct, len(texts))
    assert found.metrics["loss"] == pytest.approx(nats / len(texts), rel=1e-5)
    number, total = f"{correct:.4E}", f"{len(texts):.4E}"
    assert found.lines[1].startswith(
        f" validation results on LAMBADA | number correct: {number} | total examples: {total}"
    )


def test_lambada_reads_all_the_context_that_the_model_sees() -> None:
    """One token less, and the accuracy of long passages is another."""
    sample = sample_of(list(range(99)), [99], limit=64, where="passages.jsonl:1")
    assert (sample.tokens.tolist(), sample.first_scored) == (list(range(35, 100)), 63)


@pytest.fixture(scope="module")
def real_gpt2(tmp_path_factory: pytest.TempPathFactory) -> SmallGPT2:
    """With GPT-2's own vocabulary."""
    vocab = shared_data("data", "gpt2", "gpt2-vocab.json"), shared_data("data", "gpt2", "gpt2-merges.txt")
    return small_gpt2(tmp_path_factory.mktemp("real"), layers=2, positions=128, vocab=vocab)


def whole_files() -> bool:
    return os.environ.get("TEST_WHOLE_FILES") == "1"


@pytest.mark.slow
def test_wikitext_of_the_real_file(real_gpt2: SmallGPT2, tmp_path: Path) -> None:
    """The beginning of WikiText's test file; all of it with TEST_WHOLE_FILES=1."""
    from megatron.training.evaluation.zero_shot.detokenize import wikitext

    text = shared_data("data", "wikitext-2", "wiki.test.tokens").read_text(encoding="utf-8")
    text = text if whole_files() else text[:8_000]
    path = write(tmp_path / "wiki.test.tokens", text)
    load = ("--load", str(real_gpt2.native), "--micro-batch-size", "16")
    found = run_task(ParallelContext.single(), "--task", "WIKITEXT103", *load, "--valid-data", path)
    ids = real_gpt2.transformers_tokenizer()(wikitext(text))["input_ids"]
    expected = loss_by_transformers(real_gpt2.transformers_model(), ids, length=128, overlap=32)
    assert found.metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert found.metrics["tokens"] == len(ids) - 1


@pytest.mark.slow
def test_lambada_of_the_real_file(real_gpt2: SmallGPT2, tmp_path: Path) -> None:
    """Some of LAMBADA's samples; all 5,153 with TEST_WHOLE_FILES=1. Longer ones are cut to what the model sees."""
    lines = shared_data("data", "lambada", "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    lines = lines if whole_files() else lines[:60]
    path = write(tmp_path / "passages.jsonl", "".join(f"{line}\n" for line in lines))
    found = run_task(
        ParallelContext.single(), "--task", "LAMBADA", "--load", str(real_gpt2.native), "--valid-data", path
    )
    model, tokenizer = real_gpt2.transformers_model(), real_gpt2.transformers_tokenizer()
    correct, nats = 0, 0.0
    for line in lines:
        ids = tokenizer(json.loads(line)["text"])["input_ids"][-129:]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0, -1].double()
        correct += int(logits.argmax()) == ids[-1]
        nats -= float(logits.log_softmax(-1)[ids[-1]])
    assert (found.metrics["correct"], found.metrics["total"]) == (correct, len(lines))
    assert found.metrics["loss"] == pytest.approx(nats / len(lines), rel=1e-4)
