"""Suggestions for misspelt words: right or absent, never another flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.command import CommandConfig
from megatron.config.flags import flags_of
from megatron.config.names_elsewhere import ADVICE, SAME
from megatron.config.run import CORE_GROUPS
from megatron.config.suggestions import did_you_mean, parts_of
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse

OURS = {
    spelling: (spec.field, value)
    for group in (*CORE_GROUPS, CommandConfig)
    for spec in flags_of(group)
    for spelling, value in spec.spellings().items()
}
FOREIGN = (Path(__file__).parent / "foreign_flags.txt").read_text()


def suggested(spelling: str) -> str:
    """The flag that the parser suggests for ``spelling``; nothing when it suggests none, or knows the flag."""
    try:
        parse(spelling)
    except ConfigError as error:
        return next(iter(re.findall(r"did you mean (.+?)\?", str(error))), "")
    return ""


def foreign_flags() -> Iterator[tuple[str, str]]:
    for line in FOREIGN.splitlines():
        words = line.split() if not line.startswith("#") else []
        for at, word in enumerate(words):
            if word != "=" and words[at - 1 : at] != ["="]:
                yield word, words[at + 2] if words[at + 1 : at + 2] == ["="] else ""


def typos(flag: str) -> Iterator[str]:
    """Letters left out or exchanged, a plural, a dash left out or one too many."""
    body = flag[2:]
    for at in range(len(body) - 1):
        pair = body[at : at + 2]
        if pair.isalpha():
            yield f"--{body[:at]}{body[at + 1 :]}"
            yield f"--{body[:at]}{pair[::-1]}{body[at + 2 :]}"
        if body[at] == "-":
            yield f"--{body[:at]}{body[at + 1 :]}"
    yield flag.removesuffix("s") if flag.endswith("s") else f"{flag}s"


def test_flags_of_other_programs_are_never_taken_for_ours() -> None:
    """--deepspeed was answered with --seed, --window-size with --world-size, --resume with --relu: who follows such
    advice trains something else.
    """
    flags = list(foreign_flags())
    assert len(flags) > 400
    wrong = {flag: suggestion for flag, meant in flags if (suggestion := suggested(flag)) not in ("", meant)}
    assert wrong == {}


def test_likely_typos_are_recognized_and_never_mistaken() -> None:
    """A suggestion for a typo of our own flag is that flag; at most one in ten is left without."""
    parts = {part for spelling in OURS for part in parts_of(spelling)}
    tried = found = 0
    for flag in sorted(OURS)[::7]:
        for typo in list(typos(flag))[::5]:
            if typo in OURS:
                continue
            hint = did_you_mean(typo, OURS, words=parts)
            tried += 1
            found += bool(hint)
            assert not hint or OURS[hint.removeprefix(" (did you mean ").removesuffix("?)")] == OURS[flag], typo
    assert tried > 150
    assert found / tried > 0.9


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--hiden-size", "--hidden-size"),
        ("--num-layres", "--num-layers"),
        ("--num-layer", "--num-layers"),
        ("--numlayers", "--num-layers"),
        ("--microbatch-size", "--micro-batch-size"),
        ("--Num-Layers", "--num-layers"),
        ("--lr-min", "--min-lr"),
        ("--size-hidden", "--hidden-size"),
        ("--tensor-model-paralel-sizes", "--tensor-model-parallel-size"),
        ("--seeed", "--seed"),
        ("--tran-iters", "--train-iters"),
        ("--hidden-sise", "--hidden-size"),
        ("--seq-len", "--seq-length"),
        ("--hidden-dim", "--hidden-size"),
        ("--n_embd", "--hidden-size"),
        ("--training.seq_len", "--seq-length"),
        ("--optimizer.lr", "--lr"),
    ],
)
def test_typos(typed: str, meant: str) -> None:
    """What people mistype is named."""
    assert suggested(typed) == meant


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("--epochs 3", ["--train-iters", "--train-samples"]),
        ("--device cpu", ["CUDA_VISIBLE_DEVICES"]),
        ("--dtype bfloat16", ["--bf16", "--fp16", "fp32"]),
    ],
)
def test_names_elsewhere(typed: str, advice: list[str]) -> None:
    """A newcomer from another program heard only that there is no such flag."""
    with expect_error(ConfigError, typed.split()[0], *advice):
        parse(typed)


def test_names_elsewhere_are_of_flags() -> None:
    """Advice names flags that are there, for names that aren't."""
    assert {*SAME.values()} <= {*OURS, "--num-experts", "--moe-router-topk"}
    named = {flag for advice in ADVICE.values() for flag in re.findall(r"--[\w-]+", advice)}
    assert named <= {*OURS}
    assert not {parts_of(flag) for flag in OURS} & {*SAME, *ADVICE}


def test_two_candidates_are_none() -> None:
    """--adam-beta may be the first or the second: no guess."""
    assert did_you_mean("--adam-beta", ["--adam-beta1", "--adam-beta2"]) == ""
    assert did_you_mean("--banana", ["--hidden-size"]) == ""


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("layernorm", ["LayerNorm", "RMSNorm"], "LayerNorm"),
        ("Llama3Tokenizer", ["Llama2Tokenizer", "TikTokenizer"], ""),
        ("gpt2-bpe-tokenizer", ["GPT2BPETokenizer"], "GPT2BPETokenizer"),
        ("cosin", ["linear", "cosine"], "cosine"),
        ("alibi", ["rope", "relative", "none"], ""),
    ],
)
def test_values(typed: str, known: list[str], meant: str) -> None:
    """Values are compared like flags: another number is another value."""
    assert did_you_mean(typed, known) == (f" (did you mean {meant}?)" if meant else "")
