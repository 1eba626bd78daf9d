"""Texts about pictures: what transformers generates, in any chunks, on other ranks, and never about another picture."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import PortableModel, load_weights
from megatron.core.images.prompts import PromptImages
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.models.registry import family_of
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import DataError
from tests.harness.published import in_fp64
from tests.harness.sentences import expect_error
from tests.unit.conversion.test_vision_language_types import random_model

NEW, LENGTH, MARK = 6, 64, 98


@functools.cache
def published(name: str = "internvl 300M, untied") -> tuple[Any, PortableModel]:
    """A model of transformers, and the same model here."""
    with in_fp64():
        theirs = random_model(name).double()
    portable = from_transformers(theirs)
    return theirs, replace(portable, model=replace(portable.model, make_vocab_size_divisible_by=1))


def pictures(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random tiles."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 16, 16), np.uint8)


def request(name: str, images: PromptImages | None, *, words: int = 5) -> Request:
    """Words, tiles one after the other, and words."""
    before, after = (3, 1, 4, 1, 5)[:words], (9, 2, 6)
    count = 0 if images is None else len(images.tiles)
    prompt = (*before, *[MARK] * (4 * count), *after)
    if images is not None:
        places = [-1] * len(before) + list(range(4 * count)) + [-1] * len(after)
        images = PromptImages(images.tiles, np.array(places, np.int64), 4)
    return Request(id=name, prompt=prompt, max_tokens=NEW, sampling=Sampling(temperature=0.0), images=images)


def tiles(seed: int, count: int) -> PromptImages:
    """Random tiles, to be placed."""
    return PromptImages(pictures(seed, count), np.zeros(0, np.int64), 4)


def engine(
    options: SchedulerOptions | None = None, *, name: str = "internvl 300M, untied", backend: str = "auto"
) -> Engine:
    """An engine of the model in fp64."""
    _, portable = published(name)
    portable = replace(portable, model=replace(portable.model, attention_backend=backend))  # type: ignore[arg-type]
    context = ModelContext.single(dtype=torch.float64)
    return Engine(_runner(portable, context), options=options)


def _runner(portable: PortableModel, context: ModelContext) -> CachedRunner:
    ours = family_of(portable.groups).train_spec.build_model(portable.model, portable.groups, context).eval()
    load_weights(ours, portable, context.mesh)
    vision = VisionConfig.among(portable.groups)
    limits = RunnerLimits(
        num_blocks=48,
        block_size=4,
        max_requests=4,
        max_length=LENGTH,
        vocabulary=99,
        image_shape=(vision.img_h, vision.img_w, vision.features_per_tile),
    )
    return CachedRunner(ours, portable.model, context, limits)


REQUESTS = [request("one", tiles(1, 1)), request("text", None), request("two", tiles(2, 2), words=2)]


@functools.cache
def theirs_of(number: int) -> list[int]:
    """What transformers generates for a request."""
    theirs, portable = published()
    vision, asked = VisionConfig.among(portable.groups), REQUESTS[number]
    mean, deviation = (torch.tensor(each).double().view(3, 1, 1) for each in (vision.kind.mean, vision.kind.deviation))
    more = {}
    if asked.images is not None:
        more = {"pixel_values": (torch.from_numpy(asked.images.tiles).double() / 255 - mean) / deviation}
    ids = torch.tensor([asked.prompt])
    with in_fp64(), torch.no_grad():
        for _ in range(NEW):
            logits = theirs(input_ids=ids, **more).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, -NEW:].tolist()


@pytest.mark.parametrize(
    "options",
    [SchedulerOptions(), SchedulerOptions(max_tokens=4, prefix_caching=False)],
    ids=["prompts as a whole", "prompts in chunks that cut images"],
)
def test_texts_about_pictures_are_those_of_transformers(options: SchedulerOptions) -> None:
    """Features of another text of the batch, or of the wrong half of a picture, say something else."""
    found = engine(options).generate(REQUESTS)
    assert [[token.id for token in each.tokens] for each in found] == [theirs_of(number) for number in range(3)]


def seen(name: str, number: int) -> Request:
    """A request whose pictures have places as the model has."""
    vision, asked = VisionConfig.among(published(name)[1].groups), REQUESTS[number]
    count, before = 0 if asked.images is None else len(asked.images.tiles), asked.prompt[: (5, 5, 2)[number]]
    features = vision.features_per_tile
    runs = [range(tile * features, (tile + 1) * features) for tile in range(count)]
    places = [-1] * len(before)
    for run in runs:
        places += [*run, -1]
    prompt = (*before, *[token for run in runs for token in (*[MARK] * len(run), 8)], 9, 2, 6)
    images = None
    if asked.images is not None:
        images = PromptImages(asked.images.tiles, np.array([*places, -1, -1, -1], np.int64), features)
    return replace(asked, prompt=prompt, images=images)


@functools.cache
def theirs_ahead(name: str, number: int) -> list[int]:
    """What transformers generates for ``seen``, reading the whole text for each token."""
    theirs, portable = published(name)
    vision, asked = VisionConfig.among(portable.groups), seen(name, number)
    more, ids, kinds = {}, torch.tensor([asked.prompt]), torch.zeros(1, len(asked.prompt), dtype=torch.long)
    if asked.images is not None:
        mean, deviation = (
            torch.tensor(each).double().view(3, 1, 1) for each in (vision.kind.mean, vision.kind.deviation)
        )
        more = {"pixel_values": (torch.from_numpy(asked.images.tiles).double() / 255 - mean) / deviation}
        kinds = kinds if name == "paligemma" else torch.from_numpy(asked.images.places >= 0).long()[None]
    with in_fp64(), torch.no_grad():
        for _ in range(NEW):
            logits = theirs(input_ids=ids, token_type_ids=kinds, use_cache=False, **more).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            kinds = torch.cat([kinds, torch.full((1, 1), int(name == "paligemma"))], 1)
    return ids[0, -NEW:].tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", SchedulerOptions(max_tokens=3)),
        *(
            pytest.param(name, options, marks=pytest.mark.slow(reason="other chunks, and the other model"))
            for name in ("gemma3", "paligemma")
            for options in (SchedulerOptions(), SchedulerOptions(max_tokens=3, prefix_caching=False))
        ),
    ],
)
@pytest.mark.parametrize("backend", ["auto", pytest.param("eager", marks=pytest.mark.slow(reason="another backend"))])
def test_places_that_see_later_ones_are_read_together(name: str, options: SchedulerOptions, backend: str) -> None:
    """A chunk that ends within a picture, or a prompt, would have places that see a part of it alone."""
    one = engine(options, name=name, backend=backend)
    asked = [seen(name, number) for number in range(3)]
    for _ in range(2):  # the second time from the cache
        found = one.generate([replace(each, id=f"{each.id} {_}") for each in asked])
        assert [[token.id for token in each.tokens] for each in found] == [theirs_ahead(name, n) for n in range(3)]


def test_the_cache_tells_pictures_apart() -> None:
    """Ids at places of images are all alike: by them alone a text would go on about somebody else's picture."""
    one = engine()
    alike = [replace(request(f"{seed}", tiles(seed, 2)), max_tokens=NEW) for seed in (5, 6)]
    first, other = (one.generate([each])[0] for each in alike)
    again = one.generate([replace(alike[0], id="again")])[0]
    assert [first.cached_tokens, other.cached_tokens, again.cached_tokens] == [0, 4, 12]  # four words are the same
    assert first.tokens == again.tokens and first.tokens != other.tokens
    assert engine().generate([replace(alike[1], id="alone")])[0].tokens == other.tokens


def test_plan_with_images_travels_as_integers() -> None:
    """Other ranks of a stage encode the same tiles at the same places."""
    images = replace(REQUESTS[2]).images
    assert images is not None
    rows = (
        PlanRow(slot=1, start=2, tokens=(MARK,) * 5, blocks=(3, 4), logits_from=5, images=images.within(2, 7)),
        PlanRow(slot=0, start=0, tokens=(7,), blocks=(9,), logits_from=0),
        PlanRow(slot=2, start=6, tokens=(MARK,) * 4, blocks=(5,), logits_from=4, images=images.within(6, 10)),
    )
    plan = StepPlan(rows, ((1, 2),))
    found = StepPlan.from_array(plan.to_array())
    for row, other in zip(plan.rows, found.rows, strict=True):
        assert replace(row, images=None) == replace(other, images=None)
        assert (row.images is None) == (other.images is None)
        if row.images is not None and other.images is not None:
            assert row.images.digest == other.images.digest and row.images.features == other.images.features
    first, _, last = (row.images for row in rows)
    assert first is not None and last is not None
    assert first.places.tolist() == [0, 1, 2, 3, 4] and len(first.tiles) == 2
    assert last.places.tolist() == [0, 1, 2, 3] and np.array_equal(last.tiles, images.tiles[1:])
    assert images.within(0, 2) is None


def test_prompts_that_see_themselves_have_no_log_probabilities() -> None:
    """A token that has seen the next one would be sure of it."""
    asked = replace(seen("paligemma", 1), prompt_logprobs=0)
    with expect_error(DataError, "prompt_logprobs"):
        engine(name="paligemma").submit(asked)
    engine(name="gemma3").submit(asked)


def test_images_that_the_model_does_not_read_are_refused() -> None:
    """Tiles of another size would be cut into other patches."""
    one, wrong = engine(), request("wrong", tiles(1, 1))
    assert wrong.images is not None
    with expect_error(DataError, "[3, 16, 16]"):
        one.submit(replace(wrong, images=replace(wrong.images, tiles=np.zeros((1, 3, 8, 8), np.uint8))))
    with expect_error(DataError, "prompt has 12 places"):
        one.submit(replace(wrong, images=replace(wrong.images, places=wrong.images.places[:-1])))
