"""Fill in [MASK] in texts with a trained BERT, and show its most probable words."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megatron.config.flags import Settings, flag
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.inference.fill_mask import MASK, around_masks, check_length, check_masks
from megatron.core.models.trained_model_flags import parse_with_trained_model
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import ConfigError, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.models.bert.filling import Candidate
    from megatron.core.models.bert.model import BertModel
    from megatron.core.tokenizers.base import MaskingTokenizer
    from megatron.training.checkpoints.trained_model import TrainedModel


class FillConfig(Settings):
    """Texts, and the number of candidates to show."""

    text: tuple[str, ...] = flag(f"Texts with {MASK} where a word is missing.")
    top_k: int = flag("Candidates shown for each missing word.", default=5, at_least=1)


@dataclass(frozen=True)
class MaskedText:
    """A text as the model reads it, and the places of its missing words."""

    tokens: list[int]
    places: list[int]


def main(argv: Sequence[str]) -> int:
    """Load the model and fill in every text."""
    with errors_once_per_node():
        config, choice = parse_with_trained_model(
            argv, FillConfig, TrainedModelConfig, prog="fill_mask.py", about=__doc__ or ""
        )
        check_masks(config.text)
    from megatron.core.models.bert.train_spec import TRAIN_SPEC
    from megatron.training.checkpoints.trained_model import trained_model

    with trained_model(choice, {TRAIN_SPEC.name: TRAIN_SPEC}, launch_environment()) as trained:
        for text in config.text:
            lines = list(filled(text, trained, count=config.top_k))
            if trained.context.mesh.world_rank == 0:
                print("\n".join([text, *lines]), flush=True)
    return 0


def filled(text: str, trained: TrainedModel, *, count: int) -> Iterator[str]:
    """The candidates of each missing word, and the text with the best of them."""
    from megatron.core.models.bert.filling import likeliest

    tokenizer = masking(trained)
    masked = with_masks(text, tokenizer)
    check_length(text, masked.tokens, trained.config.model)
    model, device = cast("BertModel", trained.model), trained.context.device
    found = likeliest(model, masked.tokens, masked.places, count=count, device=device)
    for number, candidates in enumerate(found, start=1):
        yield f"  {number}  {', '.join(shown(candidate, tokenizer) for candidate in candidates)}"
    tokens = list(masked.tokens)
    for place, candidates in zip(masked.places, found):
        tokens[place] = candidates[0].token
    yield f"  => {tokenizer.detokenize(tokens[1:-1])}"


def masking(trained: TrainedModel) -> MaskingTokenizer:
    """The model's tokenizer; ConfigError for one without a mask token, such as that of mock data."""
    if not hasattr(trained.tokenizer, "mask"):
        raise ConfigError(
            f"{trained.folder.path} was trained with {trained.tokenizer.name}, which has no {MASK}: name a checkpoint "
            "of a BERT that was trained on text"
        )
    return cast("MaskingTokenizer", trained.tokenizer)


def with_masks(text: str, tokenizer: MaskingTokenizer) -> MaskedText:
    """``[CLS]``, the text's tokens with a mask for each missing word, ``[SEP]``."""
    first, *rest = around_masks(text, tokenizer)
    tokens, places = [tokenizer.cls, *first], []
    for part in rest:
        places.append(len(tokens))
        tokens += [tokenizer.mask, *part]
    return MaskedText([*tokens, tokenizer.sep], places)


def shown(candidate: Candidate, tokenizer: MaskingTokenizer) -> str:
    """A token and its probability."""
    return f"{tokenizer.detokenize([candidate.token])} {candidate.probability:.1%}"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
