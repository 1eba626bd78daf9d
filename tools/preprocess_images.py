"""Turn texts with images into token files for pretrain_vlm.py, and check every image once.

Reads JSON lines, JSON lists or Parquet beside a folder of images (--image-folder): LLaVA's {"image": "a/b.jpg",
"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": ...}]}, the other forms
of tools/preprocess_sft.py with <image> in their texts, and captions {"image": ..., "caption": ...}; and .tar files in
webdataset's layout. Texts without images may be among them. Turns are written as --turn-start and --turn-end say, or by
a Jinja template. Writes PREFIX.bin, .idx and .meta.json with a place for each feature of each image, PREFIX_targets.bin
and .idx, and PREFIX_images.json and .table, which say where the images are: they stay where they are. Give the same
--img-h, --img-w, --patch-dim, --use-tiling and so on to training, with --data-path PREFIX --packing best-fit, and --sft
for a loss on answers alone.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from megatron.config.flags import derive, flag, flags_of, plural_s
from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.vision import (
    TILE_FIELDS,
    VisionConfig,
    patches_fill_the_image,
    squares_fill_the_grid,
    tiles_are_cut,
)
from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.image_records import FIELDS, ImageRecord, read_image_record, read_tar_records
from megatron.core.datasets.image_table import ImageTableWriter, StoredImage
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.images.decoding import decoded, pillow
from megatron.core.images.expansion import MARKER, expansion, with_words
from megatron.core.images.files import ImageFiles, ImageFolder, TarImages
from megatron.core.images.tiles import grid_of
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.models.vlm.image_text import runs_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.input_files import JSON_ENDINGS, PARQUET_ENDING, find_inputs
from megatron.core.tokenizers.json_records import read_records
from megatron.core.tokenizers.records import Conversation, Pair
from megatron.core.tokenizers.targets import SampleEncoder, leading_ids
from megatron.core.tokenizers.text_files import BadLine
from megatron.errors import ConfigError, DataError, run_command
from megatron.small_files import shown
from tools.preprocess_sft import Counts, SftConfig, encoder_of, remark_on_template, remarks_on_format

TAR_ENDING = ".tar"
_LONG_NAME = 300  # characters
_AHEAD = 4  # records whose images are checked before they are written, for each worker


class ImagesConfig(SftConfig):
    """Texts and images in, tokens, targets and places of images out."""

    image_folder: str | None = flag(
        "Folder that names of images are relative to, and don't leave; unless given, that of each file of texts.",
        default=None,
    )
    workers: int = flag("Images that are checked at once.", default=None, derived="one for each core", at_least=1)

    @override
    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        derive(self, "workers", cores or 1)


@dataclass
class ImageCounts(Counts):
    """What was read and written. ``texts``: documents without images. ``uses``: images in documents, ``tiles`` of
    them. ``unread``: lines left out for an image. ``longest``: tokens of the longest document, and ``furthest``: places
    up to the end of the last image of any.
    """

    texts: int = 0
    uses: int = 0
    tiles: int = 0
    unread: int = 0
    longest: int = 0
    furthest: int = 0


class Waiting(NamedTuple):
    """A record whose images are being checked, and where it is."""

    path: str
    line: int
    record: ImageRecord | DataError
    images: list[Future[StoredImage]]


class UnreadError(DataError):
    """An image can't be read."""


class ImageChecker:
    """Reads and decodes each image once, several at a time. ``files``: the folders and tar files so far."""

    def __init__(self, workers: int) -> None:
        self.files: list[ImageFiles] = []
        self._pool = ThreadPoolExecutor(workers)  # decoders release Python's lock
        self._checked = dict[tuple[int, str, int], Future[StoredImage]]()

    def source(self, files: ImageFiles) -> int:
        """Add a folder or tar file unless it is there, and return its number."""
        paths = [each.path for each in self.files]
        if files.path not in paths:
            self.files.append(files)
            return len(paths)
        return paths.index(files.path)

    def check(self, source: int, name: str, offset: int = 0, size: int = -1) -> Future[StoredImage]:
        """The image's facts, as soon as it is decoded."""
        key = (source, name, offset)
        if key not in self._checked:
            self._checked[key] = self._pool.submit(self._facts, source, name, offset, size)
        return self._checked[key]

    def _facts(self, source: int, name: str, offset: int, size: int) -> StoredImage:
        try:
            content = self.files[source].read(name, offset, size)
            width, height = decoded(content).size
        except DataError as error:
            named = name if len(name) < _LONG_NAME and name.isprintable() else shown(name)
            raise UnreadError(f"image {named} {error}") from None
        return StoredImage(source, name, offset, len(content), zlib.crc32(content), width, height)

    @property
    def num_images(self) -> int:
        """Number of different images."""
        return len(self._checked)

    def close(self) -> None:
        """End the workers, and leave what they have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def main(argv: Sequence[str]) -> int:
    """Convert, and print counts."""
    config, vision, family, tokenizer_config = parse_groups(
        argv, ImagesConfig, VisionConfig, VLMConfig, TokenizerConfig, prog="preprocess_images.py", about=__doc__ or ""
    )
    vision = checked_vision(vision)
    pillow()
    tokenizer, encoder = encoder_of(config, tokenizer_config, marker=MARKER, image=with_words(MARKER, vision))
    places = Places(vision, tokenizer, image_token_id=family.image_token_id)
    counts, images = convert(config, tokenizer, encoder, places)
    lines = report(config, counts, encoder, tokenizer, images)
    print("\n".join([*lines, *remark_on_template(config, tokenizer_config, counts)]))
    return 0


def checked_vision(vision: VisionConfig) -> VisionConfig:
    """The settings of images with their usual sizes; raises ConfigError for those that don't fit."""
    if not vision.has_vision:
        raise ConfigError(
            "how many places an image takes depends on its encoder: give --vision-model-type, such as clip"
        )
    vision = vision.with_usual_sizes()
    if problem := patches_fill_the_image(vision) or squares_fill_the_grid(vision) or tiles_are_cut(vision):
        raise ConfigError(problem)
    used = {
        *TILE_FIELDS,
        "vision_model_type",
        "patch_dim",
        "vision_class_token",
        "pixel_shuffle",
        "vision_pool_size",
        "image_attention",
    }
    usual = vision.kind.usual
    for spec in flags_of(VisionConfig):
        value = getattr(vision, spec.field)
        if spec.field not in used | {"vision_position_size"} and value != usual.get(spec.field, spec.default):
            print(f"note: {spec.spelling} has no effect here, but in training", file=sys.stderr)
    return vision


class Places:
    """What stands in a document for an image: ids of words around it, and -1 for each feature."""

    def __init__(self, vision: VisionConfig, tokenizer: Tokenizer, *, image_token_id: int | None) -> None:
        self.vision, self._tokenizer = vision, tokenizer
        self.id = self._usual_id() if image_token_id is None else image_token_id
        self._words = dict[str, list[int]]()

    def _usual_id(self) -> int:
        """The tokenizer's own token for images, else its padding."""
        try:
            [ids] = self._tokenizer.tokenize_parts([MARKER])
        except DataError:  # a tokenizer that can't express every text
            ids = []
        pad = self._tokenizer.pad
        return ids[0] if len(ids) == 1 else 0 if pad is None or pad == self._tokenizer.eod else pad

    def of(self, image: StoredImage) -> list[int]:
        """The ids for an image."""
        found = list[int]()
        for each in expansion(grid_of(image.width, image.height, self.vision), self.vision):
            found += self._ids(each) if isinstance(each, str) else [-1] * len(each)
        return found

    def _ids(self, word: str) -> list[int]:
        if word not in self._words:
            [self._words[word]] = self._tokenizer.tokenize_parts([word])
        return self._words[word]


def with_words_in(sample: Conversation | Pair, vision: VisionConfig, *, by_template: bool) -> Conversation | Pair:
    """The sample with words around images that are tokenized with its texts; ``by_template``: turns get them when a
    template writes them.
    """
    if isinstance(sample, Pair):
        prompt, completion = (with_words(text, vision) for text in (sample.prompt, sample.completion))
        return dataclasses.replace(sample, prompt=prompt, completion=completion)
    if by_template:
        return sample
    messages = [
        {**each, "content": with_words(each["content"], vision)} if isinstance(each.get("content"), str) else each
        for each in sample.messages
    ]
    return dataclasses.replace(sample, messages=messages)


def images_first(ids: np.ndarray, leading: Sequence[int]) -> np.ndarray:
    """Ids with the images of a text's beginning before ids that the tokenizer puts there, as PaliGemma has them."""
    begin = len(leading)
    if not begin or len(ids) <= begin or ids[:begin].tolist() != [*leading] or ids[begin] >= 0:
        return ids
    words = np.flatnonzero(ids[begin:] >= 0)
    end = begin + int(words[0]) if len(words) else len(ids)
    return np.concatenate([ids[begin:end], ids[:begin], ids[end:]])


def convert(
    config: ImagesConfig, tokenizer: Tokenizer, encoder: SampleEncoder, places: Places
) -> tuple[ImageCounts, int]:
    """Write the files; returns counts, and how many different images there are.

    Raises DataError for bad lines and images that can't be read, unless these are skipped, and without any record.
    """
    counts = ImageCounts()
    stamp = TokenizerStamp.of(tokenizer)
    table = ImageTableWriter(config.output_prefix, places.vision.tile_settings)
    with ExitStack() as stack:
        dtype = token_dtype(max(tokenizer.vocab_size, places.id + 1))
        documents = stack.enter_context(IndexedDatasetWriter(config.output_prefix, dtype, tokenizer=stamp))
        targets = stack.enter_context(IndexedDatasetWriter(targets_prefix(config.output_prefix), np.uint8))
        checker = ImageChecker(config.workers)
        stack.callback(checker.close)
        for waiting in _ahead(read(config, checker), _AHEAD * config.workers):
            try:
                if isinstance(waiting.record, DataError):
                    raise waiting.record
                images = [image.result() for image in waiting.images]
                sample = encoder.encode(
                    with_words_in(waiting.record.sample, places.vision, by_template=config.chat_template is not None),
                    [places.of(image) for image in images],
                )
            except DataError as error:
                _refuse(BadLine(waiting.path, waiting.line, str(error)), config, counts, error)
                continue
            ids, learned = np.array(sample.ids), np.array(sample.learned, np.uint8)
            if places.vision.images_first:
                ids = images_first(ids, leading_ids(tokenizer))
            if ids[-1] < 0:  # a feature has a label behind it
                ids, learned = np.append(ids, tokenizer.eod), np.append(learned, np.uint8(0))
            runs = [[len(run) for run in runs_of(image, places.vision)] for image in images]
            of_run = np.cumsum([0, *(length for each in runs for length in each)])
            starts = np.flatnonzero(ids < 0)[of_run[:-1]].tolist()
            ends = np.cumsum([len(each) for each in runs], dtype=int).tolist()
            table.add_document(
                [(image, starts[end - len(each) : end]) for image, each, end in zip(images, runs, ends, strict=True)]
            )
            documents.add_document(np.where(ids < 0, places.id, ids))
            targets.add_document(learned)
            tiles = sum(grid_of(image.width, image.height, places.vision).tiles for image in images)
            _count(counts, waiting.record, ids=ids, learned=learned, tiles=tiles)
            counts.furthest = max([counts.furthest, *(starts[-1:] and [starts[-1] + runs[-1][-1]])])
        if not counts.samples:
            raise DataError(f"--input {' '.join(config.input)} holds no text with an image; nothing is written.")
        table.sources = [_source(files, Path(config.output_prefix).parent) for files in checker.files]
        documents.chat = ChatSettings(
            template=encoder.source if counts.conversations else None,
            end_tokens=tuple(each for each in encoder.end_tokens if each != tokenizer.eod),
        )
        documents.num_images = table.num_images
        table.write(num_tokens=documents.num_tokens, tokens_sha256=documents.tokens_sha256)
        return counts, checker.num_images


def _refuse(bad: BadLine, config: ImagesConfig, counts: ImageCounts, error: DataError) -> None:
    if config.on_bad_line == "error":
        raise DataError(f"{bad}; fix the line, or skip such lines with --on-bad-line skip.") from None
    print(f"skipped {bad}", file=sys.stderr)
    counts.bad += 1
    counts.unread += isinstance(error, UnreadError)


def _count(counts: ImageCounts, record: ImageRecord, *, ids: np.ndarray, learned: np.ndarray, tiles: int) -> None:
    counts.samples += 1
    counts.forms[record.sample.form] += 1
    counts.conversations += isinstance(record.sample, Conversation)
    counts.tokens += len(ids)
    counts.targets += int(learned.sum())
    counts.texts += not record.images
    counts.uses += len(record.images)
    counts.tiles += tiles
    counts.longest = max(counts.longest, len(ids))


def _source(files: ImageFiles, beside: Path) -> dict[str, str]:
    """A folder or tar file as the header names it: relative to the token files, unless it was given from the root."""
    kind = "tar" if isinstance(files, TarImages) else "folder"
    path = files.path if os.path.isabs(files.path) else os.path.relpath(files.path, beside)
    return {"kind": kind, "path": path}


def read(config: ImagesConfig, checker: ImageChecker) -> Iterator[Waiting]:
    """All records in order; their images begin to be checked as they are read."""
    for path in find_inputs(config.input, endings=(*JSON_ENDINGS, PARQUET_ENDING, TAR_ENDING)):
        if path.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
            raise DataError(f"--input {path} is compressed, and images in it can't be read by their offsets: unpack it")
        if path.endswith(TAR_ENDING):
            tar = TarImages(path)
            source = checker.source(tar)
            for number, (key, record, members) in enumerate(read_tar_records(path, tar), 1):
                if isinstance(record, DataError):
                    record = DataError(f"sample {key} {record}")
                images = [checker.check(source, each.name, each.offset, each.size) for each in members]
                yield Waiting(path, number, record, images)
            continue
        source = -1
        for _, line, value in read_records([path], columns=FIELDS):
            record, names = _record(value)
            if names and source < 0:
                folder = config.image_folder or ("." if path == "-" else str(Path(path).parent))
                source = checker.source(ImageFolder(folder))
            yield Waiting(path, line, record, [checker.check(source, name) for name in names])


def _record(value: object) -> tuple[ImageRecord | DataError, tuple[str, ...]]:
    if isinstance(value, DataError):
        return value, ()
    assert isinstance(value, dict), "records are objects"
    try:
        record = read_image_record(value)
    except DataError as error:
        return error, ()
    return record, record.images


def _ahead(records: Iterator[Waiting], count: int) -> Iterator[Waiting]:
    """The records, each given out when ``count`` more have been read."""
    held = deque[Waiting]()
    for record in records:
        held.append(record)
        if len(held) > count:
            yield held.popleft()
    yield from held


def report(
    config: ImagesConfig, counts: ImageCounts, encoder: SampleEncoder, tokenizer: Tokenizer, images: int
) -> Iterator[str]:
    """What was written, and what may surprise the user of it, in lines."""
    bad = f" ({counts.bad:,} bad line{plural_s(counts.bad)} left out" if counts.bad else ""
    bad += f", {counts.unread:,} of them for an image that can't be read)" if counts.bad else ""
    yield f"documents      {counts.samples:,}, of which {counts.texts:,} have no image{bad}"
    yield f"read as        {', '.join(f'{form} ({count:,})' for form, count in counts.forms.items())}"
    yield f"images         {images:,} checked, used {counts.uses:,} times as {counts.tiles:,} tiles"
    yield f"tokens         {counts.tokens:,}, of which {counts.targets:,} have a loss with --sft"
    reach = f"images reach to place {counts.furthest:,}, which --seq-length must hold"
    yield f"longest        {counts.longest:,} tokens; {reach}"
    yield (
        f"wrote          {config.output_prefix}.{{bin,idx,meta.json}}, {targets_prefix(config.output_prefix)}.* and "
        f"{config.output_prefix}_images.{{json,table}}"
    )
    if not counts.uses:
        yield "remark: no line names an image; data without images are preprocessed by tools/preprocess_sft.py"
    for remark in remarks_on_format(encoder, tokenizer):
        yield f"remark: {remark}"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
