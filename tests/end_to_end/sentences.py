"""What the tests of BERT and T5 have in common: documents of sentences, and a run that was stopped on the way."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.end_to_end.commands import assert_same_tensors, losses, run

WORDS = "the cat sat on a mat and dog ran to see what it was about but no one came by night or day so far"
DOCUMENTS, SENTENCES, LENGTH = 60, 6, 7


def make_sentences(folder: Path, tokenizer_flags: str = "") -> str:
    """Flags of a data set in ``folder``, of the pieces of a BERT's vocabulary."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS.split()]) + "\n")
    data = preprocess(folder, f"--tokenizer-type BertWordPieceLowerCase --vocab-file {vocabulary} {tokenizer_flags}")
    return f"{data} --vocab-file {vocabulary}"


def preprocess(folder: Path, tokenizer: str) -> str:
    """Flags of what tools/preprocess_data.py makes of documents of random sentences, but the tokenizer's."""
    text, words, shape = folder / "text.jsonl", WORDS.split(), (DOCUMENTS, SENTENCES, LENGTH)
    drawn = torch.randint(len(words), shape, generator=torch.Generator().manual_seed(1)).tolist()
    lines = (" ".join(" ".join(words[i] for i in each).capitalize() + "." for each in document) for document in drawn)
    text.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    made = f"--input {text} --output-prefix {folder}/data --split-sentences --workers 1"
    run("tools/preprocess_data.py", f"{made} {tokenizer}")
    return f"--data-path {folder}/data_text_sentence --split 90,10,0"


def assert_two_halves_are_the_whole(script: str, flags: str, folder: Path) -> None:
    """Six steps on two ranks end in the same bits when a new process does the last three."""
    whole, halves = folder / "whole", folder / "halves"
    flags = f"{flags} --train-iters 6 --save-interval 3"
    run(script, f"{flags} --save {whole}", ranks=2)
    run(script, f"{flags} --save {halves} --exit-interval 3", ranks=2)
    log = run(script, f"{flags} --save {halves} --load {halves}", ranks=2)
    assert list(losses(log)) == [4, 5, 6]
    assert_same_tensors(whole / "iter_0000006", halves / "iter_0000006")
