"""Fill in [MASK] spans in texts with a trained T5.

With --samples, predict the masked spans of its run's validation data, and print how often the predictions are right.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from megatron.config.flags import Settings, flag
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.inference.fill_mask import MASK, around_masks, check_length, check_masks
from megatron.core.models.t5.config import T5Config
from megatron.core.models.trained_model_flags import parse_with_trained_model
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import ConfigError, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.datasets.samples import Sample
    from megatron.core.models.t5.generation import Beginnings
    from megatron.core.models.t5.model import T5Model
    from megatron.core.tokenizers.base import SpanTokenizer
    from megatron.training.checkpoints.trained_model import TrainedModel

BATCH, CANDIDATES = 32, 5


class SpanConfig(Settings):
    """Texts or samples to fill in."""

    text: tuple[str, ...] = flag(f"Texts with {MASK} where words are missing.", default=())
    samples: int = flag("Samples of the run's validation data whose spans are predicted.", default=0, at_least=0)
    examples: int = flag("Number of these samples to show.", default=3, at_least=0)


def main(argv: Sequence[str]) -> int:
    """Load the model, fill in every text, and predict the spans of every sample."""
    with errors_once_per_node():
        config, choice = parse_with_trained_model(
            argv, SpanConfig, TrainedModelConfig, prog="fill_spans.py", about=__doc__ or ""
        )
        check_masks(config.text)
        if not config.text and not config.samples:
            raise ConfigError("nothing to fill in: give --text, or --samples of the run's validation data")
    from megatron.core.models.t5.train_spec import TRAIN_SPEC
    from megatron.training.checkpoints.trained_model import trained_model

    with trained_model(choice, {TRAIN_SPEC.name: TRAIN_SPEC}, launch_environment()) as trained:
        speaks = trained.context.mesh.world_rank == 0
        for text in config.text:
            lines = list(filled(text, trained))
            if speaks:
                print("\n".join([text, *lines]), flush=True)
        for line in guessed(config.samples, trained, examples=config.examples) if config.samples else ():
            if speaks:
                print(line, flush=True)
    return 0


def filled(text: str, trained: TrainedModel) -> Iterator[str]:
    """The words for each missing span, and the text with them."""
    tokenizer = naming(trained)
    first, *rest = around_masks(text, tokenizer)
    names = tokenizer.sentinels
    if len(rest) > len(names):
        raise ConfigError(
            f"--text {text[:40]!r}... has {len(rest)} {MASK}, but this model has {len(names)} sentinel tokens "
            "(--vocab-extra-ids of its training): fill some in"
        )
    tokens = joined(first, [[name] for name in names], rest)
    check_length(text, tokens, trained.config.model)
    spans = answer_to(tokens, trained)[: len(rest)]
    for number, span in enumerate(spans, start=1):
        yield f"  {number}  {tokenizer.detokenize(span) or '-'}"
    yield f"  => {tokenizer.detokenize(joined(first, spans, rest))}"


def guessed(count: int, trained: TrainedModel, *, examples: int) -> Iterator[str]:
    """Examples of the run's validation data, and how often the first tokens of all their spans are right."""
    from megatron.core.datasets.splits import SplitSizes
    from megatron.core.models.t5.train_spec import TRAIN_SPEC

    tokenizer = naming(trained)
    data = TRAIN_SPEC.build_datasets(trained.config, tokenizer, SplitSizes(train=0, valid=count, test=0)).valid
    if data is None:
        raise ConfigError(f"{trained.folder.path} is of a run without one set of validation data: leave --samples out")
    samples = [data[number] for number in range(count)]
    asking = [sample for sample in samples if np.isin(sample["text_dec"], tokenizer.sentinels).any()]
    if not asking:
        raise ConfigError(
            f"--samples {count}: none of them has masked words, for lack of sentinel tokens or of room in the "
            "decoder; give more"
        )
    for sample in asking[:examples]:
        yield from beside_truth(sample, trained)
    found = [beginnings_in(samples[start : start + BATCH], trained) for start in range(0, count, BATCH)]
    true = [token for each in found for token in each.true.tolist()]
    guesses = [guess for each in found for guess in each.likeliest.tolist()]
    commonest = [token for token, _ in Counter(true).most_common(CANDIDATES)]
    yield f"{len(true):,} hidden spans of {count:,} samples: first token right, and among {CANDIDATES} guesses"
    yield f"  the model                  {shares(true, guesses)}"
    yield f"  the commonest, every time  {shares(true, [commonest] * len(true))}  ({tokenizer.detokenize(commonest)})"
    entropy = entropy_of(label for sample in samples for label in sample["labels"].tolist() if label >= 0)
    yield f"Predicting its tokens by their frequency costs {entropy:.2f} nats a token."


def beside_truth(sample: Sample, trained: TrainedModel) -> Iterator[str]:
    """A sample's text, and for each of its spans the prediction beside the masked text."""
    tokenizer = naming(trained)
    names, marks = tokenizer.sentinels, {tokenizer.pad, tokenizer.decoder_start, tokenizer.eos}
    tokens, decoder_tokens = (
        [token for token in sample[name].tolist() if token not in marks] for name in ("text_enc", "text_dec")
    )
    hidden = spans_of(decoder_tokens, names)[: sum(token in names for token in decoder_tokens)]
    ends = [place for place, token in enumerate(tokens) if token in names]
    pieces = [tokens[start:end] for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(tokens)])]
    yield f" {MASK} ".join(map(tokenizer.detokenize, pieces)).strip()
    for number, (said, true) in enumerate(zip(answer_to(tokens, trained), hidden), start=1):
        yield f"  {number}  {tokenizer.detokenize(said) or '-'}  (hidden: {tokenizer.detokenize(true)})"


def beginnings_in(samples: Sequence[Sample], trained: TrainedModel) -> Beginnings:
    """The model's predictions for the first tokens of the samples' spans."""
    import torch

    from megatron.core.models.t5.generation import beginnings

    tokens, decoder_tokens, real = (
        torch.stack([torch.from_numpy(sample[name]) for sample in samples]).to(trained.context.device)
        for name in ("text_enc", "text_dec", "enc_mask")
    )
    model, names = cast("T5Model", trained.model), naming(trained).sentinels
    return beginnings(model, tokens, decoder_tokens, attention_mask=real.bool(), names=names, count=CANDIDATES)


def shares(true: Sequence[int], guesses: Sequence[Sequence[int]]) -> str:
    """How often the first guess is right, and how often any of them."""
    first = sum(guess[0] == token for token, guess in zip(true, guesses))
    among = sum(token in guess for token, guess in zip(true, guesses))
    return f"{first / len(true):6.1%} {among / len(true):6.1%}"


def entropy_of(tokens: Iterable[int]) -> float:
    """Entropy of the tokens' frequencies in nats: the least loss of a prediction without context."""
    counts = Counter(tokens)
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def answer_to(tokens: Sequence[int], trained: TrainedModel) -> list[list[int]]:
    """The predicted span for each sentinel, also for those that ``tokens`` lack."""
    from megatron.core.models.t5.generation import likeliest_answer

    tokenizer = naming(trained)
    answer = likeliest_answer(
        cast("T5Model", trained.model),
        tokens,
        begin=cast("int", tokenizer.decoder_start),
        end=cast("int", tokenizer.eos),
        most=trained.config.group(T5Config).decoder_seq_length - 1,  # one place is for the end
        device=trained.context.device,
    )
    return spans_of(answer, tokenizer.sentinels)


def naming(trained: TrainedModel) -> SpanTokenizer:
    """The model's tokenizer; ConfigError for one without sentinels, such as that of mock data."""
    tokenizer = trained.tokenizer
    if not getattr(tokenizer, "sentinels", ()):
        raise ConfigError(
            f"{trained.folder.path} is used with {tokenizer.name}, which has no tokens that name missing spans: name a "
            "checkpoint of a T5 that was trained on text, or its --tokenizer-type, files and --vocab-extra-ids"
        )
    return cast("SpanTokenizer", tokenizer)


def joined(first: Sequence[int], spans: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]) -> list[int]:
    """The parts of a text with the spans between them; ``spans`` may be more than are needed."""
    return [*first, *(token for span, part in zip(spans, rest) for token in (*span, *part))]


def spans_of(answer: Sequence[int], names: Sequence[int]) -> list[list[int]]:
    """The tokens after each sentinel in the answer, up to the next; none for a sentinel that it lacks."""
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
