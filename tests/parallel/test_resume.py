"""A run that is cut in two, each half in processes of its own, ends as the run that was left alone, bit for bit.

The scripts as users start them are cut in two in tests/end_to_end; here are the cases that are cheap, in ranks that are
forked.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.config.parse import parse_run
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.training.loop import train_from_start_to_end
from megatron.training.run.data import TrainingData
from tests.end_to_end.commands import assert_same_tensors, tensors
from tests.harness import run_ranks
from tests.harness.sentences import check_line, check_refusals, refusal
from tests.tiers import tiers

SAMPLES_AN_EPOCH = 10
LENGTH = 8  # iterations of eight samples: more than six epochs
CUT = 3  # 24 samples: in the middle of the third epoch
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --init-method-std 0.2 --tokenizer-type NullTokenizer --vocab-size 50 "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --split 1,0,0 --save-interval 100"
)


@dataclass(frozen=True)
class Read:
    """A microbatch as a rank read it: number of its first sample, tokens."""

    first_sample: int
    tokens: list[list[int]]


@dataclass(frozen=True)
class Leg:
    """What the processes of a part of a run have shown: of each iteration what was printed, and samples in order."""

    steps: dict[int, str]
    log: str
    reads: list[Read]


def train(context: ParallelContext, flags: str) -> tuple[str, list[Read]]:
    """Run a command's flags on this rank; what it printed and read."""
    config = parse_run(flags.split(), world_size=context.mesh.world_size, extra_groups=GPT_GROUPS)
    reads: list[Read] = []
    make = TrainingData.microbatch

    def noted(data: TrainingData, batch: Any, key: Any) -> Any:
        reads.append(Read(key.sample, batch["tokens"].tolist()))
        return make(data, batch, key)

    with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.object(TrainingData, "microbatch", noted):
        train_from_start_to_end(config, GPTSpec(), context, started=time.monotonic())
    return said.getvalue(), reads


class Runs:
    """Runs on data of a few samples an epoch; those that load a checkpoint are in other processes, as after a restart.

    What these processes may have kept is of other runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generator = np.random.default_rng(5)
        with IndexedDatasetWriter(str(folder / "data"), np.uint16) as writer:
            writer.add_document(generator.integers(0, 49, SAMPLES_AN_EPOCH * 16 + 1))

    def run(self, flags: str, *, save: str = "", load: str = "", world: dict[str, Any] | None = None) -> Leg:
        """Train with ``flags``, saving into and loading from folders of these names."""
        words, pool = self.words(flags, save=save, load=load), "after a restart" if load else ""
        results = run_ranks(train, words, pool=pool, **(world or {}))
        log = "".join(text for text, _ in results)
        reads = {read.first_sample: read for _, each in results for read in each}
        steps = {
            int(number): line
            for number, line in re.findall(r"iteration +(\d+)/.*?(learning rate: .*?)(?: time left: .*)?\n", log)
        }
        return Leg(steps, log, [reads[first] for first in sorted(reads)])

    def words(self, flags: str, *, save: str = "", load: str = "") -> str:
        """The command line of ``run``."""
        words = f"{TINY} --data-path {self.folder / 'data'} {flags}"
        words += f" --save {self.folder / save}" if save else ""
        words += f" --load {self.folder / load}" if load else ""
        return words + ("" if "--train-" in flags else f" --train-iters {LENGTH}")

    def last(self, name: str) -> Path:
        """The checkpoint that a run has left."""
        return Path(str(find_checkpoint(self.folder / name).path))

    def state(self, name: str) -> dict[str, Any]:
        """What its checkpoint holds beside tensors and settings."""
        state: dict[str, Any] = json.loads((self.last(name) / "run.json").read_text())["state"]
        return {key: value for key, value in state.items() if key != "config"}

    def assert_same_end(self, first: str, second: str) -> None:
        """Two runs have ended with the same numbers, to the last bit."""
        assert_same_tensors(self.last(first), self.last(second))
        assert self.state(first) == self.state(second)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


RECIPES = ("tensorwise", "delayed", "blockwise --fp8-format e4m3")
DELAYED = "--bf16 --fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max"

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "epochs, dropout, accumulation": ({}, ""),
    "a random order within epochs": ({}, "--dataloader-type cyclic"),
    "Megatron's order": ({}, "--data-order megatron"),
    "packed documents": ({}, "--packing padding-free"),
    "ZeRO, tensor and data parallel": (
        {"tp": 2, "dp": 2},
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --ema-decay 0.9",
    ),
    "fp16, a loss scale that moves": (
        {"dtype": torch.float16},
        "--fp16 --initial-loss-scale 262144 --loss-scale-window 3 --hysteresis 2",
    ),
    "fp16, ZeRO": (
        {"dtype": torch.float16, "dp": 2},
        "--fp16 --initial-loss-scale 262144 --loss-scale-window 3 --use-distributed-optimizer --ema-decay 0.9",
    ),
    "ramp-up of the batch, warm-up, cosine, rising weight decay": (
        {"dp": 2},
        "--train-samples 60 --rampup-batch-size 4 4 30 --lr-decay-style cosine --lr-warmup-samples 10 "
        "--start-weight-decay 0.01 --end-weight-decay 0.2 --weight-decay-incr-style cosine",
    ),
    "another batch size from where it is cut": (
        {"dp": 2},
        "--train-samples 60 --step-batch-size-schedule 0:4,192:8 --lr-warmup-samples 14 --lr-decay-style cosine",
    ),
    "a step of the batch size cut in two, two more after it": (
        {"dp": 2},
        "--train-samples 80 --step-batch-size-schedule 0:4,64:12,640:16,960:8 --dataloader-type cyclic",
    ),
    "weights gathered in FP8": (
        {"dtype": torch.bfloat16, "dp": 2},
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --use-distributed-optimizer --fp8-param-gather",
    ),
    "weights gathered in FP8 by scales of iterations before, precision-aware": (
        {"dtype": torch.bfloat16, "tp": 2, "dp": 2},
        "--bf16 --fp8-format hybrid --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
        "--fp8-param-gather --overlap-grad-reduce --overlap-param-gather --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16",
    ),
    "weights gathered in FP8 by unit, two copies, state over both, precision-aware": (
        {"dtype": torch.bfloat16, "dp": 4, "copies": 2},
        "--bf16 --fp8-format hybrid --use-megatron-fsdp --num-distributed-optimizer-instances 2 --fp8-param-gather "
        "--outer-dp-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather "
        "--use-precision-aware-optimizer",
    ),
    "WSD, linear weight decay": (
        {},
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --start-weight-decay 0 --end-weight-decay 0.2 "
        "--weight-decay-incr-style linear",
    ),
    "pipeline, bf16, SGD": (
        {"dtype": torch.bfloat16, "pp": 2},
        "--bf16 --pipeline-model-parallel-size 2 --optimizer sgd",
    ),
    "FP8 with scales of iterations before, pipeline": (
        {"dtype": torch.bfloat16, "tp": 2, "pp": 2},
        f"{DELAYED} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    "state-space layers with fp32 parameters and a shared group, bf16, ZeRO": (
        {"dtype": torch.bfloat16, "tp": 2, "dp": 2},
        "--bf16 --hybrid-layer-pattern M* --mamba-num-groups 1 --mamba-head-dim 4 --mamba-state-dim 4 "
        "--position-embedding-type none --tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "Muon, bf16, ZeRO, offloaded in part": (
        {"dtype": torch.bfloat16, "tp": 2, "dp": 2},
        "--bf16 --optimizer muon --muon-nesterov --tensor-model-parallel-size 2 --use-distributed-optimizer "
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.6",
    ),
    "a whole stage and a tied copy frozen, bf16, ZeRO": (
        {"dtype": torch.bfloat16, "pp": 2, "dp": 2},
        "--bf16 --pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --freeze embedding.* decoder.layers.0.* --log-params-norm",
    ),
}


SLOW = (
    "fp16, a loss scale that moves",  # in tests/end_to_end/test_resume.py
    "pipeline, bf16, SGD",  # there with a zero-bubble schedule
    "ramp-up of the batch, warm-up, cosine, rising weight decay",  # there, too
    "a step of the batch size cut in two, two more after it",  # the case before it is like it
    "ZeRO, tensor and data parallel",  # there with overlap
    "weights gathered in FP8",  # as is the case after it
    "FP8 with scales of iterations before, pipeline",  # and that one, whose scales are saved as these are
)


@pytest.mark.parametrize("name", tiers(CASES, first=[name for name in CASES if name not in SLOW]))
def test_two_halves_are_the_whole(name: str, runs: Runs) -> None:
    """A job that its scheduler ends would otherwise become another run."""
    world, flags = CASES[name]
    whole = runs.run(f"{flags} --save-interval {CUT}", save="whole", world=world)
    rest = runs.run(f"{flags} --ckpt-step {CUT}", save="rest", load="whole", world=world)
    assert rest.steps == {number: line for number, line in whole.steps.items() if number > CUT}
    assert rest.reads == whole.reads[-len(rest.reads) :]
    runs.assert_same_end("whole", "rest")


@pytest.mark.slow  # the equivalence table has them, and a resume above
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recipe", tiers(RECIPES, first=["delayed"]))
def test_weights_gathered_in_fp8_change_no_bit(recipe: str, stage: int, runs: Runs) -> None:
    """--fp8-param-gather can be turned on and off at any checkpoint. Norms, samples and checkpoints in between read the
    weights as they are.
    """
    world = {"dtype": torch.bfloat16, "dp": 2}
    flags = (
        f"--bf16 --fp8-format hybrid --fp8-recipe {recipe} --zero-stage {stage} --clip-grad 0 --log-params-norm "
        "--save-interval 2 --generate-samples-interval 2 --generate-samples-prompts 1 --generate-samples-tokens 4"
    )
    on = f"{flags} --fp8-param-gather"
    whole = runs.run(flags, save="whole", world=world)
    gathered = runs.run(on, save="gathered", world=world)
    assert gathered.steps == whole.steps and "sample" in gathered.log
    runs.assert_same_end("whole", "gathered")
    for first, then, name in ((flags, on, "on"), (on, flags, "off")):
        runs.run(f"{first} --exit-interval {CUT}", save=name, world=world)
        runs.run(then, save=name, load=name, world=world)
        runs.assert_same_end("whole", name)


@pytest.mark.slow  # the equivalence table has both, to 1e-9
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_gathered_in_fp8_are_those_of_any_stage(stage: int, runs: Runs) -> None:
    """Codes of a unit that are of other weights, or of other scales, would be another run from the first steps on."""
    world, flags = {"dtype": torch.bfloat16, "dp": 2}, "--bf16 --fp8-format hybrid --fp8-param-gather"
    once = f"{flags} --micro-batch-size 4 --log-params-norm"  # sums of several microbatches round otherwise
    expected = runs.run(f"{once} --zero-stage 1", world=world).steps
    assert runs.run(f"{once} --zero-stage {stage}", world=world).steps == expected


COPIES = "--num-distributed-optimizer-instances 2"
GROUPS_OF_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "two copies, ZeRO 1": ({"dp": 4, "copies": 2}, f"--use-distributed-optimizer {COPIES}"),
    "two copies, ZeRO 3, state over both": (
        {"dp": 4, "copies": 2},
        f"--use-megatron-fsdp {COPIES} --outer-dp-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather",
    ),
    "one copy, ZeRO 2": ({"dp": 4}, "--data-parallel-sharding-strategy optim_grads"),
    "no ZeRO": ({"dp": 2}, ""),
}


@pytest.mark.parametrize("name", tiers(GROUPS_OF_RANKS, first=["two copies, ZeRO 3, state over both"]))
def test_copies_are_saved_once_and_load_anywhere(name: str, runs: Runs) -> None:
    """A checkpoint of two copies would have half of the numbers, or each twice, or go on as another run."""
    world, flags = GROUPS_OF_RANKS["two copies, ZeRO 1"]
    same, fp64 = "--attention-dropout 0 --hidden-dropout 0 --ema-decay 0.9", {"dtype": torch.float64}
    runs.run(f"{flags} {same} --exit-interval {CUT}", save="two", world=fp64 | world)
    runs.run(f"--use-distributed-optimizer {same} --exit-interval {CUT}", save="one", world=fp64 | {"dp": 2})
    sizes = [sum(path.stat().st_size for path in runs.last(each).glob("*.distcp")) for each in ("two", "one")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    other, into = GROUPS_OF_RANKS[name]
    runs.run(f"{into} {same}", save="on", load="two", world=fp64 | other)
    runs.run(f"--use-distributed-optimizer {same}", save="straight", load="one", world=fp64 | {"dp": 2})
    found, expected = tensors(runs.last("on")), tensors(runs.last("straight"))
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        torch.testing.assert_close(found[each], value, rtol=0.0, atol=1e-9)


def test_scales_of_fp8_are_those_of_any_layout(runs: Runs) -> None:
    """Scales of a rank's own part of a tensor would be wrong at another layout, and new ones a jump in the loss."""
    world, flags = CASES["FP8 with scales of iterations before, pipeline"]
    bf16 = {"dtype": torch.bfloat16}
    more = f"--attention-dropout 0 --hidden-dropout 0 --exit-interval {CUT}"
    runs.run(f"{DELAYED} {more}", save="one", world=bf16)
    runs.run(f"{flags} {more}", save="four", world=world)
    one, four = (
        {name: value for name, value in tensors(runs.last(name)).items() if name.startswith("fp8.")}
        for name in ("one", "four")
    )
    assert len(one) == 2 * 4 * 3 * 2 and one.keys() == four.keys()
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=0.3, atol=0.0)
        assert "scale" not in name or value.item() != 1.0
    assert "lacks scales" not in runs.run(DELAYED, save="on", load="four", world=bf16).log
    shorter = DELAYED.replace("len 3", "len 2")
    assert "lacks scales" in runs.run(shorter, save="shorter", load="four", world=bf16).log


@pytest.mark.parametrize("rule", tiers(("muon", "adafactor", "soap", "ademamix"), first=["muon"]))
def test_state_of_matrices_continues_at_any_layout(rule: str, runs: Runs) -> None:
    """Who owns a matrix depends on the layout, and what a checkpoint keeps of it must not."""
    common = (
        f"--optimizer {rule} --swiglu --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-6 --micro-batch-size 2"
    )
    ranks = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    wide: dict[str, Any] = {"dtype": torch.float64}
    one, four = (wide, ""), (wide | {"tp": 2, "dp": 2, "sequence_parallel": True}, ranks)
    whole = runs.run(common, save="whole", world=wide)
    for name, (first, then) in {"up": (one, four), "down": (four, one)}.items():
        runs.run(f"{common} {first[1]} --exit-interval {CUT}", save=name, world=first[0])
        last = runs.run(f"{common} {then[1]}", save=name, load=name, world=then[0])
        assert last.steps.keys() == set(whole.steps) - {1, 2, 3}
        found, expected = tensors(runs.last(name)), tensors(runs.last("whole"))
        assert found.keys() == expected.keys()
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, rtol=1e-9, atol=1e-9, msg=each)


def test_another_optimizer_does_not_continue_the_state(runs: Runs) -> None:
    """Muon would take AdamW's moments of the embeddings and begin its own average anew, without a word."""
    runs.run(f"--exit-interval {CUT}", save="adam")
    said = run_ranks(refusal, train, runs.words("--optimizer muon", load="adam"))
    check_refusals(said, "CheckpointError", "--optimizer adam", "--optimizer muon")
    assert "iteration" in runs.run("--optimizer muon --no-load-optim", load="adam").log


def test_the_checkpoints_schedule(runs: Runs) -> None:
    """--use-checkpoint-opt_param-scheduler: rate and weight decay of the flags are as if they weren't there."""
    shape = "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.2"
    whole = runs.run(shape, save="whole")
    runs.run(f"{shape} --exit-interval {CUT}", save="halves")
    flags = "--lr 3e-3 --lr-decay-style linear --weight-decay 0.01 --use-checkpoint-opt_param-scheduler"
    second = runs.run(flags, save="halves", load="halves")
    assert second.steps == {number: whole.steps[number] for number in range(CUT + 1, LENGTH + 1)}
    runs.assert_same_end("whole", "halves")


def test_decays_forked_from_one_checkpoint(runs: Runs) -> None:
    """Of one long run at a constant rate models of several lengths are made, each by a decay from a checkpoint; the
    command of docs/training.md. The rate falls over the iterations of the fork, and not over those of the whole run.
    """
    runs.run("--lr-decay-style constant --exit-interval 4", save="stable")
    for length in (2, 4):
        decay = f"--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters {length}"
        flags = f"{decay} --train-iters {4 + length} --override-opt_param-scheduler --ckpt-step 4"
        fork = runs.run(flags, save=f"fork-{length}", load="stable")
        assert list(fork.steps) == list(range(5, 5 + length))
        for number, line in fork.steps.items():  # the next step's, as it is printed
            assert f"learning rate: {1e-2 * (1 - (number - 4) / length):.6E}" in line
    assert runs.state("stable")["progress"]["iteration"] == 4


def test_an_average_begins_where_it_is_asked_for(runs: Runs) -> None:
    """--ema-decay on a run that had no average took zeros for one, and its first averages were half of the weights."""
    runs.run(f"--exit-interval {CUT}", save="plain")
    said = runs.run(f"--ema-decay 0.5 --exit-interval {CUT + 1}", save="averaged", load="plain").log
    check_line(said, "moving average")
    found, name = tensors(runs.last("averaged")), "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(found[f"optimizer.ema.{name}"], found[f"model.{name}"])
    check_line(runs.run(f"--exit-interval {CUT + 2}", save="without", load="averaged").log, "--ema-decay")


def test_the_flags_schedule(runs: Runs) -> None:
    """--override-opt_param-scheduler: rate and weight decay of the flags from there on, as the flags alone then say."""
    runs.run(f"--lr-decay-style cosine --exit-interval {CUT}", save="first")
    flags = "--lr 2e-3 --lr-decay-style linear --weight-decay 0.5"
    override = f"{flags} --override-opt_param-scheduler"
    without = runs.run(f"{override} --weight-decay 0 --exit-interval {CUT + 1}", save="no-decay", load="first")
    decayed = runs.run(f"{override} --exit-interval {CUT + 1}", save="changed", load="first")
    rate = 2e-3 * (1 - CUT / LENGTH)
    assert without.steps == decayed.steps
    assert f"learning rate: {2e-3 * (1 - (CUT + 1) / LENGTH):.6E}" in decayed.log  # the next step's, as it is printed
    before, kept, smaller = (tensors(runs.last(name)) for name in ("first", "no-decay", "changed"))
    name = "model.decoder.layers.0.mlp.linear_fc1.weight"
    torch.testing.assert_close(kept[name] - smaller[name], rate * 0.5 * before[name], rtol=1e-3, atol=1e-7)

    runs.run(override, save="at-once", load="first")
    runs.run(flags, save="changed", load="changed")
    runs.assert_same_end("at-once", "changed")


@pytest.mark.slow  # tests/end_to_end/test_resume.py has it with fewer checkpoints
def test_finetuning_begins_anew(runs: Runs) -> None:
    """--finetune: weights alone; samples, schedule and moments are those of a new run, whatever the checkpoint says."""
    runs.run(f"--lr-decay-style cosine --exit-interval {CUT}", save="first")
    runs.run(f"--lr-decay-style cosine --exit-interval {CUT} --no-save-optim --no-save-rng", save="weights")
    flags = "--lr 2e-3 --lr-decay-style linear --weight-decay 0.5 --finetune --train-iters 4"
    tuned = runs.run(flags, save="tuned", load="first")
    assert runs.run(flags, save="from-weights", load="weights").steps == tuned.steps
    runs.assert_same_end("tuned", "from-weights")
    assert list(tuned.steps) == [1, 2, 3, 4]
    assert [read.first_sample for read in tuned.reads] == list(range(0, 32, 2))
    assert f"learning rate: {2e-3 * (1 - 1 / 4):.6E}" in tuned.steps[1]
    assert runs.state("tuned")["progress"] == {"iteration": 4, "consumed_samples": 32, "scheduled_samples": 32}
    runs.run(f"{flags} --exit-interval 2", save="cut", load="first")
    runs.run(flags.replace("--finetune", ""), save="cut", load="cut")
    runs.assert_same_end("tuned", "cut")


@pytest.mark.slow  # test_layout_pairs.py and tests/end_to_end/test_resume.py change it, too
def test_data_parallel_size_may_change(runs: Runs) -> None:
    """A cluster grows and shrinks: the same samples in the same order, dropout too, so the same run but for rounding.

    Computed in fp64, where another sample or another mask couldn't hide.
    """
    double = {"dtype": torch.float64}
    whole = runs.run("", save="whole", world=double)
    legs = [
        runs.run("--exit-interval 2", save="elastic", world=double | {"dp": 4}),
        runs.run(
            "--exit-interval 5 --use-distributed-optimizer", save="elastic", load="elastic", world=double | {"dp": 2}
        ),
        runs.run("", save="elastic", load="elastic", world=double | {"dp": 4}),
    ]
    assert [number for leg in legs for number in leg.steps] == list(range(1, LENGTH + 1))
    samples = [sample for leg in legs for read in leg.reads for sample in read.tokens]
    assert samples == [sample for read in whole.reads for sample in read.tokens]
    expected, found = tensors(runs.last("whole")), tensors(runs.last("elastic"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_what_waits_in_main_memory_continues_at_any_layout(runs: Runs) -> None:
    """A run that outgrows its ranks' memory is moved to more of them, and to another layout: no moment may be lost."""
    double, quiet = {"dtype": torch.float64}, "--attention-dropout 0 --hidden-dropout 0"
    away = f"{quiet} --optimizer-cpu-offload --cpu-offloading --min-offloaded-tensor-size 1"
    runs.run(quiet, save="whole", world=double)
    first = f"{away} --tensor-model-parallel-size 2 --exit-interval {CUT}"
    runs.run(first, save="moved", world=double | {"tp": 2})
    second = f"{away} --pipeline-model-parallel-size 2 --use-distributed-optimizer --optimizer-offload-fraction 0.5"
    runs.run(second, save="moved", load="moved", world=double | {"pp": 2, "dp": 2})
    expected, found = tensors(runs.last("whole")), tensors(runs.last("moved"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
