"""Texts with images from files to samples: where images stand, what is trained on, and what is refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.datasets.samples import Sample
from megatron.core.images.expansion import ROW_END
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.fields import IMAGES, PLACES
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import ConfigError, DataError
from megatron.training.run.data import offline_splits
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_line, expect_error
from tests.unit.tools.conftest import write_lines
from tools import inspect_dataset, merge_datasets, preprocess_images

_TILE = "--vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 --disable-vision-class-token"
_TILES = "--use-tiling --max-num-tiles 2 --use-thumbnail --use-tile-tags --image-tag-type internvl"
VISION, TILED = _TILE.split(), f"{_TILE} {_TILES}".split()
ENCODER = "--vision-num-layers 1 --vision-hidden-size 8 --vision-num-attention-heads 2 --vision-ffn-hidden-size 8"
TURNS = ["--turn-start", "{role}:", "--turn-end", "<|endoftext|>"]
COLORS = {"red.png": (250, 0, 0), "b/blue.jpg": (0, 0, 250), "wide.png": (0, 250, 0)}


def turns(*texts: str) -> list[dict[str, str]]:
    """LLaVA's turns."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


LLAVA = {"image": "red.png", "conversations": turns("<image>\nfox?", "brown", "dog?", "lazy")}
TWO = {"images": ["b/blue.jpg", "wide.png"], "conversations": turns("<image> and <image>", "quick")}
CAPTION = {"image": "wide.png", "caption": "the quick fox"}
TEXT_OF_PARQUET = {**CAPTION, "caption": None, "text": "the quick fox"}  # a table has every column in every row
TEXT = {"conversations": turns("jumps?", "over")}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "fox?"}]},
        {"role": "assistant", "content": "brown"},
    ]
}
RECORDS: list[dict[str, Any]] = [LLAVA, TWO, CAPTION, TEXT, PARTS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures."""
    for name, color in COLORS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32 if "wide" in name else 16, 16), color).save(path)
    return tmp_path


@pytest.fixture
def tokenizer_flags(tokenizer_folder: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder)]


def convert(folder: Path, records: Sequence[dict[str, Any]], flags: Sequence[str]) -> str:
    source = write_lines(folder / "in.jsonl", records)
    prefix = str(folder / "data")
    preprocess_images.main(["--input", str(source), "--output-prefix", prefix, *flags, *TURNS])
    return prefix


def splits_of(prefix: str, flags: Sequence[str], *more: str) -> tuple[DatasetSplits, Tokenizer]:
    """The data of a run that reads only these."""
    words = f"--num-layers 1 {ENCODER} --data-path {prefix} --split 1,0,0 --sft --packing best-fit --seq-length 40"
    config = tiny_config(" ".join([words, "--vocab-size 300", *flags, *more]), family=FAMILIES["vlm"])
    return offline_splits(config, FAMILIES["vlm"].train_spec)


def samples_of(prefix: str, flags: Sequence[str], *more: str) -> tuple[list[Sample], Tokenizer]:
    """Every sample of the run."""
    splits, tokenizer = splits_of(prefix, flags, *more)
    assert splits.train is not None
    return [splits.train[index] for index in range(len(splits.train))], tokenizer


def test_images_stand_where_their_marks_were(folder: Path, tokenizer_flags: list[str]) -> None:
    """Each feature's place, the words around it, and the loss on answers alone, document by document."""
    prefix = convert(folder, RECORDS, [*VISION, *tokenizer_flags])
    data, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    samples, tokenizer = samples_of(prefix, [*VISION, *tokenizer_flags], "--seq-length", "80")
    seen = dict[str, tuple[list[tuple[int, ...]], int]]()
    for sample in samples:
        for document in range(int(sample["document_ids"].max())):
            here = sample["document_ids"] == document
            words = (sample[PLACES] < 0) & here
            text = tokenizer.detokenize(sample["tokens"][words].tolist())
            features = sample[PLACES][here & ~words]
            tiles = [sample[IMAGES][tile] for tile in dict.fromkeys((features // 4).tolist())]
            assert features.tolist() == sorted(features.tolist()) and len(features) == 4 * len(tiles)
            seen[text] = [tuple(tile[:, 4, 4].tolist()) for tile in tiles], int(sample["loss_mask"][here].sum())
    by_word = {word: next(found for text, found in seen.items() if word in text) for word in ("dog", " and", "jumps")}
    assert by_word["dog"][0] == [(250, 0, 0)]
    assert [max(range(3), key=color.__getitem__) for color in by_word[" and"][0]] == [2, 1]
    assert by_word["jumps"][0] == []
    learned = [tokenizer.detokenize(data.get(n)[targets.get(n) != 0].tolist()) for n in range(len(data))]
    assert learned == [
        f"{text}<|endoftext|>" for text in ("brown<|endoftext|>lazy", "quick", "the quick fox", "over", "brown")
    ]


def test_tiles_have_their_tags(folder: Path, tokenizer_flags: list[str]) -> None:
    """A wide picture is two tiles and a thumbnail, each after its word."""
    flags = [*TILED, *tokenizer_flags]
    (sample, *_), tokenizer = samples_of(convert(folder, [TEXT_OF_PARQUET], flags), flags, "--seq-length", "120")
    assert sample[IMAGES].shape == (3, 3, 8, 8)
    numbers = sample[PLACES][sample[PLACES] >= 0]
    assert numbers.tolist() == list(range(12))
    text = tokenizer.detokenize(np.where(sample[PLACES] >= 0, 0, sample["tokens"]).tolist())
    order = [text.index(word) for word in ("<img>", "<tile_1>", "<tile_2>", "<tile_global_thumbnail>", "</img>")]
    assert order == sorted(order)


def test_grids_have_their_rows(folder: Path, tokenizer_flags: list[str]) -> None:
    """Rows of patches across tiles end with a place of their own, and the next image counts on behind all tiles."""
    flags = [*_TILE.split(), *ENCODER.split(), "--image-grids", "1x2", "2x1", *tokenizer_flags]
    prefix = convert(folder, [{**TWO, "images": ["wide.png", "red.png"]}], flags)
    (sample, *_), _ = samples_of(prefix, flags, "--seq-length", "120")
    wide, red = sample[PLACES][sample[PLACES] != -1].tolist(), [0, 1, 2, 3]
    assert sample[IMAGES].shape == (6, 3, 8, 8)
    first = [*red, 4, 5, 8, 9, ROW_END, 6, 7, 10, 11, ROW_END]
    assert wide[: len(first)] == first and wide[len(first) :][:4] == [12, 13, 14, 15]
    assert not sample["loss_mask"][:-1][sample[PLACES][1:] != -1].any()


def test_no_image_is_cut(folder: Path, tokenizer_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A long text loses its end, and a document whose images don't fit is left out; both are counted."""
    long = {"image": "red.png", "conversations": turns("<image>", "fox " * 60)}
    many = {"images": ["red.png"] * 10, "conversations": turns("<image>" * 10, "fox")}
    flags = [*VISION, *tokenizer_flags]
    prefix = convert(folder, [long, many, LLAVA], flags)
    assert "--seq-length must hold" in capsys.readouterr().out
    splits, _ = splits_of(prefix, flags)
    assert splits.train is not None
    check_line("\n".join(splits.train.describe()), "1 of 3", "--seq-length 40", hide=[r"^.*: (?=\d)"])
    samples = [splits.train[index] for index in range(2)]
    assert all(np.count_nonzero(sample[PLACES] >= 0) == 4 * len(sample[IMAGES]) for sample in samples)
    splits, _ = splits_of(prefix, flags, "--seq-length", "120")
    assert splits.train is not None
    assert max(len(splits.train[index][IMAGES]) for index in range(len(splits.train))) >= 10
    with expect_error(DataError, "--seq-length"):
        splits_of(convert(folder, [many], flags), flags)


def _member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _tar(folder: Path) -> Path:
    """Samples as webdataset has them: a conversation, a caption, and one whose picture is damaged."""
    path = folder / "shard.tar"
    red, blue = (folder / "red.png").read_bytes(), (folder / "b/blue.jpg").read_bytes()
    with tarfile.open(path, "w") as archive:
        _member(archive, "./one.png", red)
        _member(archive, "./one.json", json.dumps(turns("<image> fox?", "brown")).encode())
        _member(archive, "./x/two.txt", b"the quick fox\n")
        _member(archive, "./x/two.jpg", blue)
        _member(archive, "three.png", red[:50])
        _member(archive, "three.txt", b"lazy")
    return path


def test_tar_files_are_read_at_offsets(
    folder: Path, tokenizer_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Images stay in the tar file, and a sample is read without what stands before it."""
    prefix, flags = str(folder / "data"), [*VISION, *tokenizer_flags]
    words = ["--input", str(_tar(folder)), "--output-prefix", prefix, *flags, *TURNS, "--on-bad-line", "skip"]
    preprocess_images.main(words)
    captured = capsys.readouterr()
    check_line(captured.err, "shard.tar:3", "three.png")
    assert "2 checked" in captured.out or "3 checked" in captured.out
    samples, _ = samples_of(prefix, flags)
    pixels = [tile[:, 4, 4].tolist() for sample in samples for tile in sample[IMAGES]]
    assert {max(range(3), key=pixel.__getitem__) for pixel in pixels} == {0, 2}
    with expect_error(DataError, "shard.tar:3", "--on-bad-line skip"):
        preprocess_images.main(words[:-2])


def _bad(folder: Path) -> dict[str, dict[str, Any]]:
    """Records whose images can't be read."""
    outside = folder.parent / f"{folder.name}-outside.png"
    Image.new("RGB", (9, 9)).save(outside)
    (folder / "leads_out.png").symlink_to(outside)
    (folder / "nowhere.png").symlink_to(folder / "gone.png")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes((folder / "red.png").read_bytes()[:40])
    os.mkfifo(folder / "pipe.png")
    names = ["gone.png", f"../{outside.name}", str(outside), "leads_out.png", "nowhere.png", "empty.png", "cut.png"]
    names += ["pipe.png", "b", "https://example.org/a.png", "a\0b.png", "\ud800.png"]
    names += ["data:image/png;base64," + 400 * "A"]
    return {repr(name): {"image": name, "caption": "fox"} for name in names} | {
        "no mark": {"image": "red.png", "conversations": turns("fox?", "brown")},
        "no image": {"conversations": turns("<image> fox?", "brown")},
        "a number": {"image": 7, "caption": "fox"},
    }


def test_each_image_that_cannot_be_read_is_named(
    folder: Path, tokenizer_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By its line, in a sentence of its own, and counted; nothing is read beyond the folder, and no pipe waited for."""
    bad = _bad(folder)
    convert(folder, [LLAVA, *bad.values()], [*VISION, *tokenizer_flags, "--on-bad-line", "skip"])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("skipped")]
    assert len(lines) == len(bad)
    for number, line in enumerate(lines, start=2):
        check_line(line, f"in.jsonl:{number}")
    check_line(captured.out, f"{len(bad)} bad lines", "13 of them")


def test_an_image_that_has_changed_is_noticed(
    folder: Path, tokenizer_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run would go on with other samples."""
    flags = [*VISION, *tokenizer_flags]
    prefix = convert(folder, [LLAVA], flags)
    before = samples_of(prefix, flags)[0][0]
    again = samples_of(prefix, flags)[0][0]
    assert all(np.array_equal(before[name], again[name]) for name in before)
    Image.new("RGB", (16, 16), (250, 0, 1)).save(folder / "red.png")
    with expect_error(DataError, "red.png"):
        samples_of(prefix, flags)
    (folder / "red.png").unlink()
    monkeypatch.chdir(folder.parent)  # a path is said as this process sees it, not from the folder of the tokens
    with expect_error(DataError, f"{folder.name}/red.png", hide=[folder.name]):
        samples_of(f"{folder.name}/data", flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--img-h 16", ("--img-h 8", "16")),
        ("--use-tiling --max-num-tiles 3", ("--use-tiling False",)),
        ("--pixel-shuffle", ("4 features a tile",)),
        ("--packing stream", ("--packing stream", "--packing best-fit")),
    ],
)
def test_data_are_read_as_they_were_made(
    folder: Path, tokenizer_flags: list[str], flags: str, words: tuple[str, ...]
) -> None:
    """Features of another number would stand in the places of words."""
    prefix = convert(folder, [LLAVA], [*VISION, *tokenizer_flags])
    with expect_error(ConfigError, *words):
        splits_of(prefix, [*VISION, *tokenizer_flags], *flags.split())


def test_models_of_texts_refuse_places_of_images(folder: Path, tokenizer_flags: list[str]) -> None:
    """They would learn the id that stands there; and a merged data set would have places without images."""
    prefix = convert(folder, [LLAVA], [*VISION, *tokenizer_flags])
    metadata = DatasetMetadata.read(prefix)
    assert metadata is not None and metadata.num_images == 1
    config = tiny_config(
        " ".join(["--num-layers 1 --vocab-size 300 --split 1,0,0 --data-path", prefix, *tokenizer_flags])
    )
    with expect_error(DataError, "vision encoder"):
        offline_splits(config, FAMILIES["gpt"].train_spec)
    with expect_error(DataError, "--data-path PREFIX PREFIX ..."):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(folder / "merged")])
    (folder / "data_images.table").unlink()
    with expect_error(DataError, "data_images.table"):
        splits_of(prefix, [*VISION, *tokenizer_flags])


def test_without_an_encoder_there_are_no_places(folder: Path, tokenizer_flags: list[str]) -> None:
    """The number of places of an image depends on it."""
    with expect_error(ConfigError, "--vision-model-type"):
        convert(folder, [LLAVA], tokenizer_flags)


def test_images_are_blended_with_texts(folder: Path, tokenizer_flags: list[str]) -> None:
    """A batch has samples with images and of texts alone, by weight."""
    flags = [*VISION, *tokenizer_flags]
    prefix = convert(folder, [LLAVA, TWO], flags)
    (folder / "more").mkdir()
    (folder / "more" / "red.png").write_bytes((folder / "red.png").read_bytes())
    texts = convert(folder / "more", [TEXT], flags)
    splits, _ = splits_of(f"3 {prefix} 1 {texts}", flags)
    assert splits.train is not None
    counts = [len(splits.train[index][IMAGES]) for index in range(8)]
    assert counts.count(0) == 2


def test_a_sample_is_shown_with_its_tiles(
    folder: Path, tokenizer_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text with the tiles where they stand, and a picture of them."""
    flags = [*TILED, *tokenizer_flags]
    prefix = convert(folder, [CAPTION], flags)
    words = f"--model-type VLM --sample 0 --num-layers 1 --hidden-size 8 --num-attention-heads 2 {ENCODER} --lr 1e-3 "
    words += f"--data-path {prefix} --split 1,0,0 --packing best-fit --sft --seq-length 120 --vocab-size 300 "
    words += f"--micro-batch-size 1 --train-iters 1 --picture {folder / 'shown.png'}"
    capsys.readouterr()
    inspect_dataset.main([*words.split(), *flags])
    shown = capsys.readouterr().out
    assert "⟦<img><tile_1>⟧⟨tile 0⟩⟦<tile_2>⟧⟨tile 1⟩" in shown and "⟧the quick fox" in shown
    check_line(shown, "tiles        3", "12 places")
    sheet = np.asarray(Image.open(folder / "shown.png"))
    assert (sheet == (0, 250, 0)).all(axis=2).sum() == 3 * 96 * 96
    texts = convert(folder, [TEXT], flags)
    with expect_error(ConfigError, "--picture"):
        inspect_dataset.main([*words.replace(prefix, texts).split(), *flags])


def test_a_table_of_other_documents_is_refused(folder: Path, tokenizer_flags: list[str]) -> None:
    """One that was swapped, damaged or edited would put other images beside the texts."""
    flags = [*VISION, *tokenizer_flags]
    (folder / "other").mkdir()
    for name in ("red.png", "wide.png"):
        (folder / "other" / name).write_bytes((folder / name).read_bytes())
    other = convert(folder / "other", [{**CAPTION, "image": "red.png", "caption": "the lazy fox"}], flags)
    prefix = convert(folder, [CAPTION], flags)
    header, table = Path(f"{prefix}_images.json"), Path(f"{prefix}_images.table")
    ours = header.read_bytes(), table.read_bytes()
    theirs = tuple(Path(f"{other}_images.{ending}").read_bytes() for ending in ("json", "table"))
    assert IndexedDataset(prefix).num_tokens == IndexedDataset(other).num_tokens
    fewer = json.dumps({**json.loads(ours[0]), "sources": []}).encode()
    for written, named in (
        (theirs, "data.bin"),
        ((ours[0], ours[1][:60] + b"!" + ours[1][61:]), "data_images.table"),
        (
            (ours[0].replace(b'"starts": 2', b'"starts": 1').replace(b'"places": 1', b'"places": 3'), ours[1]),
            "data_images.json",
        ),
        ((fewer, ours[1]), '"sources"'),
    ):
        header.write_bytes(written[0])
        table.write_bytes(written[1])
        with expect_error(DataError, named):
            splits_of(prefix, flags)
    header.write_bytes(ours[0])
    table.write_bytes(ours[1])
    assert samples_of(prefix, flags)[0]
