"""The first thing to run on a GPU: what is there, whether it computes what it should, and how fast it trains.

    python -m benchmarks.gpu                            # all stages on all GPUs of this machine: 1B, 3B and 8B
    python -m benchmarks.gpu --stages kernels training  # correctness alone
    python -m benchmarks.gpu --device cpu               # every stage in small, on a CPU
    python -m benchmarks.gpu --rehearse --ranks 8       # no GPU: memory and host synchronizations of each size

Stages: ``kernels`` compares each kernel with the same in fp64 or computed in another way; ``training`` compares the
losses of a small model on the GPU, and at layouts of several GPUs, with those of one CPU rank in fp32; ``tests`` runs
tests/gpu; ``speed`` times steps of Llama-like models against plain PyTorch (benchmarks/gpu_plain.py), which keeps fp32
weights as we keep fp32 masters, casts them to bf16, and takes flash-attn where it is installed. Each turn is a process
of its own, and contenders take turns; printed are medians of steps. A stage that fails doesn't end the others: the exit
code is 1. Everything is saved as JSON, after each stage.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu_checks import CHECKS, Found, check
from benchmarks.gpu_plain import SIZES, Size
from benchmarks.gpu_ranks import WorkerError, WorkerMemoryError, on_ranks
from benchmarks.gpu_steps import (
    ZERO,
    PlainSettings,
    Taken,
    Way,
    described,
    our_steps,
    plain_steps,
    scale_of,
    ways,
)
from megatron.core.device import gpus
from megatron.errors import ConfigError, run_command

STAGES = ("kernels", "training", "tests", "speed")
USABLE = 0.92  # of a device's memory, for what the estimate counts: the rest is CUDA's, NCCL's and fragments
CPU_FLAGS = ["--distributed-backend", "gloo"]
QUICK = {
    "device": "cpu",
    "stages": ["speed"],
    "ranks": 1,
    "contenders": ["megatron", "plain PyTorch"],
    "json": Path(tempfile.gettempdir()) / "gpu_benchmark_quick.json",
}
TESTS = Path(__file__).resolve().parent.parent / "tests" / "gpu"


@dataclass(frozen=True)
class Layout:
    """A run whose losses must be those of ``model`` on one CPU rank in fp32, within ``bound`` of each loss."""

    flags: str
    bound: float
    ranks: int = 1
    model: str = "dense"


MODELS = {
    "dense": "",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-load-balancing-type none",
}
SMALL = dataclasses.replace(SIZES["tiny"], layers=4, hidden=256, ffn=512, heads=8, groups=4, sequence=128)
BATCH = "--micro-batch-size 2 --global-batch-size 8"
EXACT, ROUNDED, COARSE = 1e-4, 5e-3, 2e-2
LAYOUTS = {
    "fp32": Layout("", EXACT),
    "fp32, experts": Layout("", EXACT, model="experts"),
    "fp32, recomputing layers": Layout("--recompute-granularity full", EXACT),
    "bf16": Layout("--bf16", ROUNDED),
    "bf16, experts": Layout("--bf16", ROUNDED, model="experts"),
    "bf16, --compile": Layout("--bf16 --compile", ROUNDED),
    "bf16, --cpu-offloading": Layout("--bf16 --cpu-offloading --min-offloaded-tensor-size 1000", ROUNDED),
    "fp8, tensorwise": Layout("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", COARSE),
    "fp32, TP 2 with SP": Layout("--tensor-model-parallel-size 2 --sequence-parallel", EXACT, 2),
    "fp32, PP 2": Layout("--pipeline-model-parallel-size 2", EXACT, 2),
    "fp32, CP 2": Layout("--context-parallel-size 2", EXACT, 2),
    "fp32, ZeRO 1 over 2, overlapping": Layout(ZERO, EXACT, 2),
    "fp32, experts over 2": Layout("--expert-model-parallel-size 2", EXACT, 2, "experts"),
    "bf16, TP 2 with SP": Layout("--bf16 --tensor-model-parallel-size 2 --sequence-parallel", ROUNDED, 2),
    "bf16, CP 2": Layout("--bf16 --context-parallel-size 2", ROUNDED, 2),
    "bf16, TP 2, PP 2, ZeRO 1 over 2": Layout(
        f"--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {ZERO}", ROUNDED, 8
    ),
}  # fmt: skip


@dataclass
class Report:
    """What is printed and saved."""

    found: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Print a line at once."""
        print(line, flush=True)

    def check(self, stage: str, name: str, found: Sequence[Found]) -> None:
        """Print the results of a check, those that were skipped for one reason in one line."""
        rows = self.found.setdefault(stage, {}).setdefault(name, [])
        skipped = dict[str, int]()
        for each in found:
            rows.append(dataclasses.asdict(each) | {"is_wrong": each.is_wrong})
            if each.skipped:
                skipped[each.skipped] = skipped.get(each.skipped, 0) + 1
                continue
            what = each.failed or f"off by {each.error:.1e}, at most {each.bound:.0e}"
            self.say(f"   {'FAILED' if each.is_wrong else 'passed'}  {name}: {each.name}: {what}")
            if each.is_wrong:
                self.failures.append(f"{name}: {each.name}: {what}")
        for reason, number in skipped.items():
            self.say(f"   skipped {name}: {reason}{f' ({number} cases)' if number > 1 else ''}")


def check_kernels(options: argparse.Namespace, report: Report) -> None:
    """Every check, each in a process of its own."""
    for name in options.checks or CHECKS:
        try:
            found = on_ranks(check, name, options.backend)
        except WorkerError as error:
            found = [Found("all", failed=str(error))]
        report.check("kernels", name, found)


def check_training(options: argparse.Namespace, report: Report) -> None:
    """Six steps at each layout that has as many ranks as it needs."""

    @functools.cache
    def reference(model: str) -> list[float]:
        flags = [*SMALL.flags, *BATCH.split(), *MODELS[model].split(), *CPU_FLAGS]
        taken: Taken = on_ranks(our_steps, flags, 6, 0)
        return taken.losses

    for name, layout in LAYOUTS.items():
        if options.layouts and name not in options.layouts:
            continue
        if layout.ranks > options.ranks:
            found = Found("losses", skipped=f"it needs {layout.ranks} ranks, and there are {options.ranks}")
        else:
            flags = [*SMALL.flags, *BATCH.split(), *MODELS[layout.model].split(), *layout.flags.split()]
            flags += CPU_FLAGS if options.backend else []
            try:
                wanted, taken = reference(layout.model), on_ranks(our_steps, flags, 6, 0, ranks=layout.ranks)
                error = max(abs(a / b - 1) for a, b in zip(taken.losses, wanted))
                found = Found(f"losses {wanted[0]:.4f} to {wanted[-1]:.4f}", error, layout.bound)
            except WorkerError as problem:
                refused = layout.flags.count("--fp8") and "compute capability" in str(problem)
                found = Found("losses", skipped=str(problem)) if refused else Found("losses", failed=str(problem))
        report.check("training", name, [found])


def run_tests(options: argparse.Namespace, report: Report) -> None:
    """tests/gpu, where the checkout has it and pytest is installed."""
    lacking = "" if TESTS.exists() else f"{TESTS} is not there"
    lacking = lacking or ("" if importlib.util.find_spec("pytest") else "pytest is not installed")
    if options.backend:
        lacking = "tests/gpu needs a GPU"
    if lacking:
        report.check("tests", "tests/gpu", [Found("tests", skipped=lacking)])
        return
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(TESTS)], capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
    if done.returncode:
        report.say(done.stdout)
    report.check("tests", "tests/gpu", [Found("tests", failed=last)] if done.returncode else [Found(last, 0.0)])


@dataclass
class Contender:
    """A program and its settings for a size, best first. ``turns``: of the first settings that have enough memory."""

    name: str
    take: Callable[[Any], Taken]
    settings: list[tuple[str, int | None, Any]]  # words for the table, estimated bytes, argument of ``take``
    turns: list[Taken] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def turn(self) -> None:
        """Take one, with other settings from now on where memory runs out."""
        while self.settings:
            about, estimated, argument = self.settings[0]
            try:
                self.turns.append(self.take(argument))
            except WorkerMemoryError:
                expected = "" if estimated is None else f", estimated {estimated / 1e9:.1f} GB"
                self.problems.append(f"out of memory with {about}{expected}")
            except WorkerError as error:
                self.problems.append(str(error))
                self.settings = []
                return
            else:
                return
            self.settings, self.turns = self.settings[1:], []

    @property
    def seconds(self) -> float:
        return statistics.median(second for turn in self.turns for second in turn.seconds)


def our_contenders(size: Size, options: argparse.Namespace, memory: float) -> list[Contender]:
    """Contenders: this program with and without --compile, with all settings that fit according to the estimate."""
    fitting = [way for way in fitting_ways(size, options) if way.estimated <= USABLE * memory]

    def take(flags: list[str]) -> Taken:
        return on_ranks(our_steps, flags, options.steps, 3, ranks=options.ranks)  # type: ignore[no-any-return]

    more = CPU_FLAGS if options.backend else []
    return [
        Contender(name, take, [(way.about, way.estimated, [*way.flags, *more, *flags]) for way in fitting])
        for name, flags in {"megatron": [], "megatron --compile": ["--compile"]}.items()
        if name in (options.contenders or [name])
    ]


def fitting_ways(size: Size, options: argparse.Namespace) -> list[Way]:
    precision = ["--bf16"] if options.precision == "bf16" else []
    return ways(size, ranks=options.ranks, samples=options.samples, precision=precision)


def plain_contenders(size: Size, options: argparse.Namespace) -> list[Contender]:
    """Contenders: PlainLlama without and with torch.compile; what fits is found out by trying."""

    def take(settings: PlainSettings) -> Taken:
        arguments = size, settings, options.steps, 3, options.backend, options.precision
        return on_ranks(plain_steps, *arguments, ranks=options.ranks)  # type: ignore[no-any-return]

    tried = [(samples, False) for samples in (4, 2, 1) if options.samples % samples == 0] + [(1, True)]
    split = ", FSDP2" if options.ranks > 1 else ""
    return [
        Contender(
            name,
            take,
            [
                (
                    f"microbatch {microbatch}{split}{', recomputing layers' * recomputes}",
                    None,
                    PlainSettings(options.samples, microbatch, recomputes, compiled),
                )
                for microbatch, recomputes in tried
            ],
        )
        for name, compiled in {"plain PyTorch": False, "plain PyTorch, torch.compile": True}.items()
        if name in (options.contenders or [name])
    ]


CONTENDERS = ("megatron", "megatron --compile", "plain PyTorch", "plain PyTorch, torch.compile")
HEADINGS = ("model", "program", "settings", "ms/step", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "peak GB", "estimate",
            "speed over best plain")  # fmt: skip


def compare_speed(options: argparse.Namespace, report: Report) -> None:
    """Take turns for each size, and print the table of all."""
    device = report.found["device"]
    peak = (device["peak"][options.precision] or {}).get("tflops")
    rows = report.found["speed"] = list[dict[str, Any]]()
    for name in options.sizes:
        size = dataclasses.replace(SIZES[name], sequence=options.sequence or SIZES[name].sequence)
        contenders = our_contenders(size, options, device["memory"]) + plain_contenders(size, options)
        for number in range(options.rounds):
            for each in contenders:
                each.turn()
                outcome = f"{each.seconds * 1e3:.0f} ms" if each.turns else "; ".join(each.problems) or "does not fit"
                report.say(f"   {name}, turn {number + 1}, {each.name}: {outcome}")
        scale = scale_of(size)
        best = min((each.seconds for each in contenders if "plain" in each.name and each.turns), default=None)
        tokens = options.samples * size.sequence
        for each in contenders:
            row: dict[str, Any] = {"model": f"{name} ({scale.parameters / 1e9:.2f} B, {size.sequence} tokens)"}
            row |= {"program": each.name, "problems": each.problems}
            if each.turns:
                about, estimated, _ = each.settings[0]
                tflops = options.samples * scale.flops / each.seconds / 1e12
                row |= {
                    "settings": about,
                    "ms/step": each.seconds * 1e3,
                    "tokens/s/GPU": tokens / each.seconds,
                    "TFLOP/s/GPU": tflops,
                    "MFU": None if peak is None else tflops / peak,
                    "peak GB": max(turn.peak for turn in each.turns) / 1e9,
                    "estimate": None if estimated is None else estimated / 1e9,
                    "speed over best plain": None if best is None else best / each.seconds,
                    "losses": each.turns[-1].losses,
                }
            else:
                row["settings"] = "; ".join(each.problems) or _too_large(size, options, device["memory"])
                if each.problems:
                    report.failures += [f"{name}, {each.name}: {problem}" for problem in _errors(each.problems)]
            rows.append(row)
    report.say(table(rows))
    if peak is None:
        report.say("MFU: no peak on file for this device (megatron/training/reporting/flops.py)")
    else:
        report.say(f"MFU is of {peak:.4g} TFLOP/s ({device['peak'][options.precision]['source']})")


def _errors(problems: Iterable[str]) -> list[str]:
    """The problems other than lack of memory."""
    return [problem for problem in problems if not problem.startswith("out of memory")]


def _too_large(size: Size, options: argparse.Namespace, memory: float) -> str:
    least = min(fitting_ways(size, options), key=lambda way: way.estimated)
    return (
        f"skipped: the estimate is {least.estimated / 1e9:.1f} GB at least ({least.about}), and of {memory / 1e9:.1f} "
        f"GB {USABLE:.0%} are usable: take more or larger GPUs"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|---|---|---|{'--:|' * (len(HEADINGS) - 3)}"]
    formats = {"MFU": ".1%", "peak GB": ".2f", "estimate": ".2f", "TFLOP/s/GPU": ".4g", "speed over best plain": ".2f"}
    for row in rows:
        values = [row.get(name) for name in HEADINGS]
        cells = [
            "" if value is None else value if isinstance(value, str) else format(value, formats.get(name, ".0f"))
            for name, value in zip(HEADINGS, values)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def say_what_is_there(options: argparse.Namespace, report: Report) -> None:
    """The device, its memory, torch and what is installed beside it."""
    report.found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "ranks": options.ranks}
    device = report.found["device"] = on_ranks(described, options.backend)
    packages = {name: importlib.util.find_spec(name) is not None for name in ("flash_attn", "transformer_engine")}
    report.found["packages"] = packages
    installed = ", ".join(name for name, is_there in packages.items() if is_there) or "neither of " + ", ".join(
        packages
    )
    report.say(f"== {options.ranks} x {device['device']}, {device['memory'] / 1e9:.1f} GB each")
    report.say(f"   torch {torch.__version__}, CUDA {torch.version.cuda}; installed: {installed}")


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options, completed for the device. Raises ConfigError without one."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES], metavar="STAGE")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], metavar="SIZE", help="default 1B 3B 8B; on a CPU tiny")
    parser.add_argument("--sequence", type=int, help="tokens of a sample (default 4096)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a step for each rank (default 8)")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--ranks", type=int, help="default: all GPUs; on a CPU 2")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default 3; on a CPU 1)")
    parser.add_argument("--steps", type=int, help="measured steps of a turn (default 10; on a CPU 2)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help="default all")
    parser.add_argument("--checks", nargs="+", choices=[*CHECKS], metavar="NAME", help="of kernels; default all")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], metavar="NAME", help="of training; default all")
    parser.add_argument("--rehearse", action="store_true", help="run each size without a GPU, on a pretended one")
    parser.add_argument("--memory-gb", type=float, default=80.0, help="of the pretended GPU (default 80)")
    parser.add_argument("--json", type=Path, default=Path("gpu_benchmark.json"), help="where results are saved")
    options = results.parse(parser, argv, **QUICK)
    here = gpus()
    if options.device == "gpu" and not here and not options.rehearse:
        raise ConfigError(
            f"torch {torch.__version__} sees no GPU here: run this on a machine with one; --device cpu runs every "
            "stage in small, and --rehearse runs each size without values and counts its memory"
        )
    on_cpu = options.device == "cpu"
    options.backend = "gloo" if on_cpu else None
    options.sizes = options.sizes or (["tiny"] if on_cpu else ["1B", "3B", "8B"])
    options.rounds, options.steps = options.rounds or (1 if on_cpu else 3), options.steps or (2 if on_cpu else 10)
    if options.rehearse:
        options.ranks = options.ranks or 1
    else:
        options.ranks = options.ranks or (2 if on_cpu else here)
    if options.device == "gpu" and not options.rehearse and options.ranks > here:
        raise ConfigError(f"--ranks {options.ranks} is more than the {here} GPUs here: give at most {here}")
    return options


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Our speed over that of the best plain program, of what was timed."""
    name = "speed over best plain"
    ours = [row for row in rows if row["program"].startswith("megatron") and row.get(name) is not None]
    return {f"{row['model']}, {row['program']}": row[name] for row in ours}


def main(argv: Sequence[str]) -> int:
    """Run the stages; 1 when something failed."""
    options, report = parsed(argv), Report()
    if options.rehearse:
        from benchmarks.gpu_rehearsal import rehearse_sizes

        return rehearse_sizes(options.sizes, options.sequence, fitting_ways, options)
    say_what_is_there(options, report)
    stages = dict(zip(STAGES, (check_kernels, check_training, run_tests, compare_speed)))
    for name in options.stages:
        report.say(f"== {name}")
        try:
            stages[name](options, report)
        except Exception as error:  # of the benchmark's own; the other stages still say what they find
            report.failures.append(f"{name}: {type(error).__name__}: {error}")
            report.say(f"   FAILED  {report.failures[-1]}")
        options.json.write_text(json.dumps(report.found | {"failures": report.failures}, indent=1))
    if ratios := ratios_of(report.found.get("speed", ())):
        results.save(options, ratios)
    report.say(f"== {len(report.failures)} failures; saved in {options.json}")
    for failure in report.failures:
        report.say(f"   {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
