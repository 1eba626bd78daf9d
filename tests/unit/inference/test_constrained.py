"""A program that reads an answer as JSON must be able to, whatever the model likes to write."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.inference import constrained
from megatron.core.inference.constrained import Constraint, ConstraintCompiler, Vocabulary
from megatron.core.inference.detokenizer import IncrementalDetokenizer
from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampler import SampleRow, SamplerState, sample
from megatron.core.inference.sampling import Sampling
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error
from tests.unit.inference.test_detokenizer import KINDS

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

FULL = ["byte-level BPE", "Llama in Hugging Face's form", "SentencePiece with bytes and BOS", "tiktoken"]


def compiler(kind: str, folder: Path) -> tuple[Tokenizer, ConstraintCompiler]:
    tokenizer = KINDS[kind](folder)
    return tokenizer, ConstraintCompiler(Vocabulary.of(tokenizer, [tokenizer.eod]))


def answer(tokenizer: Tokenizer, constraint: Constraint, *, seed: int, most: int = 1000) -> str:
    """What a model of random logits writes until it ends the text; drafts don't change it."""
    stop = StopRules(token_ids=frozenset({tokenizer.eod}))
    sampling = Sampling(repetition_penalty=1.1)
    state = SamplerState(
        Request(id="r", prompt=(5,), max_tokens=most, constraint=constraint, seed=seed, stop=stop, sampling=sampling)
    )
    generator = torch.Generator().manual_seed(seed)
    stream, text = IncrementalDetokenizer(tokenizer, [5]), ""
    for _ in range(most):
        logits = torch.randn(1, tokenizer.vocab_size + 7, generator=generator)  # columns that are padding
        sampled = sample(logits, [SampleRow(state)])[0]
        assert sampled.error is None, text
        if sampled.token == tokenizer.eod:
            return text + stream.finish()
        drafts = [SampleRow(state, drafts=(sampled.token, 7)), SampleRow(state, drafts=(tokenizer.eod,))]
        sample(logits.expand(2, -1), drafts if seed % 2 else drafts[::-1])
        state.append(sampled.token)
        text += stream.add(sampled.token)
    raise AssertionError(f"the answer didn't end: {text!r}")


def random_schema(draw: random.Random, *, depth: int = 2) -> dict[str, Any]:
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": "integer", "minimum": draw.randrange(-20, 0), "maximum": draw.randrange(1, 500)},
        lambda: {"type": "number", "minimum": 0, "maximum": 10},
        lambda: {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 9)},
        lambda: {"type": "string", "pattern": "^[a-c]{1,4}-[0-9]{2}$"},
        lambda: {"enum": draw.sample(["a", 'b"', 1, None, True, "café"], 3)},
        lambda: {"type": draw.choice(["boolean", "null"])},
        lambda: {"const": draw.choice(["x", 5, {"k": []}])},
    ]
    if depth:
        part = [random_schema(draw, depth=depth - 1) for _ in range(3)]
        names = draw.sample(["name", "id", "tags", "ä b"], 3)
        kinds = (
            3
            * [
                lambda: {
                    "type": "object",
                    "properties": dict(zip(names, part)),
                    "required": draw.sample(names, 2),
                    "additionalProperties": False,
                },
                lambda: {"type": "array", "items": part[0], "minItems": draw.randrange(3), "maxItems": 3},
                lambda: {"anyOf": part[:2]},
            ]
            + kinds
        )
    schema: dict[str, Any] = draw.choice(kinds)()
    return schema


@pytest.mark.parametrize("kind", FULL)
def test_answers_validate_against_random_schemas(kind: str, tmp_path: Path) -> None:
    """A grammar that allows too much writes JSON that its reader refuses; a random model finds what is allowed."""
    jsonschema = pytest.importorskip("jsonschema_rs", reason="it checks answers: pip install -e '.[dev-all]'")
    tokenizer, compile_for = compiler(kind, tmp_path)
    numbers = random.Random(kind)
    for seed in range(15):
        schema = random_schema(numbers)
        text = answer(tokenizer, compile_for.json_schema(schema), seed=seed)
        assert jsonschema.is_valid(schema, json.loads(text)), (schema, text)


def test_regular_expressions_choices_and_grammars(tmp_path: Path) -> None:
    tokenizer, compile_for = compiler("byte-level BPE", tmp_path)
    for seed in range(10):
        pattern = "(the |[ab]{2,5})-[0-9]{1,3}é"
        assert re.fullmatch(pattern, answer(tokenizer, compile_for.regex(pattern), seed=seed))
        choices = ["yes", 'no "q"\n', "yes, dog"]
        assert answer(tokenizer, compile_for.choice(choices), seed=seed) in choices
        nested = answer(tokenizer, compile_for.grammar('start: "1" | "2" | "(" start ")"'), seed=seed)
        assert nested.strip("()") in ("1", "2") and nested.count("(") == nested.count(")")
    shared = compile_for.json_object()
    assert shared.begin().allowed() is not None
    first, second = shared.begin(), shared.begin()
    first.append(tokenizer.tokenize("{")[0])
    before = second.allowed()
    assert str(before) == str(shared.begin().allowed())  # answers don't share their state


def test_drafts_that_leave_the_grammar_are_no_error(tmp_path: Path) -> None:
    tokenizer, compile_for = compiler("byte-level BPE", tmp_path)
    state = compile_for.regex("ab+c").begin()
    a, b, c = (tokenizer.tokenize(letter)[0] for letter in "abc")
    first = state.allowed()
    assert state.allowed((a, c)) is None and state.allowed((a, b)) is not None
    assert str(state.allowed()) == str(first)


def test_json_has_no_blank_lines(tmp_path: Path) -> None:
    """Up to 40 line breaks between any two parts: none of 12 answers of a small model with 80 tokens was complete."""
    tokenizer, compile_for = compiler("byte-level BPE", tmp_path)
    state = compile_for.json_object().begin()
    brace, line, space, quote = (tokenizer.tokenize(letter)[0] for letter in '{\n "')
    for drafts, is_allowed in (
        ((brace, quote), True),
        ((brace, space, quote), True),
        ((brace, line, space, space, space, quote), True),
        ((brace, space, space), False),
        ((brace, line, line), False),
        ((brace, line, space, line), False),
    ):
        assert (state.allowed(drafts) is not None) == is_allowed, drafts


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda compile_for: compile_for.json_schema({"type": "strange"}), "strange"),
        (lambda compile_for: compile_for.json_schema({"not": {}}), "not"),
        (lambda compile_for: compile_for.json_schema({"$ref": "http://a.b/c"}), "http://a.b/c"),
        (lambda compile_for: compile_for.regex("a(b"), "a(b"),
        (lambda compile_for: compile_for.grammar("start: other"), "other"),
        (lambda compile_for: compile_for.choice([]), "empty"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(
    make: Callable[[ConstraintCompiler], Constraint], fact: str, tmp_path: Path
) -> None:
    with expect_error(ConfigError, fact) as caught:
        make(compiler("tiktoken", tmp_path)[1])
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_cannot_spell_the_grammar_is_one_sentence() -> None:
    """It was "NoExtensionBias", the library's word for it, and then the insides of its parser."""
    compile_for = ConstraintCompiler(Vocabulary.of(NullTokenizer(300), frozenset({300})))
    with expect_error(ConfigError):
        compile_for.json_object()


def test_a_grammar_is_compiled_once(tmp_path: Path) -> None:
    """Most clients send one schema with all their requests."""
    compile_for = compiler("tiktoken", tmp_path)[1]
    first = compile_for.regex("a")
    assert (
        compile_for.regex("a") is first is compile_for.compiled(first.grammar) and compile_for.regex("b") is not first
    )


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with expect_error(ConfigError):
        Vocabulary.of(KINDS["tiktoken"](tmp_path), [])


def test_names_the_extra_when_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with expect_error(ConfigError):
        compiler("byte-level BPE", tmp_path)


def test_masks_that_hold_everybody_up_end_their_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 patterns side by side took 50 ms for each token of each of 128 texts: neighbours waited 6 s for a token. What
    the grammar takes counts for all its answers, and none of them can go on.
    """
    tokenizer, grammars = compiler("byte-level BPE", tmp_path)
    clock = itertools.count(0.0, 0.05)
    monkeypatch.setattr(constrained, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    constraint = grammars.regex("a+")
    states = [SamplerState(Request(id="r", prompt=(5,), max_tokens=99, constraint=constraint)) for _ in range(2)]
    rows, logits = [SampleRow(state) for state in states], torch.zeros(2, tokenizer.vocab_size)
    sampled = [sample(logits, rows) for _ in range(4)]
    assert [each.is_refusal for tokens in sampled for each in tokens] == [False] * 5 + [True] * 3
    check_line(str(sampled[-1][0].error), "50 ms", "may take 5")
    assert constraint.cost.masks == 6  # that of compiling among them


def test_masks_of_usual_grammars_cost_little(tmp_path: Path) -> None:
    """A grammar that is used for hours is not taken for one that holds everybody up."""
    tokenizer, grammars = compiler("byte-level BPE", tmp_path)
    constraint = grammars.json_schema({"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 9})
    for seed in range(20):
        answer(tokenizer, constraint, seed=seed)
    assert constraint.cost.masks > 100 and constraint.begin().problem() is None
