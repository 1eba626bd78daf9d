"""A run starts from published weights.

The first loss is that of transformers, and nothing trained goes back unchanged but by training.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.conversion import proof
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.portable import fitted
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from megatron.training.checkpoints import huggingface_folders, published
from megatron.training.checkpoints.huggingface_folders import NOTE, HuggingFaceFolders, check_huggingface
from megatron.training.checkpoints.loading import load, saved_config
from megatron.training.checkpoints.published import published_config
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step
from tests.harness import bucket, run_ranks
from tests.harness.published import random_model
from tests.harness.sentences import check_line, check_refusals, check_sentence, expect_error, refusal
from tests.published.sizes import SIZES
from tests.unit.conversion.test_families import assert_same_bytes, weights
from tools import train_tokenizer

Folder = Callable[[str], Path]
STARTS = {
    "llama 3": ("gpt", "AutoModelForCausalLM"),
    "gpt2": ("gpt", "AutoModelForCausalLM"),
    "qwen2 tied": ("gpt", "AutoModelForCausalLM"),
    "t5 v1.1": ("t5", "AutoModelForSeq2SeqLM"),
    "bert": ("bert", "AutoModelForPreTraining"),
}
TINY = (
    "--mock-data --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 4 --eval-iters 0 --num-workers 0 "
    "--seq-length 32 --attention-dropout 0 --hidden-dropout 0"
)


def config_of(family: str, flags: str, *, ranks: int = 1) -> RunConfig:
    return parse_run(
        f"{TINY} {flags}".split(),
        world_size=ranks,
        extra_groups=FAMILIES[family].groups,
        checkpoint_config=saved_config,
        published_config=published_config,
    )


def started(context: ParallelContext, family: str, flags: str) -> Run:
    config = config_of(family, flags, ranks=context.mesh.world_size)
    run = build_run(config, FAMILIES[family].train_spec, context, started=0.0)
    load(run)
    return run


def first_step(context: ParallelContext, family: str, flags: str, written: Path | None = None) -> dict[str, float]:
    """Losses of the first step. ``written``: where the model then goes, if it is not to stay."""
    run = started(context, family, flags)
    losses = train_step(run, next(run.data.training_batches(0))).losses
    if written is not None:
        run.progress.iteration = run.config.train_iters
        HuggingFaceFolders(run, Saver(run)).write_if_due()
    return {name: float(loss) for name, loss in losses.items()}


def their_losses(name: str, folder: Path) -> dict[str, float]:
    """Means over the first global batch, as transformers' model has them."""
    import transformers

    family, auto_class = STARTS[name]
    model = getattr(transformers, auto_class).from_pretrained(folder, attn_implementation="eager").eval()
    run = started(ParallelContext.single(), family, f"--load-hf {folder} --load-hf-proof off")
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for microbatch in next(run.data.training_batches(0)):
            batch = microbatch.tensors
            if family == "gpt":
                logits = model(batch["tokens"]).logits
            elif family == "t5":
                logits = model(
                    input_ids=batch["text_enc"],
                    attention_mask=batch["enc_mask"],
                    decoder_input_ids=batch["text_dec"],
                ).logits
            else:
                output = model(batch["text"], attention_mask=batch["attention_mask"], token_type_ids=batch["types"])
                logits = output.prediction_logits
                order = F.cross_entropy(output.seq_relationship_logits, batch["is_random"], reduction="none")
                found.setdefault("sop loss", []).append(order)
            losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1, reduction="none")
            found.setdefault("lm loss", []).append(losses[batch["loss_mask"].flatten() > 0])
    return {loss: torch.cat(each).mean().item() for loss, each in found.items()}


@pytest.mark.parametrize("name", STARTS)
def test_the_first_loss_is_that_of_transformers(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """Weights in the wrong place train on quietly from a worse model. At lr 0 they leave as they came, and the proof,
    the tokenizer's ids and settings of their own come along.
    """
    folder = model_folder(name)
    family = STARTS[name][0]
    flags = f"--load-hf {folder} --lr 0 --save-hf {tmp_path / 'out'} --load-hf-proof required"
    found = first_step(ParallelContext.single(), family, flags, tmp_path / "out")
    assert found == pytest.approx(their_losses(name, folder), rel=1e-6)  # fp32: eight roundings of a loss of 5
    assert_same_bytes(folder, tmp_path / "out")
    theirs, ours = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out"))
    assert ours["model_type"] == theirs["model_type"]
    assert ours.get("eos_token_id") == theirs.get("eos_token_id")


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("llama 3", {"tp": 2, "pp": 2}, "--sequence-parallel"),
        pytest.param("gpt2", {"dp": 2, "cp": 2}, "--use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param("t5 v1.1", {"tp": 2, "pp": 2}, "", marks=pytest.mark.slow),
        ("bert", {"tp": 2, "dp": 2}, "--use-distributed-optimizer"),
    ],
)
def test_any_layout_starts_the_same(
    name: str, layout: dict[str, Any], more: str, model_folder: Folder, tmp_path: Path
) -> None:
    """Each rank takes its part of every tensor, and rank 0 writes the whole ones."""
    names = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size"}
    sizes = " ".join(f"--{names[axis]} {size}" for axis, size in layout.items() if axis in names)
    folder = model_folder(name)
    flags = f"--load-hf {folder} --lr 0 --save-hf {tmp_path / 'out'} {sizes} {more}"
    is_sp = "--sequence-parallel" in more
    for found in run_ranks(first_step, STARTS[name][0], flags, tmp_path / "out", sequence_parallel=is_sp, **layout):
        assert found == pytest.approx(their_losses(name, folder), abs=5e-6)
    assert_same_bytes(folder, tmp_path / "out")


def other_files(context: ParallelContext, folders: list[Path]) -> None:
    with mock.patch.object(published, "folder_of", return_value=folders[context.mesh.world_rank]):
        started(context, "gpt", "--load-hf model --load-hf-proof off")


def test_nodes_with_other_files_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    """An unfinished copy on one node would train a model of two halves."""
    shutil.copytree(model_folder("llama"), tmp_path / "copy")
    with (tmp_path / "copy/generation_config.json").open("a") as file:
        file.write("\n")
    said = run_ranks(refusal, other_files, [model_folder("llama"), tmp_path / "copy"], dp=2)
    check_refusals(said, "rank 1", "--load-hf model", "rank 0")


def test_masters_are_as_exact_as_the_files(model_folder: Folder) -> None:
    """In bf16 training fp32 files lose nothing: a small step would be rounded away on rounded weights."""
    context = ParallelContext.single(dtype=torch.bfloat16)
    run = started(context, "gpt", f"--load-hf {model_folder('llama')} --bf16 --load-hf-proof off")
    portable = read_huggingface(model_folder("llama"))
    entries = [*run.optimizer.master_entries()]
    assert len(entries) == len(portable.tensors)
    for entry in entries:
        name = entry.name.removeprefix("optimizer.fp32_param.")
        expected = portable.tensors[name].make()
        assert torch.equal(entry.tensor.view(-1)[: expected.numel()], expected.view(-1)), name
        assert torch.equal(run.models[0].get_parameter(name)[: len(expected)], expected.bfloat16()), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5 v1.1", "bert"])
def test_vocabularies_grow_and_shrink(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """New rows are the mean of those there, in every table over words; the others stay, to the byte."""
    folder, family = model_folder(name), STARTS.get(name, ("gpt",))[0]
    before = weights(folder)
    for words in (130, 90):
        out = tmp_path / str(words)
        flags = f"--load-hf {folder} --lr 0 --vocab-size {words - 1} --tokenizer-type NullTokenizer --save-hf {out}"
        first_step(ParallelContext.single(), family, f"{flags} --load-hf-proof off", out)
        for tensor_name, after in weights(out).items():
            old = before[tensor_name]
            kept = min(len(old), len(after))
            assert torch.equal(old[:kept], after[:kept]), tensor_name
            if old.shape != after.shape:
                assert (len(old), len(after)) == (101, words)
                assert torch.allclose(after[101:], old.mean(0).expand_as(after[101:]), atol=1e-7), tensor_name
        assert json.loads((out / "config.json").read_text())["vocab_size"] == words


def test_learned_positions_have_no_others(model_folder: Folder) -> None:
    """A longer table would be of untrained rows. One of as many rows as the vocabulary is not taken for it."""
    portable = read_huggingface(model_folder("gpt2"))
    config = config_of("gpt", f"--load-hf {model_folder('gpt2')} --max-position-embeddings 128")
    with pytest.raises(CheckpointError) as caught:
        fitted(portable, config.model, config.extra, where="--load-hf gpt2")
    check_sentence(
        str(caught.value),
        "--max-position-embeddings 128",
        "--load-hf gpt2",
        "64 positions",
        "embedding.position_embeddings.weight",
        "--seq-length",
    )
    config = config_of("gpt", f"--load-hf {model_folder('llama')} --max-position-embeddings 128 --rotary-base 5e4")
    assert fitted(read_huggingface(model_folder("llama")), config.model, config.extra, where="").model is not None


def test_the_source_says_how_its_weights_were_drawn(tmp_path: Path) -> None:
    """A StarCoder 2 came back with the default of --init-method-std in place of its own initializer_range."""
    random_model("starcoder2", {**SIZES, "initializer_range": 0.018}).save_pretrained(tmp_path / "source")
    for flags, std in (("", 0.018), ("--init-method-std 0.01", 0.01)):
        out = tmp_path / f"out{std}"
        first_step(ParallelContext.single(), "gpt", f"--load-hf {tmp_path / 'source'} --save-hf {out} {flags}", out)
        assert json.loads((out / "config.json").read_text())["initializer_range"] == std


def test_what_is_said_of_the_folder(model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion said that code is never executed and that types are mixed, and a start from the folder did not."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "auto_map": {"AutoModel": "own.Model"}}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    started(ParallelContext.single(), "gpt", f"--load-hf {folder} --load-hf-proof off")
    said = capsys.readouterr().out
    check_line(said, f"{folder}/config.json", "auto_map")
    check_line(said, "30 tensors", "float32", "model.norm.weight", "bfloat16")


def test_weights_that_are_not_proven(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without transformers a run starts and says so, unless it must not; a difference never starts."""
    folder = model_folder("llama")

    def no_transformers(*, skip: str) -> str:
        raise CheckpointError(f"transformers is not installed: skip the proof with {skip}")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "transformers_version", no_transformers)
        started(ParallelContext.single(), "gpt", f"--load-hf {folder}")
        check_line(capsys.readouterr().out, "NOT", "PROVEN", "--load-hf-proof off")
        with expect_error(CheckpointError):
            started(ParallelContext.single(), "gpt", f"--load-hf {folder} --load-hf-proof required")
    started(ParallelContext.single(), "gpt", f"--load-hf {folder} --load-hf-proof off")
    check_line(capsys.readouterr().out, "NOT", "PROVEN", "--load-hf-proof off")
    answer = proof.portable_answer
    monkeypatch.setattr(proof, "portable_answer", lambda *given: {"words": answer(*given)["words"] + 0.1})
    with expect_error(CheckpointError, "--load-hf") as caught:
        started(ParallelContext.single(), "gpt", f"--load-hf {folder}")
    assert caught.value.exit_code == 2


def test_what_transformers_refuses_does_not_start(model_folder: Folder, tmp_path: Path) -> None:
    """Evidence against the weights was a remark, as if transformers were missing, and the run trained on them."""
    shutil.copytree(model_folder("llama"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "pad_token_id": 500}))
    with pytest.raises(CheckpointError) as caught:
        started(ParallelContext.single(), "gpt", f"--load-hf {tmp_path / 'hf'}")
    check_sentence(
        str(caught.value),
        "--load-hf",
        tmp_path / "hf",
        "AssertionError",
        "Padding_idx",
        "num_embeddings",
        "--load-hf-proof off",
    )
    assert caught.value.exit_code == 2


def resumable(folder: Path, base: Path | str, *more: str) -> str:
    saving = f"--save {base}/runs --load {base}/runs --save-interval 2 --save-hf {base}/out"
    return " ".join([f"--load-hf {folder} --load-hf-proof off", saving, *more])


def trained(flags: str, *, to: int) -> Run:
    """A run after ``to`` iterations, with its checkpoint and, where one is due, its model."""
    run = started(ParallelContext.single(), "gpt", flags)
    saver = Saver(run)
    folders = HuggingFaceFolders(run, saver)
    folders.write_if_due()
    batches = run.data.training_batches(run.progress.consumed_samples)
    while run.progress.iteration < to:
        train_step(run, next(batches))
        if run.progress.iteration % 2 == 0:
            saver.save()
        folders.write_if_due()
    return run


@pytest.mark.parametrize("place", ["disk", "object storage"])
def test_a_model_that_a_killed_run_did_not_write(place: str, model_folder: Folder, tmp_path: Path) -> None:
    """Killed between a checkpoint and its model, the restarted run writes it, without the published folder, which is
    gone by then; a model that is there is not written again, and one of an older iteration of the run makes way.
    """
    folder = tmp_path / "hf"
    shutil.copytree(model_folder("llama"), folder)
    flags = resumable(folder, tmp_path if place == "disk" else bucket.url(tmp_path))
    trained(flags, to=4)
    out, whole = tmp_path / "out", weights(tmp_path / "out")
    if place == "disk":
        shutil.rmtree(out)
    else:
        (out / "config.json").unlink()  # which an upload puts last
    shutil.rmtree(folder)
    resumed = trained(flags, to=4)
    assert "runs/iter_0000004" in str(resumed.loaded_from)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(out).items())
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    written = (out / NOTE).stat().st_mtime_ns
    trained(flags, to=4)
    assert (out / NOTE).stat().st_mtime_ns == written
    trained(f"{flags} --train-iters 6 --override-opt_param-scheduler", to=6)
    assert json.loads((out / NOTE).read_text())["iteration"] == 6
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_models_at_checkpoints(model_folder: Folder, tmp_path: Path) -> None:
    """Each in a folder of its own, the last one too; a restart goes on beside them."""
    flags = resumable(model_folder("llama"), tmp_path, "--save-hf-interval 2")
    trained(flags, to=3)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["iter_0000002"]
    assert check_huggingface(config_of("gpt", flags)) == [
        f"--save-hf: {tmp_path}/out can be written, after every 2 iterations"
    ]
    trained(flags, to=4)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["iter_0000002", "iter_0000004"]
    shutil.rmtree(tmp_path / "runs")
    with expect_error(CheckpointError, "0"):
        check_huggingface(config_of("gpt", flags))


def test_a_full_disk_loses_nothing(model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the file and what is kept; nothing is left half written."""

    def full(*given: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(huggingface_folders, "write_huggingface", full)
    with pytest.raises(CheckpointError) as caught:
        trained(resumable(model_folder("llama"), tmp_path), to=4)
    check_sentence(str(caught.value), f"--save-hf {tmp_path}/out", "model.safetensors", "4", f"{tmp_path}/runs")
    assert caught.value.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_what_cannot_start_or_be_written(model_folder: Folder, tmp_path: Path) -> None:
    """Said before ranks are launched; nothing of others is overwritten."""
    llama = model_folder("llama")
    damaged = {}
    changes: dict[str, dict[str, Any]] = {
        "quantized": {"quantization_config": {"bits": 4}},
        "unknown": {"model_type": "quux"},
        "deeper": {"num_hidden_layers": 4},
    }
    for name, change in changes.items():
        damaged[name] = tmp_path / name
        shutil.copytree(llama, damaged[name])
        config = json.loads((llama / "config.json").read_text())
        (damaged[name] / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    off = "--load-hf-proof off"
    for family, flags in (
        ("bert", f"--load-hf {llama}"),
        ("gpt", f"--load-hf {tmp_path}/none"),
        ("gpt", "--load-hf s3://bucket/model"),
        ("gpt", f"--load-hf {damaged['quantized']}"),
        ("gpt", f"--load-hf {damaged['unknown']}"),
        ("gpt", f"--load-hf {damaged['deeper']}"),
        ("gpt", f"--load-hf {llama} {off} --save-hf {tmp_path}/taken"),
        ("gpt", f"--load-hf {llama} {off} --save-hf {llama}"),
        ("gpt", f"--load-hf {llama} {off} --save-hf {tmp_path}/taken/notes.txt/x"),
        (
            "gpt",
            f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 9 --squared-relu "
            f"--save-hf {tmp_path}/out",
        ),
    ):
        with expect_error(CheckpointError) as caught:
            check_huggingface(config_of(family, flags))
        assert caught.value.exit_code == 2


def test_another_tokenizer_brings_its_own_files(model_folder: Folder, tmp_path: Path) -> None:
    """Settings of the published model name ids of its own tokenizer: with another one they are wrong."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "the quick brown fox " * 200}) + "\n")
    for name in ("own", "other"):
        words = "272" if name == "own" else "265"
        train_tokenizer.main(["--input", str(corpus), "--output-dir", str(tmp_path / name), "--vocab-size", words])
    model = random_model("llama", {**SIZES, "vocab_size": 300, "eos_token_id": 7})
    model.save_pretrained(tmp_path / "own")
    other = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'other'}"
    for flags, eos, tokenizer in (("", 7, "own"), (other, 0, "other")):
        base = tmp_path / f"run {tokenizer}".replace(" ", "-")
        run = trained(resumable(tmp_path / "own", base, flags), to=4)
        assert run.config.model.vocab_size == 300
        written = json.loads((base / "out/config.json").read_text())
        assert written["eos_token_id"] == (eos if tokenizer == "own" else run.tokenizer.eos)
        same = (base / "out/tokenizer.json").read_bytes() == (tmp_path / tokenizer / "tokenizer.json").read_bytes()
        assert same
