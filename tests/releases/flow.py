"""The flow that a promised pair of versions runs: text to trained, resharded, converted, evaluated and sampled models.

Losses of all layouts are compared with those of one rank: a release of torch whose kernels read beyond their tensors
ended no command, and trained another model.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --attention-dropout 0 --hidden-dropout 0 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
TRAINING = (
    f"--train-data-path data/train_text_document --valid-data-path data/heldout_text_document {TOKENIZER} "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 3e-3 --log-interval 5 --eval-iters 1 "
    "--eval-interval 20 --distributed-backend gloo"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2"
VARIANTS = {
    "plain": "",
    "window": "--window-size 32 0",
    "experts": EXPERTS,
    "fp8": "--bf16 --fp8-format hybrid",
}
"""Flags beside those of the model; each variant trains on one rank and at layouts of two."""
LAYOUTS = {
    "plain": {
        "data": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
        "pipeline": "--pipeline-model-parallel-size 2",
        "context": "--context-parallel-size 2",
    },
    "window": {"context": "--context-parallel-size 2"},
    "experts": {"expert": "--expert-model-parallel-size 2"},
    "fp8": {"tensor": "--tensor-model-parallel-size 2 --sequence-parallel"},
}
TOLERANCES = {"fp8": 2e-2}
"""Relative difference between the losses of a layout and of one rank; 1e-4 where a variant is not named."""
REHEARSAL_SINCE = (2, 11)
LOSS = re.compile(r"lm loss: (\S+)")


class StepError(Exception):
    """A step that ended with an error or said something wrong."""


@dataclass(frozen=True)
class Environment:
    """Programs of an environment, the folder for what the flow makes, and the release of torch that must be there."""

    programs: Path
    folder: Path
    torch: str

    def run(self, name: str, words: str | Sequence[str], *, ranks: int = 0) -> str:
        """What ``megatron WORDS`` prints, under torchrun if there are ``ranks``; kept as NAME.log. Raises StepError."""
        words = words.split() if isinstance(words, str) else words
        command = [str(self.programs / "megatron"), *words]
        if ranks:
            launcher = [str(self.programs / "torchrun"), "--standalone", f"--nproc_per_node={ranks}", "-m", "megatron"]
            command = [*launcher, *words]
        return self.execute(name, command)

    def execute(self, name: str, command: Sequence[str]) -> str:
        """What a command prints, in the flow's folder, kept as NAME.log. Raises StepError with its last lines."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        log = self.folder / f"{name.replace(' ', '_')}.log"
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            raise StepError(f"{name}: took more than 300 s") from None
        output = done.stdout + done.stderr
        log.write_text(f"$ {' '.join(command)}\n{output}", encoding="utf-8")
        if done.returncode:
            raise StepError(f"{name}: exit code {done.returncode}, see {log}\n" + "\n".join(output.splitlines()[-8:]))
        return output


def run_flow(environment: Environment) -> str:
    """Run every step in a new folder; how many commands ran, and how long. Raises StepError at the first failure."""
    began, steps = time.monotonic(), itertools.count(1)
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.mkdir(parents=True)
    found = environment.execute(
        "torch", [str(environment.programs / "python"), "-c", "import torch; print(torch.__version__)"]
    )
    if not found.strip().startswith(environment.torch):
        raise StepError(f"torch {found.strip()} is installed, not {environment.torch}")
    for step in (prepare_data, train_layouts, resume, convert, rehearse):
        print(f"   {next(steps)}. {step.__name__.replace('_', ' ')}", flush=True)
        step(environment)
    return f"{len(list(environment.folder.glob('*.log')))} commands in {(time.monotonic() - began) / 60:.1f} min"


def prepare_data(environment: Environment) -> None:
    """Corpus, tokenizer, token files, and sentences, whose rules are learned with nltk."""
    environment.run("corpus", "make-stdlib-corpus --output-dir corpus --heldout-percent 20")
    environment.run("tokenizer", "train-tokenizer --input corpus/train.jsonl --vocab-size 1024 --output-dir tokenizer")
    for part in ("train", "heldout"):
        words = f"preprocess-data --input corpus/{part}.jsonl --output-prefix data/{part} {TOKENIZER} --append-eod"
        environment.run(f"data {part}", f"{words} --workers 2")
    words = "--kind wordpiece --vocab-size 1024 --output-dir pieces"
    environment.run("pieces", f"train-tokenizer --input corpus/heldout.jsonl {words}")
    words = "--tokenizer-type BertWordPieceLowerCase --vocab-file pieces/vocab.txt --split-sentences"
    environment.run("sentences", f"preprocess-data --input corpus/heldout.jsonl --output-prefix data/bert {words}")


def train_layouts(environment: Environment) -> None:
    """Each variant on one rank and at its layouts, whose losses must be those of one rank."""
    for variant, flags in VARIANTS.items():
        given = f"pretrain-gpt {MODEL} {TRAINING} {flags}"
        alone = losses(environment.run(f"{variant} one rank", f"{given} --save runs/{variant}"))
        for layout, more in LAYOUTS[variant].items():
            name = f"{variant} {layout}"
            divided = losses(environment.run(name, f"{given} {more} --save runs/{variant}-{layout}", ranks=2))
            agree(name, divided, alone, TOLERANCES.get(variant, 1e-4))
        if not alone[-1] < alone[0] - 0.3:
            raise StepError(f"{variant}: the loss did not fall: {alone}")


def losses(output: str) -> list[float]:
    """Losses of the training log."""
    return [float(value) for value in LOSS.findall(output)]


def agree(name: str, divided: Sequence[float], alone: Sequence[float], tolerance: float) -> None:
    """Raise StepError where two curves differ in length or by more than ``tolerance``, relative."""
    if len(divided) != len(alone) or any(abs(a - b) > tolerance * b for a, b in zip(divided, alone)):
        raise StepError(f"{name}: losses {divided}, on one rank {alone}")


def resume(environment: Environment) -> None:
    """Ten steps, and ten more at another layout from the checkpoint: the losses of twenty."""
    given = f"pretrain-gpt {MODEL} {TRAINING} --save runs/resumed"
    environment.run("resumed first half", f"{given} --exit-interval 10 --tensor-model-parallel-size 2", ranks=2)
    rest = environment.run(
        "resumed second half", f"{given} --load runs/resumed --pipeline-model-parallel-size 2", ranks=2
    )
    whole = losses((environment.folder / "plain_one_rank.log").read_text(encoding="utf-8"))
    agree("resumed", losses(rest), whole[2:], 1e-4)


def convert(environment: Environment) -> None:
    """To Hugging Face's format and back with the proof, the same evaluation of both, and text."""
    for variant in ("plain", "experts"):
        there = f"convert-checkpoint --from megatron --load runs/{variant} --to hf --save hf/{variant}"
        proofs = [environment.run(f"{variant} to hf", there)]
        back = f"convert-checkpoint --from hf --load hf/{variant} --to megatron --save back/{variant}"
        proofs.append(environment.run(f"{variant} from hf", back))
        if not all("proof" in said for said in proofs):
            raise StepError(f"{variant}: converted without a proof")
        scores = {
            folder: perplexity(
                environment.run(
                    f"{folder} {variant} scored",
                    f"evaluate --task LM --load {folder}/{variant} --valid-data corpus/heldout.jsonl",
                )
            )
            for folder in ("runs", "back")
        }
        if abs(scores["runs"] - scores["back"]) > 1e-3 * scores["runs"]:
            raise StepError(f"{variant}: perplexities {scores}")
        words = ["generate-text", "--load", f"back/{variant}", "--tokens-to-generate", "20", "--prompt", "Return a new"]
        environment.run(f"{variant} text", words)


def perplexity(output: str) -> float:
    """Perplexity that an evaluation prints."""
    if found := re.search(r"ppl: (\S+)", output):
        return float(found[1])
    raise StepError(f"an evaluation printed no perplexity:\n{output}")


def rehearse(environment: Environment) -> None:
    """Eight ranks without values, where this torch has devices in Python; elsewhere the sentence that says so."""
    words = (
        f"rehearse --world-size 8 {MODEL} {TRAINING} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    if tuple(int(part) for part in environment.torch.split(".")[:2]) >= REHEARSAL_SINCE:
        environment.run("rehearsal", words)
        return
    try:
        environment.run("rehearsal", words)
    except StepError as refused:
        if "torch 2.11" not in str(refused):
            raise
