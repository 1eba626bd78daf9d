"""Runs with a teacher: what they learn, save and resume, and teachers that can't teach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.config.distillation import DistillationConfig, HiddenPair
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.datasets.samples import Sample
from megatron.core.datasets.teacher_scores import (
    PLACES,
    SEEN,
    NumberedSamples,
    ScoreArrays,
    ScoredSamples,
    ScoresHeader,
    ScoreWriter,
    make_files,
)
from megatron.core.models.gpt.data import SampleLayout
from megatron.core.objectives.taught import LOSS
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.planning.estimate import memory_estimate
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run
from megatron.training.step import train_step
from megatron.training.teacher_scoring import score
from tests.harness.runs import GPT, TINY_RUN, tiny_config, tiny_run
from tests.harness.sentences import expect_error
from tests.harness.teachers import random_model, write_teacher

LLAMA = "--swiglu --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm"
PLAIN = "--mock-data --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0"


def teacher_at(place: Path, flags: str = "--num-layers 3 --hidden-size 24") -> Path:
    """A teacher with the tiny run's vocabulary."""
    return write_teacher(place, f"{TINY_RUN} {PLAIN} {LLAMA} --disable-bias-linear {flags}")


def ready(flags: str) -> Run:
    """A run that has loaded what it starts from."""
    run = tiny_run(ParallelContext.single(), f"{PLAIN} {LLAMA} --disable-bias-linear {flags}")
    load(run)
    return run


def steps(run: Run, count: int) -> list[StepRecord]:
    """Records of the run's next steps."""
    batches = run.data.training_batches(run.progress.consumed_samples)
    return [train_step(run, next(batches)) for _ in range(count)]


def test_a_student_equal_to_its_teacher_stays_as_it_is(tmp_path: Path) -> None:
    """A divergence of its own from itself would move a model that has nothing to learn. The cross entropy is reported
    all the same, and after a step of its own the student has something to learn.
    """
    place = teacher_at(tmp_path / "teacher", "")
    run = ready(f"--teacher-load {place} --pretrained-checkpoint {place} --weight-decay 0")
    before = {name: each.clone() for name, each in run.models[0].named_parameters()}
    (record,) = steps(run, 1)
    assert record.losses[LOSS] == 0.0 and record.grad_norm == 0.0 and record.losses["lm loss"] > 1
    assert all(torch.equal(each, before[name]) for name, each in run.models[0].named_parameters())
    moved = ready(f"--teacher-load {place} --pretrained-checkpoint {place} --distill-share 0.5")
    assert [record.losses[LOSS] > 0 for record in steps(moved, 2)] == [False, True]


def test_a_run_that_is_resumed_learns_the_same(tmp_path: Path) -> None:
    """Bit for bit; and its checkpoints are the student's alone, which a run without a teacher goes on from."""
    place, save = teacher_at(tmp_path / "teacher"), tmp_path / "saved"
    flags = f"--teacher-load {place} --distill-share 0.7 --distill-temperature 2 --seed 3"
    whole, first = ready(flags), ready(f"{flags} --save {save}")
    expected = steps(whole, 3)
    steps(first, 2)
    Saver(first).save()
    stored = StoredTensors(find_checkpoint(save).path)
    assert {name.removeprefix("model.") for name in stored.entries if name.startswith("model.")} == set(
        dict(whole.models[0].named_parameters())
    )
    resumed = ready(f"{flags} --load {save}")
    assert steps(resumed, 1)[0].losses == expected[2].losses
    weights = dict(whole.models[0].named_parameters())
    assert all(torch.equal(each, weights[name]) for name, each in resumed.models[0].named_parameters())
    assert "lm loss" in steps(ready(f"--load {save} --seed 3"), 1)[0].losses


PAIRS = "--distill-hidden-states 0:1 1:2:mse final:final"
NAMES = ("hidden states 0-1 cosine", "hidden states 1-2 mse", "hidden states final-final cosine")


def test_hidden_states_are_learned_and_resumed(tmp_path: Path) -> None:
    """Each distance falls; with their matrices a resumed run goes on bit for bit, and no other command sees these."""
    place, save = teacher_at(tmp_path / "teacher"), tmp_path / "saved"
    flags = f"--teacher-load {place} {PAIRS} --distill-share 0.2 --distill-hidden-scale 3 --seed 3"
    whole, first = ready(flags), ready(f"{flags} --save {save}")
    expected = steps(whole, 3)
    assert all(expected[0].losses[name] > expected[-1].losses[name] > 0 for name in NAMES)
    steps(first, 2)
    Saver(first).save()
    stored = StoredTensors(find_checkpoint(save).path).entries
    own = {name for name in dict(whole.models[0].named_parameters()) if name.startswith("objective_")}
    assert len(own) == 3 and own < {*stored} and not any(name.startswith("model.objective") for name in stored)
    resumed = ready(f"{flags} --load {save}")
    assert steps(resumed, 1)[0].losses == expected[2].losses
    assert resumed.models[0].objective_projection_0_1.shape == (24, 16)
    assert not any(name.startswith("objective_") for name in read_native(save).tensors)
    assert "lm loss" in steps(ready(f"--load {save} --seed 3"), 1)[0].losses
    assert steps(ready(f"{flags} --load {save} --finetune"), 1)[0].losses[NAMES[0]] > 0


def test_hidden_states_of_a_student_equal_to_its_teacher(tmp_path: Path) -> None:
    """Of equal widths nothing is projected, and equal hidden states have nothing to learn."""
    place = teacher_at(tmp_path / "teacher", "")
    flags = "--distill-hidden-states 0:0:mse 1:1:mse final:final:mse --weight-decay 0"
    run = ready(f"--teacher-load {place} --pretrained-checkpoint {place} {flags}")
    (record,) = steps(run, 1)
    assert [record.losses[f"hidden states {each} mse"] for each in ("0-0", "1-1", "final-final")] == [0.0] * 3
    assert record.grad_norm == 0.0 and not any("objective" in name for name, _ in run.models[0].named_parameters())


def test_hidden_states_that_cannot_be_compared(tmp_path: Path) -> None:
    """Layers that there are not, that lie on two ranks, or beside adapters."""
    place = teacher_at(tmp_path / "teacher")
    with expect_error(ConfigError, "--distill-hidden-states", "layer 3", "0 to 2"):
        ready(f"--teacher-load {place} --distill-hidden-states 0:3")
    run = ready(f"--teacher-load {place} --distill-hidden-states 0:2")
    divided = tiny_config(f"{PLAIN} {LLAMA} --pipeline-model-parallel-size 2", ranks=2).with_vocab_size(51)
    with expect_error(ConfigError, "layer 0", "stage 0", "layer 2", "stage 1", "0 to 1"):
        run.train_spec.check_beside(divided, run.tokenizer)
    with expect_error(ConfigError, "16", "24", "--lora-rank"):
        ready(f"--teacher-load {place} {PAIRS} --lora-rank 2 --pretrained-checkpoint {place}")


def test_a_teacher_in_hugging_faces_format_teaches_the_same(tmp_path: Path) -> None:
    """The same weights from a folder of another program."""
    flags = f"{PLAIN} {LLAMA} --disable-bias-linear --num-layers 3 --make-vocab-size-divisible-by 1"
    native = teacher_at(tmp_path / "native", "--num-layers 3 --make-vocab-size-divisible-by 1")
    write_huggingface(random_model(tiny_config(flags)), tmp_path / "published", max_shard_size=10**9)
    found = [steps(ready(f"--teacher-load {each}"), 1)[0] for each in (native, tmp_path / "published")]
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-6)


def test_memory_of_a_teacher_is_estimated(tmp_path: Path) -> None:
    """Its weights without gradients or optimizer state, however it is saved."""
    place = teacher_at(tmp_path / "teacher")
    run = ready(f"--teacher-load {place}")
    estimate = memory_estimate(run.config, run.train_spec)
    alone = memory_estimate(run.config, run.train_spec.family)  # type: ignore[attr-defined]
    teacher = run.train_spec.beside(run.models[0])
    assert teacher is not None and not any(each.requires_grad for each in teacher.parameters())
    assert estimate.weights - alone.weights == 4 * sum(each.numel() for each in teacher.parameters())
    assert (estimate.gradients, estimate.moments, estimate.kept) == (alone.gradients, alone.moments, alone.kept)


def test_teachers_that_cannot_teach(tmp_path: Path) -> None:
    """One sentence before any work: no teacher, one of other words, or of a shape that the layout can't divide."""
    place = teacher_at(tmp_path / "teacher")
    other = teacher_at(tmp_path / "other", "--vocab-size 60")
    for flags, facts in {
        f"--teacher-load {tmp_path / 'none'}": ("--teacher-load", "none"),
        f"--teacher-load {other}": ("other", "61", "51"),
        f"--teacher-load {place} --teacher-step 7": ("--teacher-load", "7"),
    }.items():
        with expect_error(CheckpointError, *facts):
            ready(flags)
    heads = teacher_at(tmp_path / "heads", "--num-attention-heads 3 --hidden-size 24")
    alone = ready(f"--teacher-load {heads}")
    divided = tiny_config(f"{PLAIN} {LLAMA} --tensor-model-parallel-size 2", ranks=2)
    with expect_error(ConfigError, "heads", "3", "--tensor-model-parallel-size 2"):
        alone.train_spec.check_beside(divided.with_vocab_size(51), alone.tokenizer)


def test_what_was_stored_of_a_teacher_teaches_the_same(tmp_path: Path) -> None:
    """With all ids the divergence is the teacher's own; and what isn't of this run is refused before it starts."""
    place, folder = teacher_at(tmp_path / "teacher"), tmp_path / "scores"
    flags = "--distill-share 0.7 --distill-temperature 2 --seed 3"
    context = ParallelContext.single()

    def scored(place: Path, top: int) -> None:
        config = tiny_config(f"{PLAIN} {LLAMA} {flags} --teacher-load {tmp_path / 'teacher'}")
        score(config, GPT.train_spec, context, place, top_k=top, log_probs="float32", say=lambda line: None)

    scored(folder, 51)
    beside, stored = ready(f"{flags} --teacher-load {place}"), ready(f"{flags} --teacher-scores {folder}")
    for one, other in zip(steps(beside, 2), steps(stored, 2)):
        assert one.losses == pytest.approx(other.losses, rel=1e-5) and one.grad_norm == pytest.approx(other.grad_norm)
    with expect_error(ConfigError, "--top-k", "52", "51"):
        scored(tmp_path / "more", 52)
    given = f"{flags} --teacher-scores {folder}"
    for changed, error, facts in (
        (f"{given} --seed 4", DataError, ("scores", "0", "train")),
        (f"{given} --distill-temperature 1", ConfigError, ("scores", "2", "1")),
        (f"{given} --seq-length 8", ConfigError, ("scores", "16", "8")),
        (f"{given} --vocab-size 60", DataError, ("scores", "51", "61")),
        (f"{given} --train-samples 4000", ConfigError, ("scores", "24", "4,000")),
        (f"{given} --teacher-load t", ConfigError, ("--teacher-scores", "--teacher-load t")),
        (f"{flags} --teacher-scores {tmp_path}", DataError, (tmp_path.name, "scores.json")),
    ):
        with expect_error(error, *facts):
            steps(ready(changed), 1)
    for name, dtype, value in (("log_probs", np.float32, 0), ("rest", np.float32, np.nan), ("ids", np.int32, 51)):
        path = folder / f"train.{name}.bin"
        kept = path.read_bytes()
        stored_values = np.frombuffer(kept, dtype).copy()
        stored_values[len(stored_values) // 2] = value
        path.write_bytes(stored_values.tobytes())
        with expect_error(DataError, "scores", "sample 12", "51"):
            steps(ready(given), 2)
        path.write_bytes(kept)
    (folder / "train.ids.bin").write_bytes(b"short")
    with expect_error(DataError, "train.ids.bin", "5"):
        steps(ready(given), 1)


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ("--distill-share 0.5", ("--distill-share 0.5", "--teacher-load")),
        ("--teacher-load t --distill-share 1.5", ("--distill-share", "1.5")),
        ("--teacher-load t --distill-temperature 0", ("--distill-temperature", "0.0")),
        ("--teacher-load t --distill-hidden-states 3-7", ("--distill-hidden-states 3-7", "3:7:mse")),
        ("--teacher-load t --distill-hidden-states 2:7", ("--distill-hidden-states", "layer 2", "0 to 1")),
        ("--teacher-load t --distill-hidden-states 1:7 1:7:mse", ("--distill-hidden-states", "twice")),
        ("--teacher-scores t --distill-hidden-states 1:7", ("--distill-hidden-states", "--teacher-scores")),
    ],
)
def test_settings_that_cannot_be(flags: str, facts: tuple[str, ...]) -> None:
    """A share above 1 would train away from the labels."""
    with expect_error(ConfigError, *facts):
        tiny_config(f"{PLAIN} {flags}")


def test_settings_of_megatron_lm(tmp_path: Path) -> None:
    """Its names are taken where they mean something here, and refused by name where they don't."""
    path = tmp_path / "kd.yaml"
    path.write_text(
        "logit_layers: [output_layer, output_layer]\nskip_lm_loss: true\nlogit_kl_temperature: 2.0\n"
        "intermediate_layer_pairs:\n  - [decoder.layers.1, decoder.layers.5, mse]\n"
        "  - [decoder.final_layernorm, decoder.final_layernorm]\n"
    )
    run = tiny_config(f"{PLAIN} --export-kd-teacher-load t --export-kd-cfg {path}")
    found = run.part(DistillationConfig)
    assert (found.teacher_load, found.distill_share, found.distill_temperature, found.scale) == ("t", 1.0, 2.0, 1.0)
    assert found.hidden_pairs == (HiddenPair(1, 5, "mse"), HiddenPair(None, None))
    for line, facts in {
        "skip_lm_loss: false": ("skip_lm_loss", "--distill-share"),
        "kd_loss_scale: 0.5": ("kd_loss_scale", "0.5"),
        "intermediate_layer_pairs: [[a, b, cosine]]": ("intermediate_layer_pairs", "decoder.layers.3"),
        "intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.1, l1]]": ("intermediate_layer_pairs", "l1"),
        "logit_kl_topk: 100": ("logit_kl_topk", "100"),
        "logit_layers: [a, b]": ("logit_layers",),
        "logit_kl_temperature: warm": ("logit_kl_temperature", "warm"),
        "logit_kl_temperature: .inf": ("kd.yaml", "logit_kl_temperature", "inf"),
        "logit_kl_temperature: 1.0e+300": ("kd.yaml", "logit_kl_temperature", "1e+300"),
        "temperature: 2": ("temperature", "logit_kl_temperature"),
    }.items():
        path.write_text(line)
        with expect_error(ConfigError, *facts):
            tiny_config(f"{PLAIN} --export-kd-teacher-load t --export-kd-cfg {path}")


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ("", ("kd.yaml", "--teacher-load")),
        ("--teacher-load t --distill-share 0.5", ("--distill-share", "--distill-cfg")),
        ("--teacher-load t --distill-temperature 1 --distill-scale 3", ("--distill-temperature", "--distill-scale")),
    ],
)
def test_a_file_of_megatron_lm_that_would_have_no_effect_or_the_last_word(
    tmp_path: Path, flags: str, facts: tuple[str, ...]
) -> None:
    """Without a teacher the run trained plainly, and flags beside the file were overwritten, with no word of either."""
    path = tmp_path / "kd.yaml"
    path.write_text("logit_kl_temperature: 2.0")
    with expect_error(ConfigError, "--distill-cfg", *facts):
        tiny_config(f"{PLAIN} --distill-cfg {path} {flags}")


class _Listed:
    """One sample as a data set."""

    digest = ""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | None) -> Sample:
        return self._sample

    def origin(self, index: int) -> str:
        """Its place."""
        return "document 7"

    def describe(self) -> list[str]:
        """Nothing."""
        return []


def test_ranks_store_their_places_of_one_sample(tmp_path: Path) -> None:
    """Context-parallel ranks write the outer and the inner places; a file that finds no room is an error at once, and
    no bus error at some sample.
    """
    sizes: dict[str, Any] = {"vocab_size": 99, "seq_length": 8, "top_k": 2, "temperature": 1.0, "log_probs": "float16"}
    header = ScoresHeader(teacher="t", fingerprint="", tokenizer="", samples={"train": 3}, **sizes)
    make_files(tmp_path, header)
    ids = np.arange(16).reshape(8, 2)
    for places in (np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])):
        writer = ScoreWriter(tmp_path, header, "train")
        writer.store(1, 2**64 - 1, places, ids[places], -ids[places] / 2, -places / 4)
        writer.close()
    arrays = ScoreArrays(tmp_path, header, "train")
    found = arrays.row(1)
    assert [each.tolist() for each in found] == [ids.tolist(), (-ids / 2).tolist(), (-np.arange(8) / 4).tolist()]
    assert [arrays.seen(number) for number in range(3)] == [0, 2**64 - 1, 0] and not arrays.row(0)[0].any()
    usage = SimpleNamespace(free=10**9)
    with mock.patch("shutil.disk_usage", return_value=usage), expect_error(DataError, "--scores", "--top-k"):
        make_files(tmp_path, replace(header, samples={"train": 10**10}))


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask"])
def test_what_a_teacher_read_otherwise_is_refused(tmp_path: Path, flag: str) -> None:
    """The same tokens with positions that restart, or with attention within documents, were taken for what had been
    scored without; a sample that lies within one document is the same either way.
    """
    header = ScoresHeader(
        teacher="t",
        fingerprint="",
        tokenizer="",
        vocab_size=9,
        seq_length=4,
        top_k=1,
        temperature=1.0,
        log_probs="float32",
        samples={"train": 1},
    )
    make_files(tmp_path, header)
    arrays, writer = ScoreArrays(tmp_path, header, "train"), ScoreWriter(tmp_path, header, "train")
    plain, resets = SampleLayout(seq_length=4, eod=0), SampleLayout(seq_length=4, eod=0, **{flag: True})
    for tokens, is_same in (([5, 6, 7, 8, 5], True), ([5, 0, 7, 8, 5], False)):
        text = np.array(tokens)
        scored = NumberedSamples(_Listed(plain.sample(text, num_tokens=5)))[0]
        row, rest = np.zeros((4, 1)), np.full(4, -np.inf)
        writer.store(0, int(scored[SEEN].view(np.uint64)[0]), scored[PLACES], row, row, rest)
        same, other = (_Listed(each.sample(text, num_tokens=5)) for each in (plain, resets))
        assert ScoredSamples(same, arrays, where="--teacher-scores s")[0].keys() > {"tokens"}
        if is_same:
            assert ScoredSamples(other, arrays, where="--teacher-scores s")[0].keys() > {"tokens"}
            continue
        with expect_error(DataError, "--teacher-scores s", "sample 0 of train", "document 7"):
            ScoredSamples(other, arrays, where="--teacher-scores s")
