"""What other programs are told of a model is what transformers says of the same weights, whatever else is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.parse import parse_run
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.checkpoints.loading import saved_config
from megatron.training.checkpoints.trained_model import load_model
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.whole_text_runner import WholeTextRunner
from tasks.model_args import words_of
from tasks.registry import DEFAULTS
from tasks.settings import HarnessConfig
from tasks.zero_shot.questions import Asked, Questions, disjoint_windows, sample_of
from tests.harness.evaluation import OPENINGS, WIKITEXT_AS_TEXT, SmallGPT2
from tests.harness.ranks import run_ranks
from tests.harness.sentences import expect_error
from tests.tiers import tiers

ENDINGS = (" the sea.", " nobody", " mended by the keeper")
LENGTH = 64
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_k=30)


def questions(context: ParallelContext, native: str, **arguments: Any) -> Questions:
    config = parse_run(
        words_of({"load": native, **arguments}),
        world_size=context.mesh.world_size,
        extra_groups=(HarnessConfig, *GPT_GROUPS),
        checkpoint_config=saved_config,
        defaults={**DEFAULTS, "skip_train": True},
    )
    return Questions(load_model(config, GPTSpec(), context))


def answers(context: ParallelContext, native: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of every kind of question, one list each."""
    asked = questions(context, native, **arguments)
    ids = asked.tokenizer.tokenize
    pairs = [(ids(opening), ids(ending)) for opening in OPENINGS for ending in ENDINGS]
    pairs.append((ids(WIKITEXT_AS_TEXT), ids(ENDINGS[0])))
    texts = [*OPENINGS, WIKITEXT_AS_TEXT, "", "One"]
    prompts, numbers = [ids(opening) for opening in (*OPENINGS, WIKITEXT_AS_TEXT)], range(len(OPENINGS) + 1)
    found = {
        "pairs": asked.likelihoods([sample_of(*pair, length=asked.length) for pair in pairs]),
        "whole": asked.of_whole_texts([ids(text) for text in texts], prefix=asked.tokenizer.eod),
    }
    with mock.patch.object(WholeTextRunner, "start", side_effect=AssertionError("each token reads the whole text")):
        return found | {
            "greedy": asked.continuations(prompts, numbers, Asked(tokens=12, until=(), sampling=GREEDY)),
            "until": asked.continuations(prompts, numbers, Asked(tokens=12, until=("a", "\n"), sampling=GREEDY)),
            "sampled": asked.continuations(prompts, numbers, Asked(tokens=6, until=(), sampling=SAMPLED)),
        }


@pytest.fixture(scope="module")
def alone(gpt2: SmallGPT2) -> dict[str, Any]:
    return answers(ParallelContext.single(), str(gpt2.native), {})


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Likelihoods to 1e-6, the rest exactly."""
    close = pytest.approx([nats for nats, _ in expected["pairs"]], rel=1e-6)
    return (
        [nats for nats, _ in found["pairs"]] == close
        and [greedy for _, greedy in found["pairs"]] == [greedy for _, greedy in expected["pairs"]]
        and found["whole"] == pytest.approx(expected["whole"], rel=1e-6)
        and all(found[kind] == expected[kind] for kind in ("greedy", "until", "sampled"))
    )


def likelihood(model: Any, ids: Sequence[int], count: int) -> tuple[float, bool]:
    """Log-likelihood of the last ``count`` ids, and whether each is the likeliest."""
    with torch.no_grad():
        logprobs = model(torch.tensor([list(ids[:-1])])).logits[0].double().log_softmax(-1)[-count:]
    target = torch.tensor(ids[-count:])
    return float(logprobs.gather(1, target[:, None]).sum()), bool((logprobs.argmax(1) == target).all())


def test_continuations_are_as_likely_as_transformers_finds_them(gpt2: SmallGPT2, alone: dict[str, Any]) -> None:
    """Of contexts that fit and of one that is longer than the model sees, whose beginning goes."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    pairs = [(opening, ending) for opening in OPENINGS for ending in ENDINGS] + [(WIKITEXT_AS_TEXT, ENDINGS[0])]
    for (context, ending), (nats, greedy) in zip(pairs, alone["pairs"], strict=True):
        one, two = tokenizer(context)["input_ids"], tokenizer(ending)["input_ids"]
        expected, is_greedy = likelihood(model, (one + two)[-(LENGTH + 1) :], len(two))
        assert nats == pytest.approx(expected, rel=1e-4)
        assert greedy == is_greedy


def test_what_greedy_generation_gives_is_called_greedy(gpt2: SmallGPT2) -> None:
    """Some tasks score by this alone."""
    asked = questions(ParallelContext.single(), str(gpt2.native))
    context = asked.tokenizer.tokenize(OPENINGS[0])
    model = gpt2.transformers_model()
    ids = list(context)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 400]
    samples = [sample_of(context, each[len(context) :], length=LENGTH) for each in (ids, other)]
    assert [greedy for _, greedy in asked.likelihoods(samples)] == [True, False]


def test_whole_texts_are_as_likely_as_transformers_finds_them(gpt2: SmallGPT2, alone: dict[str, Any]) -> None:
    """Windows side by side, but the last one, which reaches back; nothing is certain."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    for text, found in zip([*OPENINGS, WIKITEXT_AS_TEXT, "", "One"], alone["whole"], strict=True):
        ids, expected = tokenizer(text)["input_ids"], 0.0
        for begin in range(0, len(ids), LENGTH):
            end = min(begin + LENGTH, len(ids))
            window = [tokenizer.eos_token_id, *ids][max(0, end - LENGTH) : end + 1]
            expected += likelihood(model, window, end - begin)[0]
        assert found == pytest.approx(expected, rel=1e-4)


def test_texts_go_on_as_transformers_has_them(gpt2: SmallGPT2, alone: dict[str, Any]) -> None:
    """Greedily; a prompt that leaves no room loses its beginning; stop strings are cut off with what follows them."""
    model, tokenizer = gpt2.transformers_model(), gpt2.transformers_tokenizer()
    for prompt, whole, until in zip((*OPENINGS, WIKITEXT_AS_TEXT), alone["greedy"], alone["until"], strict=True):
        ids = tokenizer(prompt)["input_ids"][-(LENGTH - 12) :]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected = tokenizer.decode(ids[-12:])
        assert whole == expected.partition("<|endoftext|>")[0]
        assert until == min((whole.partition(end)[0] for end in ("a", "\n")), key=len)
    assert len(set(alone["greedy"])) > 3
    assert alone["sampled"] != [text[:6] for text in alone["greedy"]]


@pytest.mark.parametrize("size", [1, 3])
def test_no_batch_size_changes_an_answer(size: int, gpt2: SmallGPT2, alone: dict[str, Any]) -> None:
    """Drawn texts, too: random numbers belong to the question."""
    assert same(answers(ParallelContext.single(), str(gpt2.native), {"micro_batch_size": size}), alone)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp pp": ({"tp": 2, "pp": 2}, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "dp": ({"dp": 3}, {}),
    "tp sp": ({"tp": 2, "sequence_parallel": True}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp dp": ({"cp": 2, "dp": 2}, {"context_parallel_size": 2}),
    "interleaved": ({"pp": 2}, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
}


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=("tp sp", "cp dp")))
def test_no_layout_changes_an_answer(layout: str, gpt2: SmallGPT2, alone: dict[str, Any]) -> None:
    """Every rank is told everything, also what other replicas have generated."""
    sizes, arguments = LAYOUTS[layout]
    for rank in run_ranks(answers, str(gpt2.native), arguments | {"micro_batch_size": 3}, **sizes):
        assert same(rank, alone)


@pytest.mark.parametrize("length", [1, 2, 5, 7])
@pytest.mark.parametrize("count", range(16))
def test_windows_score_every_token_once(count: int, length: int) -> None:
    """A token left out, or scored twice, would be another likelihood of the text."""
    ids = list(range(100, 100 + count))
    cut = list(disjoint_windows(ids, prefix=7, length=length))
    assert [token for each in cut for token in each.tokens[each.first_scored + 1 :].tolist()] == ids
    assert all(1 <= each.length <= length for each in cut)
    assert [each.tokens[0] for each in cut[:1]] == [7] * bool(ids)
    if count > length:
        assert cut[-1].length == length, "the last one reaches back"


def test_windows_are_the_harness_s() -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="compares with lm-evaluation-harness")
    for count in range(20):
        ids = list(range(count))
        theirs = utils.get_rolling_token_windows(ids, 99, max_seq_len=6, context_len=1)
        expected = [sample_of(*utils.make_disjoint_window(each), length=6) for each in theirs]
        found = list(disjoint_windows(ids, prefix=99, length=6))
        assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in expected]
        assert [each.first_scored for each in found] == [each.first_scored for each in expected]


def test_samples_are_batched_with_others_of_their_length(gpt2: SmallGPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMBADA's time would be that of its longest samples, most of it spent on padding."""
    asked = questions(ParallelContext.single(), str(gpt2.native), micro_batch_size=4)
    read, step = list[int](), Evaluator._step

    def counted(evaluator: Evaluator[Any], batches: Any, longest: int, size: int, metric: Any) -> Any:
        read.append(longest * size * len(batches))
        return step(evaluator, batches, longest, size, metric)

    monkeypatch.setattr(Evaluator, "_step", counted)
    lengths = [3, 60] * 16
    asked.likelihoods([sample_of([1] * length, [2], length=LENGTH) for length in lengths])
    assert sum(read) == sum(lengths)


def test_mistakes_are_one_sentence(gpt2: SmallGPT2) -> None:
    with expect_error(ConfigError, "num_beams", "max_gen_toks"):
        Asked.of({"until": ["."], "max_gen_toks": 16, "num_beams": 4})
    with expect_error(ConfigError, "5 tokens", "4"):
        sample_of([1], [1, 2, 3, 4, 5], length=4)
    asked = questions(ParallelContext.single(), str(gpt2.native))
    with expect_error(ConfigError, "64 tokens"):
        asked.continuations([[1]], [0], Asked(tokens=64, until=(), sampling=GREEDY))


def test_what_the_harness_asks_for() -> None:
    """Greedy unless it says to sample, whatever temperature it names; empty stop strings would end every text."""
    asked = Asked.of({"until": ["", "."], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7})
    assert asked == Asked(tokens=3, until=(".",), sampling=GREEDY)
    sampled = Asked.of({"max_gen_toks": 3, "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert sampled.sampling == Sampling(temperature=0.7, top_p=0.9)
