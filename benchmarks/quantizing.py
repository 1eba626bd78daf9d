"""Quantizing a 500 MB model while it is written against llm-compressor, and generation from weights in few bits.

    python benchmarks/quantizing.py --megabytes 500 --rounds 3

The model is a random Llama in bf16. Every contender is a process of its own that takes turns with the others; timed is
the work without imports, and without a proof. Memory is the most private memory held beyond what the imports left.
llm-compressor rounds to the nearest, too (W4A16, no data); where it isn't installed, transformers loads the model and
saves it as it is, which is then the peer. Then tokens are generated for one text from the same model in bf16, and from
its quantized checkpoints with --quantization stored; and from a model of about the same size with eight experts.
Printed are medians of rounds; ratios are medians of the rounds'.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks import checkpoint_conversion, results
from benchmarks.checkpoint_conversion import REPOSITORY, converted, measure, touch_memory, write_model

COMPRESSOR, PLAIN, WRITTEN = "llm-compressor: int4", "transformers: load, save", "hf to hf, int4"
SCHEMES = ("int8", "int4", "int4-asym", "w8a8", "fp8", "fp8-block")
GENERATED = ("", "int8", "int4", "fp8")
"""Schemes of checkpoints that generate; the first is the model in bf16."""


def with_compressor(source: Path, target: Path) -> Callable[[], object]:
    """Rounding to the nearest by llm-compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    return lambda: oneshot(model=str(source), recipe=recipe, output_dir=str(target))


def rounded(source: Path, target: Path, scheme: str) -> Callable[[], object]:
    """Rounding while the folder is written, by our converter."""
    from megatron.core.conversion.convert import Conversion, convert
    from megatron.core.conversion.huggingface.quantizing import Rounding
    from megatron.core.quantization.scheme import scheme_named

    width = json.loads((source / "config.json").read_text())["hidden_size"]
    group = min(128, width) if scheme.startswith("int4") else None
    rounding = Rounding(scheme_named(scheme, group_size=group))
    job = Conversion("hf", source, "hf", target, skip_proof=True, rounding=rounding)
    return lambda: convert(job, lambda words: None)


def work_of(name: str, folder: Path) -> Callable[[], object]:
    """The work of a contender, prepared."""
    source, target = folder / "model", folder / "target"
    if name == COMPRESSOR:
        return with_compressor(source, target)
    if name == PLAIN:
        return checkpoint_conversion.with_transformers(source, target)
    return rounded(source, target, name.removeprefix("hf to hf, "))


def run(name: str, folder: Path) -> dict[str, float]:
    """One contender in a process of its own."""
    shutil.rmtree(folder / "target", ignore_errors=True)
    words = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def tokens_per_second(load: Path, tokens: int, *, stored: bool) -> float:
    """Speed of one text from a checkpoint, whose weights stay in few bits where it has ``stored`` ones."""
    from megatron.config.inference import InferenceConfig
    from megatron.config.trained_model import TrainedModelConfig
    from megatron.core.inference.request import Request
    from megatron.core.models.gpt.train_spec import GPTSpec
    from megatron.core.parallel.environment import launch_environment
    from megatron.training.checkpoints.trained_model import trained_model
    from megatron.training.evaluation.generating import generation_engine

    config = InferenceConfig(quantization="stored" if stored else None, inference_max_requests=1)
    choice = TrainedModelConfig(load=str(load))
    with (
        trained_model(choice, {"gpt": GPTSpec()}, launch_environment({})) as trained,
        generation_engine(trained, config, releases=True) as engine,
    ):
        assert engine is not None
        times = list[float]()
        for number in range(3):
            start = time.perf_counter()
            engine.generate([Request(id=str(number), prompt=(5, 6, 7), max_tokens=tokens)])
            times.append(time.perf_counter() - start)
    return tokens / min(times)


def generation(folder: Path, name: str, tokens: int) -> None:
    """Print the speed of each scheme of the model in ``folder`` with this ``name``."""
    print(f"| weights of the {name} | tokens/s of one text |")
    print("|---|--:|")
    for scheme in GENERATED:
        source, ours = folder / name, folder / f"{name}-ours"
        if scheme:
            source = folder / f"{name}-few"
            rounded(folder / name, source, scheme)()
        converted("hf", source, "megatron", ours)()
        print(f"| {scheme or 'bf16'} | {tokens_per_second(ours, tokens, stored=bool(scheme)):.1f} |", flush=True)
        shutil.rmtree(ours)
        if scheme:
            shutil.rmtree(source)


def main() -> None:
    """Measure all contenders in turns, then generation."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder unless given")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = results.parse(parser, megabytes=2, rounds=1, tokens=4)
    if options.contender:
        work = work_of(options.contender, options.folder)
        touch_memory(options.folder)
        print(json.dumps(measure(work)))
        return
    peer = COMPRESSOR if find_spec("llmcompressor") is not None and not options.quick else PLAIN
    names = [peer, *(f"hf to hf, {scheme}" for scheme in SCHEMES)]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = write_model(folder / "model", options.megabytes, "llama", quick=options.quick)
        turns_of: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name, turns in turns_of.items():
                turns.append(run(name, folder))
        ratios = checkpoint_conversion.report(size, turns_of, peer)
        generation(folder, "model", options.tokens)
        shutil.rmtree(folder / "model")
        write_model(folder / "experts", options.megabytes, "mixtral", quick=options.quick)
        generation(folder, "experts", options.tokens)
    results.save(options, ratios, watched=[each for each in ratios if each != WRITTEN])


if __name__ == "__main__":
    main()
