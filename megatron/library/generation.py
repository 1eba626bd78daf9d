"""Text and token ids continued by a model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import subject
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request, StopRules
from megatron.core.inference.runner import CachedRunner, EncoderDecoder, GenerativeModel
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import ConfigError, DataError
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.whole_text_runner import WholeTextRunner

_BLOCK_SIZE = 64
_AT_ONCE = 64  # texts whose keys and values are in memory together
USUAL_LENGTH = 64
"""New tokens of an answer unless its caller says how many."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Options of ``LanguageModel.generate``, whose docstring explains them.

    Raises ConfigError for values out of range and for options that have no effect together.
    """

    max_new_tokens: int | None
    sampling: Sampling
    num_beams: int
    length_penalty: float
    stop: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if self.num_beams < 1:
            raise ConfigError(f"num_beams is {self.num_beams}; it must be 1 (sampling) or more (beam search)")
        if self.num_beams == 1:
            if self.length_penalty != 1.0:
                raise ConfigError("length_penalty has no effect without beam search: give num_beams, such as 4")
            return
        sampling = self.sampling
        given = {
            "temperature": sampling.temperature not in (0, 1),
            "top_k": sampling.top_k != 0,
            "top_p": sampling.top_p not in (0, 1),
            "min_p": sampling.min_p != 0,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ConfigError(
                f"{subject(names, 'has', 'have')} no effect with num_beams={self.num_beams}, which samples no tokens"
            )
        if self.stop:
            raise ConfigError(f"stop has no effect with num_beams={self.num_beams}: its texts end with end tokens only")


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model on one device, and the tokens around its texts.

    ``tokenizer``: None for a model whose prompts are ids. ``end_tokens``: ids that end a text. ``decoder_start``: the
    id that the text of an encoder-decoder model begins with, if it is known.
    """

    placed: PlacedModel
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]
    decoder_start: int | None = None


def continued(model: TextModel, prompts: Any, options: Generation) -> Any:
    """The continuations of a prompt or a list of prompts, in the prompts' form.

    Raises ConfigError for a model that continues no texts and for prompts of the wrong form, DataError for a prompt
    without room.
    """
    is_one = isinstance(prompts, str) or (
        isinstance(prompts, (list, tuple)) and len(prompts) > 0 and all(isinstance(each, int) for each in prompts)
    )
    given = [prompts] if is_one else prompts
    ids = _ids(given, model.tokenizer)
    if not ids:
        return []
    engine = _engine(model, max(map(len, ids)), min(len(ids), _AT_ONCE), options)
    try:
        results = engine.generate([_request(model, each, engine, options, number=n) for n, each in enumerate(ids)])
    finally:
        engine.close()
    for number, result in enumerate(results, start=1):
        if result.finish.reason == "error":
            raise DataError(f"prompt {number}: {result.finish.error}")
    best = [result.answers[0] for result in results]
    found = [answer.text if isinstance(each, str) else answer.ids for each, answer in zip(given, best)]
    return found[0] if is_one else found


def _ids(given: Any, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of each prompt; raises ConfigError for anything but texts and lists of ids."""
    if not isinstance(given, (list, tuple)):
        raise ConfigError(
            f"the prompt has type {type(given).__name__}: give a text, a list of token ids, or a list of these"
            f"{', such as ids.tolist()' if hasattr(given, 'tolist') else ''}"
        )
    texts = [each for each in given if isinstance(each, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f"the prompt {texts[0][:40]!r} is text, and this model has no tokenizer: give token ids, such as [5, 6, "
            "7], or pass tokenizer=FOLDER to megatron.from_transformers"
        )
    encoded = iter(tokenizer.tokenize_batch(texts)) if tokenizer is not None else iter(())
    found = []
    for number, each in enumerate(given, start=1):
        if not isinstance(each, str) and not (isinstance(each, (list, tuple)) and all(type(id) is int for id in each)):
            raise ConfigError(
                f"prompt {number} ({type(each).__name__}) is neither a text nor a list of token ids, which are whole "
                f"numbers{': pass ids.tolist()' if hasattr(each, 'tolist') else ''}"
            )
        found.append(list(next(encoded) if isinstance(each, str) else each))
    return found


def _engine(text_model: TextModel, longest: int, max_requests: int, options: Generation) -> Engine:
    """An engine with room for the longest prompt and its answer; it is used once, as weights may change after it."""
    placed, tokenizer = text_model.placed, text_model.tokenizer
    (model,), config = placed.models, placed.config.model
    if not (isinstance(model, GenerativeModel) or placed.train_spec.continues_texts):
        raise ConfigError(f"a {placed.train_spec.name} model continues no texts: call it for its logits instead")
    if not isinstance(model, GenerativeModel) or model.layer_states().unknown:
        return Engine(WholeTextRunner(Evaluator(placed), max_requests=max_requests), tokenizer=tokenizer)
    assert config.vocab_size is not None, "the model was built with one"
    encodes, length = isinstance(model, EncoderDecoder), config.max_position_embeddings
    needed = min(length, longest + (options.max_new_tokens or USUAL_LENGTH)) * max(1, options.num_beams)
    limits = RunnerLimits(
        num_blocks=1 + max_requests * (1 + options.num_beams) * -(-needed // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_requests=max_requests * options.num_beams,
        max_length=length,
        vocabulary=config.vocab_size,
        max_encoder_length=length if encodes else 0,
    )
    runner = CachedRunner(model, config, placed.context, limits)
    runner.warm_up()
    return Engine(runner, tokenizer=tokenizer, options=SchedulerOptions(prefix_caching=not encodes))


def _request(model: TextModel, ids: Sequence[int], engine: Engine, options: Generation, *, number: int) -> Request:
    """A request of an engine; an encoder reads the prompt of a model that has one."""
    prompt, encoder_prompt = tuple(ids), tuple[int, ...]()
    if engine.limits.max_encoder_length:
        if model.decoder_start is None:
            raise ConfigError(
                "the token that the decoder's text begins with is unknown: pass the model's tokenizer to "
                "megatron.from_transformers (tokenizer=FOLDER)"
            )
        prompt, encoder_prompt = (model.decoder_start,), prompt
    room = max(1, engine.limits.context_length - len(prompt))
    return Request(
        id=str(number),
        prompt=prompt,
        encoder_prompt=encoder_prompt,
        max_tokens=min(USUAL_LENGTH, room) if options.max_new_tokens is None else options.max_new_tokens,
        sampling=options.sampling,
        stop=StopRules(token_ids=model.end_tokens, strings=options.stop),
        seed=options.seed + number,
        skip_special_tokens=True,
        beams=BeamSearch(width=options.num_beams, length_penalty=options.length_penalty)
        if options.num_beams > 1
        else None,
    )
