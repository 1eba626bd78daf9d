"""Converting a 500 MB model against loading it with transformers and saving it again.

    python benchmarks/checkpoint_conversion.py --megabytes 500 --rounds 3 --model-type llama

The model is random, in bf16: a GPT-2 or any published type with the usual names of sizes. Every contender is a process
of its own that takes turns with the others; timed is the work without imports. Memory is the most private memory held
beyond what the imports left; pages of mapped files, which the kernel can drop, are not counted. Without a proof, since
the comparison of logits costs the same whoever converts; the last contender shows what it adds. Printed are medians of
rounds; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results

REPOSITORY = Path(__file__).resolve().parents[1]
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 1,
}
OF_GPT2 = {"vocab_size": 32000, "n_embd": 1024, "n_inner": 4096, "n_head": 16, "n_layer": 1}
QUICK = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "n_embd": 64, "n_inner": 128}
PEER = "transformers: load, save"
NAMES = [PEER, "hf to megatron", "megatron to hf", "megatron to megatron-lm", "hf to megatron, proven"]


def write_model(folder: Path, megabytes: int, model_type: str, *, quick: bool = False) -> int:
    """A random model of about the size asked; its size in bytes."""
    import torch
    import transformers

    sizes = OF_GPT2 if model_type == "gpt2" else SIZES
    sizes = {name: QUICK.get(name, size) if quick else size for name, size in sizes.items()}
    layers = "n_layer" if model_type == "gpt2" else "num_hidden_layers"

    def build(number: int) -> Any:
        config = transformers.AutoConfig.for_model(model_type, **{**sizes, layers: number})
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]

    with torch.device("meta"):
        one, two = (sum(each.numel() for each in build(number).parameters()) for number in (1, 2))
    build(1 + round((megabytes * 1e6 / 2 - one) / (two - one))).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def with_transformers(source: Path, target: Path) -> Callable[[], object]:
    """What one would do by hand, and what only copies."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load = transformers.AutoModelForCausalLM.from_pretrained
    return lambda: load(source, dtype=torch.bfloat16).save_pretrained(target)


def converted(source: str, load: Path, target: str, save: Path, *, proof: bool = False) -> Callable[[], object]:
    """A conversion by our converter, to be timed."""
    from megatron.core.conversion.convert import Conversion, convert

    if proof:
        import transformers  # noqa: F401  (its import is not what is measured)
    job = Conversion(source, load, target, save, skip_proof=not proof)  # type: ignore[arg-type]
    return lambda: convert(job, lambda words: None)


def contenders(folder: Path, target: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Name -> what prepares the work and returns it."""
    model, ours = folder / "model", folder / "ours"
    return {
        PEER: lambda: with_transformers(model, target),
        "hf to megatron": lambda: converted("hf", model, "megatron", target),
        "megatron to hf": lambda: converted("megatron", ours, "hf", target),
        "megatron to megatron-lm": lambda: converted("megatron", ours, "megatron-lm", target),
        "hf to megatron, proven": lambda: converted("hf", model, "megatron", target, proof=True),
    }


def private_memory() -> int:
    """Bytes of this process that only it holds and no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def touch_memory(folder: Path) -> None:
    """Write as many bytes as the model has and remove them, so that the kernel has memory for a file at hand: a virtual
    machine that gave memory back to its host pays for the first use of each page ten times what a copy takes.
    """
    path, block = folder / "touched", bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(sum(each.stat().st_size for each in (folder / "model").iterdir()) >> 20):
            file.write(block)
    path.unlink()


def measure(work: Callable[[], object]) -> dict[str, float]:
    """Seconds by the clock and of the processor, and the most memory held beyond the start."""
    before, most, done = private_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, private_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        work()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    finally:
        done.set()
        watcher.join()
    return {"seconds": seconds, "cpu": cpu, "memory": most / 1e6}


def run(name: str, folder: Path) -> dict[str, float] | None:
    """One contender in a process of its own; None for a model that it refuses, after the reason is printed."""
    target = folder / "target"
    shutil.rmtree(target, ignore_errors=True)
    words = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if "CheckpointError" in done.stderr:
        print(f"{name}: {done.stderr.splitlines()[-1].partition(': ')[2]}")
        return None
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(size: int, turns_of: dict[str, list[dict[str, float]]], peer: str = PEER) -> dict[str, float]:
    """A row for each contender; how many times as fast as ``peer`` each of ours is."""
    ratios: dict[str, float] = {}
    print(f"{size / 1e6:.0f} MB, {len(turns_of[peer])} rounds")
    print("| | MB/s | MB/s of processor time | times the peer | peak MB |")
    print("|---|--:|--:|--:|--:|")
    for name, rounds in turns_of.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        pairs = zip(turns_of[peer], rounds)
        ratio = statistics.median(theirs["seconds"] / ours["seconds"] for theirs, ours in pairs)
        ratios |= {} if name == peer else {name: ratio}
        speed, cpu_speed = size / 1e6 / middle["seconds"], size / 1e6 / middle["cpu"]
        print(f"| {name} | {speed:.0f} | {cpu_speed:.0f} | {ratio:.2f} | {middle['memory']:.0f} |")
    return ratios


def main() -> None:
    """Measure all contenders in turns."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-type", default="llama", help="as in config.json")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder unless given")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="default all")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = results.parse(parser, megabytes=2, rounds=1, contenders=[PEER, "hf to megatron"])
    if options.contender:
        work = contenders(options.folder, options.folder / "target")[options.contender]()
        touch_memory(options.folder)
        print(json.dumps(measure(work)))
        return
    names = dict.fromkeys([PEER, *options.contenders])
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = write_model(folder / "model", options.megabytes, options.model_type, quick=options.quick)
        converted("hf", folder / "model", "megatron", folder / "ours")()
        first = {name: run(name, folder) for name in names}
        turns_of = {name: [turn] for name, turn in first.items() if turn is not None}
        for _ in range(options.rounds - 1):
            for name, turns in turns_of.items():
                turns += [turn for turn in [run(name, folder)] if turn is not None]
        ratios = report(size, turns_of)
    results.save(options, ratios, watched=["hf to megatron, proven"])


if __name__ == "__main__":
    main()
