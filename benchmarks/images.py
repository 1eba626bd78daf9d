"""Models that read images, on the CPU: pictures a second, a training step, and whether a step waits for its pictures.

    python -m benchmarks.images [--dtype bf16] [--rounds N]

Loading is a sample of the data set (file, checksum, decoding, tiles, places), against a bare loop of Pillow that opens,
converts and resizes the same JPEGs. The step is forward, backward and AdamW of LLaVA's architecture, against
transformers' LLaVA with the same weights, so first losses agree; in bf16 it has bf16 weights, and ours keeps fp32
masters. Both take turns, on one thread; the clock is processor time. Between, a loop takes batches from a loader with
two workers, which decode, and rests for a step of 100 ms: it should not wait. Ratios that are saved are over their
targets, 0.9, 1.2 and 0.95.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import results
from benchmarks.training_step import Step, context_of, our_step, peer_step
from megatron.config.parse import parse_run
from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import fill
from megatron.core.datasets.loader import BatchLoader
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.fields import IMAGES
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from megatron.training.run.data import offline_splits
from tools import preprocess_images

WIDTH, HEIGHT, SIDE = 640, 427, 336
VISION = f"--vision-model-type clip --img-h {SIDE} --img-w {SIDE} --patch-dim 28 --disable-vision-class-token"
NULL = "--tokenizer-type NullTokenizer --vocab-size 999"
SMALL = (
    f"--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 {VISION} {NULL} --lr 1e-4 "
    "--vision-num-layers 4 --vision-hidden-size 256 --vision-num-attention-heads 4 --vision-ffn-hidden-size 1024 "
    "--packing best-fit --eval-iters 0 --micro-batch-size 2 --global-batch-size 2 --num-workers 1"
)
BATCH, SECONDS = 8, 0.1
LOADING, STEP, WAITING = 0.9, 1.2, 1 / 1.05
"""Targets: images a second over a bare loop's, speed of a step over transformers', time of a step over that with its
wait."""


@dataclass(frozen=True)
class Shape:
    """Sizes of both parts of a model. ``image``: pixels of a side, of patches of ``patch``; ``words`` of a text."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    image: int = 336
    patch: int = 14
    words: int = 128
    vocabulary: int = 8192

    @property
    def features(self) -> int:
        """Places of an image."""
        return (self.image // self.patch) ** 2


QUICK = Shape(hidden=64, layers=2, heads=4, image=56, words=16, vocabulary=512)


def write_jpegs(folder: Path, count: int) -> Path:
    """Pictures with the detail of photos, and lines of JSON that name them."""
    random, lines = np.random.default_rng(0), []
    for number in range(count):
        rough = Image.fromarray(random.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), np.uint8))
        rough.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        text = " ".join(map(str, random.integers(0, 999, 90)))
        lines.append(json.dumps({"image": f"{number}.jpg", "caption": text}))
    path = folder / "captions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["--input", str(path), "--output-prefix", str(folder / "data"), *VISION.split(), *NULL.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        preprocess_images.main(words)
    return folder / "data"


def opened(prefix: Path) -> Any:
    """The training data of a run."""
    flags = f"{SMALL} --train-iters 1000 --data-path {prefix} --split 1,0,0"
    run = parse_run(flags.split(), extra_groups=FAMILIES["vlm"].groups)
    return offline_splits(run, FAMILIES["vlm"].train_spec)[0].train


def loading(prefix: Path, rounds: int) -> float:
    """The bare loop's time over ours, the median of rounds in turns; both are printed."""
    dataset, files = opened(prefix), sorted(prefix.parent.glob("*.jpg"))

    def ours() -> None:
        done = 0
        while done < len(files):
            done += len(dataset[done]["images"])

    def bare() -> None:
        for file in files:
            with Image.open(file) as image:
                np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(rounds):
        for name, once in (("ours", ours), ("bare", bare)):
            times[name].append(processor_time(once))
    rates = {name: len(files) / statistics.median(spent) for name, spent in times.items()}
    ratio = statistics.median(b / a for a, b in zip(times["ours"], times["bare"], strict=True))
    print(f"loading: {rates['ours']:.0f} images/s, bare loop {rates['bare']:.0f}; {ratio:.2f} x its speed", flush=True)
    return ratio


def processor_time(once: Callable[[], object]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    once()
    return time.process_time() - start


def llava(shape: Shape) -> Any:
    """transformers' LLaVA, whose features are those of all of its encoder's layers."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": 4 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    vision = {**sizes, "image_size": shape.image, "patch_size": shape.patch, "model_type": "clip_vision_model"}
    text = {**sizes, "vocab_size": shape.vocabulary, "model_type": "llama", "num_key_value_heads": shape.heads}
    torch.manual_seed(1)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=shape.vocabulary - 1, vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def steps_of(shape: Shape, dtype: str, batch: int) -> Mapping[str, Step]:
    """Our step and transformers', on texts of an image and words, whose loss is that of the words."""
    peer, context = llava(shape), context_of(dtype)
    portable = from_transformers(peer)
    model = FAMILIES["vlm"].train_spec.build_model(portable.model, portable.groups, context)
    named = list(sharded_parameters(model))
    state = [ShardedState(f"model.{where.tied or name}", each.detach(), where) for name, each, where in named]
    fill(state, portable, context.mesh)
    peer.train()
    random = torch.Generator().manual_seed(1)
    length = shape.features + shape.words
    ids = torch.randint(shape.vocabulary - 1, (batch, length + 1), generator=random)
    ids[:, : shape.features] = shape.vocabulary - 1
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    marks = tokens == shape.vocabulary - 1
    places = torch.where(marks, (marks.flatten().cumsum(0) - 1).view_as(tokens), -1)
    pixels = torch.randn(batch, 3, shape.image, shape.image, generator=random).to(context.dtype)
    counted = (labels != shape.vocabulary - 1).float()
    weights = counted / counted.sum()

    def our_loss() -> torch.Tensor:
        return model(tokens, images=pixels, image_places=places).masked_cross_entropy(labels, weights)  # type: ignore[no-any-return]

    def peer_loss() -> torch.Tensor:
        logits = peer(input_ids=tokens, pixel_values=pixels, use_cache=False).logits
        return (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
            * weights.flatten()
        ).sum()

    theirs = peer_step(peer, peer_loss, dtype, autocast=False)
    return {"ours": our_step(model, our_loss, context), "transformers": theirs}


def step_ratio(shape: Shape, dtype: str, *, batch: int, rounds: int) -> float:
    """transformers' time over ours, the median of rounds in turns; both are printed."""
    steps = steps_of(shape, dtype, batch)
    losses = {name: step() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < (1e-3 if dtype == "fp32" else 0.1), losses
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(1000 * processor_time(step))
    ratio = statistics.median(b / a for a, b in zip(times["ours"], times["transformers"], strict=True))
    spent = ", ".join(f"{name} {statistics.median(each):.0f} ms" for name, each in times.items())
    print(f"step, {dtype}: {spent}; {ratio:.2f} x transformers' speed", flush=True)
    return ratio


def waiting(dataset: Any, *, steps: int) -> float:
    """Time of a step over that with the wait for its pictures, by the median wait; both are printed."""
    sampler = MicrobatchSampler(num_samples=len(dataset), consumed=0, micro_batch_size=BATCH)
    batches, waits = iter(BatchLoader(dataset, sampler, num_workers=2, ragged={IMAGES})), list[float]()
    next(batches)  # for which workers start
    time.sleep(SECONDS)
    for _ in range(steps):
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
        time.sleep(SECONDS)
    wait = statistics.median(waits)
    print(f"a step of {1000 * SECONDS:.0f} ms waits {1000 * wait:.1f} ms for {BATCH} images", flush=True)
    return SECONDS / (SECONDS + wait)


def main() -> None:
    """Print a line for each measurement."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=None, help="of the step (default: both)")
    parser.add_argument("--batch", type=int, default=2, help="texts of a step (default 2)")
    parser.add_argument("--images", type=int, default=200, help="JPEGs that are written (default 200)")
    parser.add_argument("--steps", type=int, default=60, help="that wait for batches (default 60)")
    parser.add_argument("--rounds", type=int, default=5)
    options = results.parse(parser, rounds=1, images=12, steps=4)
    torch.set_num_threads(1)
    shape, ratios = QUICK if options.quick else Shape(), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_jpegs(Path(folder), options.images)
        ratios[f"loading images of {WIDTH} x {HEIGHT}"] = loading(prefix, options.rounds) / LOADING
        ratios["a step over one with its wait"] = waiting(opened(prefix), steps=options.steps) / WAITING
    for dtype in [options.dtype] if options.dtype else ["fp32", "bf16"]:
        ratios[f"step, {dtype}"] = step_ratio(shape, dtype, batch=options.batch, rounds=options.rounds) / STEP
    results.save(options, ratios)


if __name__ == "__main__":
    main()
