"""See what a trained T5 says where spans of a text are missing: texts with [MASK] in, its words for each out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megatron.config.flags import check_flags, flag
from megatron.config.parse import parse_groups
from megatron.config.t5 import T5Config
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.inference.gaps import MASK, around_gaps, check_gaps, check_length
from megatron.core.parallel.environment import launch_environment, told_once_a_node
from megatron.errors import ConfigError, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.models.t5 import T5Model
    from megatron.core.tokenizers.base import SpanTokenizer
    from megatron.training.trained_model import TrainedModel


@check_flags
@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """What is filled in."""

    text: tuple[str, ...] = flag(f"Texts with {MASK} where words are missing.")


def main(argv: Sequence[str]) -> int:
    """Load the model and fill every text."""
    with told_once_a_node():
        config, choice = parse_groups(argv, SpanConfig, TrainedModelConfig, prog="fill_spans.py", about=__doc__ or "")
        check_gaps(config.text)
    from megatron.training.recipes.t5 import RECIPE
    from megatron.training.trained_model import trained_model

    with trained_model(choice, {RECIPE.name: RECIPE}, launch_environment()) as trained:
        for text in config.text:
            lines = list(filled(text, trained))
            if trained.context.mesh.world_rank == 0:
                print("\n".join([text, *lines]), flush=True)
    return 0


def filled(text: str, trained: TrainedModel) -> Iterator[str]:
    """The words for each missing span, and the text with them."""
    from megatron.core.inference.telling import likeliest_answer

    tokenizer = naming(trained)
    first, *rest = around_gaps(text, tokenizer)
    names = tokenizer.sentinels
    if len(rest) > len(names):
        raise ConfigError(
            f"--text {text[:40]!r}... has {len(rest)} {MASK}, and this model can name {len(names)} at most "
            "(--vocab-extra-ids of its training): fill some in"
        )
    tokens = joined(first, [[name] for name in names], rest)
    check_length(text, tokens, trained.config.model)
    answer = likeliest_answer(
        cast("T5Model", trained.model),
        tokens,
        begin=cast("int", tokenizer.decoder_start),
        end=cast("int", tokenizer.eos),
        most=trained.config.group(T5Config).decoder_seq_length - 1,  # the end takes a place, too
        device=trained.context.device,
    )
    spans = spans_of(answer, names)[: len(rest)]
    for number, span in enumerate(spans, start=1):
        yield f"  {number}  {tokenizer.detokenize(span) or '-'}"
    yield f"  => {tokenizer.detokenize(joined(first, spans, rest))}"


def naming(trained: TrainedModel) -> SpanTokenizer:
    """The model's tokenizer; ConfigError for one without names of spans, such as that of made-up data."""
    tokenizer = trained.tokenizer
    if not getattr(tokenizer, "sentinels", ()):
        raise ConfigError(
            f"{trained.folder.path} was trained with {tokenizer.name}, which has no tokens that name missing spans: "
            "name a checkpoint of a T5 that was trained on text"
        )
    return cast("SpanTokenizer", tokenizer)


def joined(first: Sequence[int], spans: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]) -> list[int]:
    """The parts of a text with what stands between them; ``spans`` may be more than are needed."""
    return [*first, *(token for span, part in zip(spans, rest) for token in (*span, *part))]


def spans_of(answer: Sequence[int], names: Sequence[int]) -> list[list[int]]:
    """What follows each name in the answer, up to the next; nothing for one that it leaves out."""
    spans: dict[int, list[int]] = {name: [] for name in names}
    current: list[int] = []
    for token in answer:
        if token in spans:
            current = spans[token]
        else:
            current.append(token)
    return list(spans.values())


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
