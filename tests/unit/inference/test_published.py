"""Greedy answers and beams of published models are those of transformers' generate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

from transformers import GenerationConfig

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import load_weights
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request, StopRules
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.models.registry import family_of
from megatron.core.parallel.model_context import ModelContext
from tests.harness.published import fp64_model, in_fp64, without_dropout
from tests.published import FIRST, LIKE_ANOTHER, MODELS
from tests.tiers import tiers

PROMPTS = [(3, 1, 4), (5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6), (7,)]
NEW, LENGTH, WIDTH = 20, 64, 4
UNEQUAL_STEPS = ("nemotron_h", "mamba2", "bamba")
"""Types whose cached step isn't their own whole pass in transformers: it forgets the limits of the step of time."""
ENCODERS = ("bert", "megatron-bert", "roberta", "xlm-roberta", "camembert", "modernbert")
GENERATES = [name for name, (model_type, _) in MODELS.items() if model_type not in ENCODERS]


OWN_WAYS = [name for name in GENERATES if name in FIRST.values() and name not in LIKE_ANOTHER]


@pytest.mark.parametrize("name", tiers(GENERATES, first=[*OWN_WAYS, "bloom", "opt"]))
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """A cache that forgets a window, an offset or a layer's positions says something else after a few tokens."""
    theirs = fp64_model(*MODELS[name])
    portable = from_transformers(theirs)
    context = ModelContext.single(dtype=torch.float64)
    config = without_dropout(portable.model)
    ours = family_of(portable.groups).train_spec.build_model(config, portable.groups, context).eval()
    load_weights(ours, portable, context.mesh)
    is_encoder_decoder = bool(theirs.config.is_encoder_decoder)
    limits = RunnerLimits(
        num_blocks=48,
        block_size=4,
        max_requests=WIDTH,
        max_length=LENGTH,
        vocabulary=portable.model.vocab_size or 0,
        max_encoder_length=LENGTH if is_encoder_decoder else 0,
    )
    first: int | None = theirs.config.decoder_start_token_id if is_encoder_decoder else None
    requests = [
        Request(
            id=str(number),
            prompt=prompt if first is None else (first,),
            encoder_prompt=prompt if is_encoder_decoder else (),
            max_tokens=NEW,
            sampling=Sampling(temperature=0.0),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    engine = Engine(CachedRunner(ours, config, context, limits))
    results = engine.generate(requests)
    greedy = _greedy_at_length if config.position_embedding_type in ("dynamic_ntk", "longrope") else _greedy
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert [token.id for token in result.tokens] == greedy(theirs, prompt, first)
    if greedy is _greedy_at_length:
        return
    beams = BeamSearch(width=WIDTH, length_penalty=0.7)
    ends = frozenset(result.tokens[4].id for result in results)  # likely enough to end some beams
    searches = [replace(request, beams=beams, stop=StopRules(token_ids=ends)) for request in requests[1:]]
    for prompt, result in zip(PROMPTS[1:], engine.generate(searches), strict=True):
        found, scores = _beams(theirs, prompt, first, beams, sorted(ends))
        assert [[token.id for token in beam.tokens] for beam in result.beams] == found
        assert [beam.score for beam in result.beams] == pytest.approx(scores, rel=1e-5)


def _greedy_at_length(model: Any, prompt: tuple[int, ...], first: int | None) -> list[int]:
    """Where frequencies depend on a text's length, its cache holds keys of former frequencies in transformers, and no
    text is a function of its tokens. Ours are those of the longest text: transformers has them for a text padded to it.
    """
    assert first is None
    text = list(prompt)
    with in_fp64(), torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([text + [0] * (LENGTH - len(text))]), use_cache=False).logits
            text.append(int(logits[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


def _greedy(model: Any, prompt: tuple[int, ...], first: int | None) -> list[int]:
    text: list[int] = _generated(model, prompt, first).sequences[0].tolist()
    return text


def _beams(
    model: Any, prompt: tuple[int, ...], first: int | None, beams: BeamSearch, ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    """Tokens of the answers, up to the one that ended it, and their scores."""
    settings = {"num_beams": beams.width, "num_return_sequences": beams.width, "length_penalty": beams.length_penalty}
    answer = _generated(model, prompt, first, eos_token_id=ends, output_scores=True, **settings)
    texts = []
    for text in answer.sequences.tolist():
        length = next((place for place, token in enumerate(text, start=1) if token in ends), NEW)
        texts.append(text[:length])
    return texts, answer.sequences_scores.tolist()


def _generated(model: Any, prompt: tuple[int, ...], first: int | None, **settings: Any) -> Any:
    """What generate returns, with ``sequences`` without the prompt."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
        decoder_start_token_id=first,
        # Its cache of a T5 has as many layers as the encoder.
        use_cache=first is None and model.config.model_type not in UNEQUAL_STEPS,
        return_dict_in_generate=True,
        **{"eos_token_id": None, **settings},
    )
    model.generation_config = config
    with in_fp64():
        answer = model.generate(torch.tensor([prompt]), generation_config=config)
    answer.sequences = answer.sequences[:, 1 if first is not None else len(prompt) :]
    return answer
