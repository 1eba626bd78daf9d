"""Show what token files hold, or what a training run reads.

    tools/inspect_dataset.py PREFIX ...

With prefixes alone: counts, lengths of documents, and on request a histogram of them, a document as text, or a check of
every token. With --sample and the flags of a training run: one sample, exactly as that run reads it (give --model-type
if it is not GPT, and set WORLD_SIZE=8 for a layout of eight ranks).
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.models.registry import family_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, DataError, run_command
from megatron.training.pretrain import parse_any_family

if TYPE_CHECKING:
    from megatron.core.datasets.samples import Sample

_IMAGES, _PLACES = "images", "image_places"  # fields of samples that have images
_TILES_IN_A_ROW = 8
PERCENTILES = (0, 10, 50, 90, 99, 100)


class InspectConfig(Settings):
    """What to look at in token files."""

    prefix: tuple[str, ...] = flag("Prefixes of PREFIX.bin and PREFIX.idx.")
    document: int | None = flag("Show this document, as text if the tokenizer is given.", default=None, at_least=0)
    histogram: str | None = flag("File for a histogram of document lengths: .png, .svg or .pdf.", default=None)
    unigrams: bool = flag(
        "Unigram entropy of the tokens: the loss of predicting each token by its frequency.", default=False
    )
    data_cache_path: str | None = flag("Folder for data fetched from a URL.", default=None)
    verify: bool = flag("Read every token, and check it against the metadata and the tokenizer.", default=False)
    write_digests: bool = flag(
        "Verify, and store the SHA-256 of both files in PREFIX.meta.json, for data without digests.",
        default=False,
    )


class SampleConfig(Settings):
    """Which sample of a run to show."""

    sample: int = flag("Number of the sample in the order of the run, from 0.", at_least=0)
    from_split: Literal["train", "valid", "test"] = flag("The split it is taken from.", default="train")
    picture: str | None = flag("File for a picture of the sample's images, tile by tile: .png.", default=None)


def with_flag(argv: Sequence[str]) -> list[str]:
    """The command line, with leading prefixes as values of --prefix."""
    first_flag = next((number for number, word in enumerate(argv) if word.startswith(("-", "@"))), len(argv))
    return [*(["--prefix"] if first_flag else []), *argv]


def main(argv: Sequence[str]) -> int:
    """Print what the flags ask for."""
    argv = with_flag(argv)
    if any(word.partition("=")[0] == "--sample" for word in argv):
        if argv[0] == "--prefix":
            raise ConfigError(
                f"{argv[1]} and --sample: --sample shows a sample of a run, whose flags name its data; leave "
                f"{argv[1]} out, or write --data-path {argv[1]}"
            )
        return show_sample(parse_any_family(argv, SampleConfig, prog="inspect_dataset.py"))
    config, tokenizer_config = parse_groups(
        argv, InspectConfig, TokenizerConfig, prog="inspect_dataset.py", about=__doc__ or ""
    )
    tokenizer = tokenizer_of(tokenizer_config)
    cache = Path(config.data_cache_path) if config.data_cache_path else None
    datasets = [IndexedDataset(prefix, cache=cache) for prefix in config.prefix]
    for dataset in datasets:
        print("\n".join([*describe(dataset), *chat_lines(dataset, tokenizer)]))
        if config.unigrams:
            print(f"unigrams     {unigram_entropy(dataset):.3f} nats a token, predicted by frequency")
        if config.verify or config.write_digests:
            print(f"verified     {verify(dataset, tokenizer)}")
        if config.write_digests:
            print(f"wrote        {write_digests(dataset)}")
        if config.document is not None:
            print("\n".join(document_lines(dataset, config.document, tokenizer)))
    if config.histogram:
        draw_histogram(datasets, Path(config.histogram))
        print(f"wrote {config.histogram}")
    return 0


def tokenizer_of(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that the flags name, GPT-2's when they name only files; None when they name nothing."""
    files = config.vocab_file or config.merge_file or config.tokenizer_model
    if config.tokenizer_type is None and files:
        config = replace(config, tokenizer_type="GPT2BPETokenizer")
    return build_tokenizer(config) if config.tokenizer_type else None


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Tokens of each document, [documents]."""
    ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])[dataset.boundaries]
    lengths: NDArray[np.int64] = np.diff(ends)
    return lengths


def describe(dataset: IndexedDataset) -> Iterator[str]:
    """Counts, a line each."""
    metadata, lengths = DatasetMetadata.read(dataset.local_prefix), document_lengths(dataset)
    yield dataset.prefix
    yield f"documents    {dataset.num_documents:,} ({int(np.count_nonzero(lengths == 0)):,} empty)"
    yield f"sequences    {len(dataset):,}"
    yield f"tokens       {dataset.num_tokens:,} of type {dataset.dtype}"
    if len(lengths):
        shares = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
        written = ", ".join(f"{share}% {int(length):,}" for share, length in zip(PERCENTILES, shares))
        yield f"per document {written}; mean {lengths.mean():,.1f}"
    stamp = metadata.tokenizer if metadata else None
    yield f"tokenizer    {stamp or 'not known: there is no .meta.json, or it names none'}"


def chat_lines(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[str]:
    """How conversations for fine-tuning are written, and what ends their answers."""
    metadata = DatasetMetadata.read(dataset.local_prefix)
    if metadata is None or metadata.chat is None:
        return
    texts = {token: f" {tokenizer.detokenize([token])}" if tokenizer else "" for token in metadata.chat.end_tokens}
    ends = [f"{token}{text}" for token, text in texts.items()]
    yield f"end tokens   {', '.join([*ends, 'and the end of a document' if ends else 'the end of a document'])}"
    if metadata.chat.template is not None:
        yield "chat         turns are written by this template"
        yield from (f"    {line}" for line in metadata.chat.template.splitlines())


def verify(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> str:
    """Read all tokens, and list what was checked; raises DataError for metadata, ids or a tokenizer that don't fit."""
    metadata, checked = DatasetMetadata.read(dataset.local_prefix), ["index", "sizes"]
    stamp = metadata.tokenizer if metadata else None
    vocab_size = tokenizer.vocab_size if tokenizer else stamp.vocab_size if stamp else None
    if metadata and tokenizer:
        metadata.check_tokenizer(dataset.prefix, TokenizerStamp.of(tokenizer))
        checked.append("tokenizer")
    largest, start = None, 0
    for block in dataset.blocks():
        low, high = int(block.min()), int(block.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            at = start + int(np.argmax((block < 0) | (block >= (vocab_size or np.inf))))
            raise DataError(f"{dataset.prefix} holds {_place(dataset, at)}, outside a vocabulary of {vocab_size} ids")
        largest, start = max(high, largest or 0), start + len(block)
    if vocab_size is not None:
        checked.append(f"all ids below {vocab_size:,}")
    if metadata:
        metadata.check_counts(dataset.prefix, num_tokens=dataset.num_tokens, num_sequences=len(dataset))
        if (metadata.num_documents, metadata.max_token_id) != (dataset.num_documents, largest):
            raise DataError(
                f"{DatasetMetadata.path(dataset.prefix)} describes {metadata.num_documents} documents and ids up to "
                f"{metadata.max_token_id}, the data hold {dataset.num_documents} and {largest}: it belongs to other "
                "files"
            )
        checked.append("metadata")
        if metadata.sha256:
            metadata.check_content(dataset.prefix, dataset.digests())
            checked.append("all bytes as written")
    return ", ".join(checked)


def write_digests(dataset: IndexedDataset) -> Path:
    """Store the digests of the data in the metadata beside them; returns its path."""
    path, known = DatasetMetadata.path(dataset.local_prefix), DatasetMetadata.read(dataset.local_prefix)
    metadata = known or DatasetMetadata(
        tokenizer=None,
        num_tokens=dataset.num_tokens,
        num_sequences=len(dataset),
        num_documents=dataset.num_documents,
        max_token_id=max((int(block.max()) for block in dataset.blocks()), default=None),
    )
    with write_errors(path, remedy="choose data in a folder that can be written to"), replaced_file(path) as aside:
        aside.write_text(replace(metadata, sha256=dataset.digests()).to_json(), encoding="utf-8")
    return path


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Entropy of the tokens' frequencies in nats; a model that uses context has a lower loss."""
    counts = np.zeros(0, np.int64)
    for block in dataset.blocks():
        found = np.bincount(block)
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def _place(dataset: IndexedDataset, at: int) -> str:
    """A token's id, with its document, sequence and place there."""
    ends = np.cumsum(document_lengths(dataset))
    document = int(np.searchsorted(ends, at, side="right"))
    sequence = int(np.searchsorted(np.cumsum(dataset.lengths, dtype=np.int64), at, side="right"))
    within = at - int(dataset.offsets[sequence]) // dataset.dtype.itemsize
    return f"token id {dataset.get(sequence, within, 1)[0]} (document {document}, sequence {sequence}, token {within})"


def document_lines(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A document, sequence by sequence."""
    if number >= dataset.num_documents:
        raise ConfigError(f"--document {number} is beyond the {dataset.num_documents} documents of {dataset.prefix}")
    first, last = dataset.boundaries[number : number + 2].tolist()
    yield f"document {number}: {last - first} sequence{'s' * (last - first != 1)}"
    for sequence in range(first, last):
        yield _shown(dataset.get(sequence), tokenizer)


def _shown(ids: NDArray[Any], tokenizer: Tokenizer | None) -> str:
    return tokenizer.detokenize(ids.tolist()) if tokenizer else " ".join(map(str, ids.tolist()))


def draw_histogram(datasets: Sequence[IndexedDataset], output: Path) -> None:
    """Write a histogram of document lengths; raises ConfigError when it can't be drawn."""
    from megatron.training.reporting.picture import COLORS, legend, new_axes, save, style

    axes = new_axes()
    lengths = [np.maximum(document_lengths(dataset), 1) for dataset in datasets]
    every = np.concatenate(lengths)
    shortest, longest = (every.min(), every.max()) if len(every) else (1, 1)
    bins = np.geomspace(shortest, longest + 1, 60).tolist()
    for number, (dataset, each) in enumerate(zip(datasets, lengths)):
        median = int(np.percentile(each, 50, method="inverted_cdf")) if len(each) else 0
        label = f"{Path(dataset.prefix).name}: {len(each):,} documents, median {median:,}"
        color = COLORS[number % len(COLORS)]
        axes.hist(each, bins=bins, color=color, alpha=0.15)
        axes.hist(each, bins=bins, color=color, histtype="step", linewidth=1.6, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="y", integer=True)
    axes.tick_params(which="minor", length=0)
    style(axes, x="tokens of a document", y="documents")
    legend(axes)
    save(axes, output, flag="--histogram")


def show_sample(config: RunConfig) -> int:
    """Print a sample as the run reads it."""
    from megatron.core.datasets.sampler import MicrobatchSampler
    from megatron.training.run.data import offline_splits

    wanted = config.group(SampleConfig)
    splits, tokenizer = offline_splits(config, family_of(config.extra).train_spec)
    datasets = list(splits.named(wanted.from_split).values())
    if len(datasets) != 1:
        raise ConfigError(f"--from-split {wanted.from_split}: the run reads {len(datasets)} data sets of that split")
    (dataset,) = datasets
    cyclic = wanted.from_split == "train" and config.data.dataloader_type == "cyclic"
    sampler = MicrobatchSampler(
        num_samples=len(dataset),
        consumed=wanted.sample,
        micro_batch_size=1,
        shuffle_seed=config.training.seed if cyclic else None,
    )
    (index,) = next(iter(sampler), [None])
    if index is None:
        raise ConfigError(
            f"--sample {wanted.sample} is beyond the {len(dataset)} {wanted.from_split} samples of the run"
        )
    print(f"sample {wanted.sample} of {wanted.from_split}: {dataset.origin(index)}")
    sample = dataset[index]
    print("\n".join(sample_lines(sample, tokenizer, apart=config.data.packing != "stream")))
    if wanted.picture is not None:
        draw_tiles(sample, Path(wanted.picture))
        print(f"wrote {wanted.picture}")
    return 0


def draw_tiles(sample: Sample, output: Path) -> None:
    """Write the tiles of a sample as one picture, in rows of up to eight, each with its number above it.

    Raises ConfigError for a sample without images, and for a name that doesn't end with .png.
    """
    from megatron.core.images.decoding import pillow

    tiles = sample.get(_IMAGES)
    if tiles is None or not len(tiles):
        raise ConfigError(f"--picture {output}: the sample has no images; choose another --sample, or leave it out")
    if output.suffix != ".png":
        raise ConfigError(f"--picture {output} must end with .png")
    image_module = pillow()
    from PIL import ImageDraw

    height, width = tiles.shape[2:]
    scale = max(1, 96 // max(height, width))  # small tiles are drawn larger
    cell, gap, line = (width * scale, height * scale), 6, 14
    columns = min(len(tiles), _TILES_IN_A_ROW)
    rows = -(-len(tiles) // columns)
    sheet = image_module.new("RGB", (columns * (cell[0] + gap) + gap, rows * (cell[1] + gap + line) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for number, tile in enumerate(tiles):
        left = gap + number % columns * (cell[0] + gap)
        top = gap + number // columns * (cell[1] + gap + line)
        draw.text((left, top), f"tile {number}", fill="black")
        picture = image_module.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
        sheet.paste(picture.resize(cell, image_module.Resampling.NEAREST), (left, top + line))
    with write_errors(output), replaced_file(output) as aside:
        sheet.save(aside, "PNG")


def sample_lines(sample: Sample, tokenizer: Tokenizer, *, apart: bool = False) -> Iterator[str]:
    """The text of a sample, and a line on each of its arrays; text without loss is in ⟦brackets⟧.

    ``apart``: documents don't predict each other, so each has a first token that isn't a label, and its own line.
    """
    if "tokens" not in sample:
        yield from masked_sample_lines(sample, tokenizer)
        return
    tokens, labels, mask, positions = (sample[name] for name in ("tokens", "labels", "loss_mask", "position_ids"))
    document_ids = sample.get("document_ids", np.zeros_like(tokens))
    tiles, padding = _tiles_at(sample), 0
    for start, stop in _runs(document_ids if apart else np.zeros_like(tokens)):
        if apart and not (labels[start:stop].any() or positions[start:stop].any() or mask[start:stop].any()):
            padding = stop - start
        else:
            ids = np.append(tokens[start], labels[start:stop])
            yield _bracketed(ids, np.append(0, mask[start:stop]), tokenizer, np.append(tiles[start:stop], -1))
    yield f"loss on      {int(mask.sum()):,} of {len(mask):,} labels"
    yield f"positions    0 to {int(positions.max())}"
    if _IMAGES in sample:
        yield f"tiles        {len(sample[_IMAGES])}, at {int((tiles >= 0).sum())} places"
    if "document_ids" in sample:
        sizes = [stop - start for start, stop in _runs(document_ids[: len(document_ids) - padding])]
        yield f"documents    {' '.join(map(str, sizes))} tokens, each attended to by itself"
    if padding:
        yield f"padding      {padding} tokens"


def _tiles_at(sample: Sample) -> NDArray[np.int64]:
    """The tile whose feature stands at each place, or -1, [S]."""
    places = sample.get(_PLACES, np.full(len(sample["tokens"]), -1, np.int64))
    features = np.count_nonzero(places >= 0) // max(len(sample.get(_IMAGES, ())), 1)
    found: NDArray[np.int64] = np.where(places >= 0, places // max(features, 1), -1)
    return found


def _runs(values: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Start and end of every stretch of equal values."""
    return pairwise([0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)])


def _bracketed(ids: NDArray[Any], learned: NDArray[Any], tokenizer: Tokenizer, tiles: NDArray[np.int64]) -> str:
    """Text of the ids; decoded from the start each time, since spaces depend on the token before. ``tiles``: those that
    stand in place of words.
    """
    shown, before, words = "", "", list[int]()
    for start, stop in _runs(2 * tiles + (learned > 0)):
        if tiles[start] >= 0:
            shown += f"⟨tile {tiles[start]}⟩" if start == 0 or tiles[start] != tiles[start - 1] else ""
            continue
        words += ids[start:stop].tolist()
        text = tokenizer.detokenize(words)
        shown += text[len(before) :] if learned[start] else f"⟦{text[len(before) :]}⟧"
        before = text
    return shown


def masked_sample_lines(sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    """Input and labels of a BERT or T5 sample."""
    for name, is_real in (("text", "attention_mask"), ("text_enc", "enc_mask"), ("text_dec", "dec_mask")):
        if name in sample:
            yield f"{name:<13}{tokenizer.detokenize(sample[name][sample[is_real] == 1].tolist())}"
    yield f"{'answers':<13}{tokenizer.detokenize(sample['labels'][sample['loss_mask'] == 1].tolist())}"
    for name in ("is_random", "truncated"):
        if name in sample:
            yield f"{name:<13}{int(sample[name])}"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
