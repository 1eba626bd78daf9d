"""Checkpoints of Megatron-LM, of every version, spelling and layout, become ours with the same numbers, and go back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.streamed import StreamedBox, table_of, write_boxes
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm import reading
from megatron.core.conversion.megatron_lm.arguments import model_from_arguments
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.proof import ProofError
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.registry import FAMILIES
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.tiers import pairs
from tests.unit.conversion.logits import megatron_lm_logits, native_logits
from tests.unit.conversion.megatron_checkpoints import (
    CLASSIC,
    MODERN,
    arguments,
    portable,
    random_tensors,
    write_torch,
)


def do(source: Any, load: Path, target: Any, save: Path, **options: Any) -> None:
    convert(Conversion(source, load, target, save, **options), lambda words: None)


def assert_holds(found: PortableModel, values: dict[str, Tensor]) -> None:
    assert found.tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found.tensors[name].make(), value), name


VERSIONS: list[tuple[str, float | None]]
VERSIONS = [("first", None), ("first", 1.0), ("legacy", 2.0), ("legacy", 3.0), ("core", 3.0), ("te", 3.0)]
"""How files of Megatron-LM look, from the first release on, and the version in them."""
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("version", "layout"),
    pairs([*VERSIONS, ("first", 0.0)], LAYOUTS, rich=[(2, 2, 2)], more={("core", 3.0): LAYOUTS}),
    ids=str,
)
def test_every_version_at_every_layout(
    version: tuple[str, float | None], layout: tuple[int, int, int], tmp_path: Path
) -> None:
    """GPT as it was from the first release on: names changed twice, the order of query, key and value twice."""
    (style, number), (tp, pp, vpp) = version, layout
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path / "theirs", CLASSIC, values, style=style, version=number, tp=tp, pp=pp, vpp=vpp)
    found = read_megatron_lm(tmp_path / "theirs")
    assert_holds(found, values)
    assert (found.iteration, found.consumed_samples, found.model.vocab_size) == (500, 4000, 101)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)


@pytest.mark.parametrize(
    ("style", "pp", "more", "tp"),
    [
        pytest.param(style, pp, more, tp, marks=[] if number % 2 == tp - 1 else pytest.mark.slow)
        for style, pp in (("legacy", 1), ("core", 2), ("te", 1))
        for number, more in enumerate(
            ({}, {"qk_layernorm": True}, {"apply_layernorm_1p": True}, {"rotary_interleaved": True})
        )
        for tp in (1, 2)
        if not (style == "legacy" and "qk_layernorm" in more)  # those came with core
    ],
    ids=str,
)
def test_modern_models(style: str, tp: int, pp: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Grouped queries, SwiGLU whose halves each rank keeps together, one-dimensional norms, an untied output."""
    settings = {**MODERN, **more}
    values = random_tensors(ModelConfig(**settings))
    write_torch(tmp_path / "theirs", settings, values, style=style, tp=tp, pp=pp)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)


def test_the_proof_sees_what_the_mapping_gets_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The independent side must not share the mistake: here version 1 is taken for version 2."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path / "theirs", CLASSIC, values, style="legacy", version=1.0, tp=2)
    monkeypatch.setattr(reading._Merge, "_by_head", lambda self, part, kinds, ranks: part)
    with expect_error(ProofError):
        do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    ("flags", "legacy", "activation"),
    [
        ({}, False, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, False, "gelu"),
        ({"add_bias_linear": False}, False, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, True, "gelu_tanh"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, False, "gelu"),
        ({"squared_relu": True}, False, "squared_relu"),
        ({"swiglu": True}, False, "swiglu"),
    ],
)
def test_the_activation_that_was_trained_with(flags: dict[str, Any], legacy: bool, activation: str) -> None:
    """Megatron-LM's GELU is an approximation only inside the kernel that adds the bias; core ignores openai_gelu."""
    args = Arguments(arguments({**CLASSIC, **flags}), "x")
    assert model_from_arguments(args, vocab_size=101, num_layers=4, legacy=legacy).activation == activation


def test_norms_minus_one_under_the_name_of_the_newest_releases() -> None:
    """They save apply_layernorm_1p as layernorm_zero_centered_gamma: such a model lost one in every norm weight."""
    for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        args = Arguments(arguments({**CLASSIC, name: True, "layernorm_epsilon": 1e-6}), "x")
        model = model_from_arguments(args, vocab_size=101, num_layers=4, legacy=False)
        assert (model.apply_layernorm_1p, model.norm_epsilon) == (True, 1e-6)


def test_released_weights(tmp_path: Path) -> None:
    """A folder called release has no iteration; ours starts at 0."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path, CLASSIC, values, style="core", release=True)
    assert read_megatron_lm(tmp_path).iteration == 0


def test_an_iteration_can_be_chosen(tmp_path: Path) -> None:
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path, CLASSIC, values, style="core")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9000")
    with expect_error(CheckpointError, "iter_0009000", "latest_checkpointed_iteration.txt"):
        read_megatron_lm(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../x")
    with expect_error(CheckpointError, "'../x'", "--ckpt-step N"):
        read_megatron_lm(tmp_path)
    assert read_megatron_lm(tmp_path, step=500).iteration == 500
    assert read_megatron_lm(tmp_path / "iter_0000500").iteration == 500


def test_padding_is_dropped_where_the_vocabulary_is_known(tmp_path: Path) -> None:
    """From the tokenizer, or as told; else every row is kept, and a run's --vocab-size is that of the padded matrix."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path, CLASSIC, values, style="core", tokenizer_type="GPT2BPETokenizer", vocab_file="gone.json")
    assert read_megatron_lm(tmp_path).model.vocab_size == 128
    found = read_megatron_lm(tmp_path, true_vocab_size=101)
    assert_holds(found, values)
    with expect_error(CheckpointError, "128 words", "--true-vocab-size 129"):
        read_megatron_lm(tmp_path, true_vocab_size=129)


def dist_checkpoint(
    folder: Path, settings: dict[str, Any], values: dict[str, Tensor], *, common_in_dcp: bool, family: str = "gpt"
) -> None:
    """A torch_dist folder: layers stacked, norms under Transformer Engine's names, padding, optimizer state."""
    from megatron.core.conversion.megatron_lm.format import format_of

    folder.mkdir(parents=True)
    stacks: dict[str, list[Tensor]] = {}
    for name, value in values.items():
        names = format_of(FAMILIES[family]).names
        for key in names.dist_names(name, values, has_numbers=False, is_plain=True):
            stacks.setdefault(key, []).append(value)
    tensors = {key: torch.stack(parts) if ".layers." in key else parts[0] for key, parts in stacks.items()}
    for key in tensors:
        if key.endswith(("word_embeddings.weight", "output_layer.weight", "output_layer.bias")):
            tensors[key] = torch.cat([tensors[key], torch.full((27, *tensors[key].shape[1:]), 7.0)])
    tensors |= {f"optimizer.state.exp_avg.{key}": torch.zeros_like(tensor) for key, tensor in tensors.items()}
    boxes = [StreamedBox.whole(key, tuple(tensor.shape), tensor.dtype, tensor.clone) for key, tensor in tensors.items()]
    writer = CheckpointWriter(folder)
    writer.set_up_storage_writer(True)
    metadata, places = table_of(boxes), write_boxes(writer, folder, boxes)
    common = {"args": arguments(settings), "checkpoint_version": 3.0, "iteration": 700}
    if common_in_dcp:
        import io

        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        stream = io.BytesIO()
        torch.save(common, stream)
        (folder / "__1_0.distcp").write_bytes(b"before" + stream.getvalue())
        place = _StorageInfo("__1_0.distcp", 6, len(stream.getvalue()))
        metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
        places.append(WriteResult(MetadataIndex("common_state/shard_0_1"), place.length, place))
    else:
        torch.save(common, folder / "common.pt")
    writer.finish(metadata, [places])
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


@pytest.mark.parametrize("common_in_dcp", [False, True], ids=["common.pt", "since 0.19"])
@pytest.mark.parametrize(
    ("family", "settings", "groups"),
    [("gpt", CLASSIC, ()), ("gpt", MODERN, ()), ("bert", CLASSIC, (BertConfig(exact_gelu_head=True),))],
    ids=["classic", "modern", "bert"],
)
def test_torch_dist(
    family: str, settings: dict[str, Any], groups: tuple[object, ...], common_in_dcp: bool, tmp_path: Path
) -> None:
    """The format of today, with the settings beside the tensors or among them."""
    values = random_tensors(ModelConfig(**settings), groups)
    folder = tmp_path / "theirs/iter_0000700"
    dist_checkpoint(folder, settings, values, common_in_dcp=common_in_dcp, family=family)
    (tmp_path / "theirs/latest_checkpointed_iteration.txt").write_text("700")
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    found = read_native(tmp_path / "ours")
    assert_holds(found, values)
    assert found.iteration == 700


@pytest.mark.parametrize("dist", [True, False], ids=["torch_dist", "torch"])
@pytest.mark.parametrize(
    "settings",
    [CLASSIC, MODERN, {**CLASSIC, "activation": "squared_relu", "position_embedding_type": "none"}],
    ids=["classic", "modern", "relu"],
)
def test_ours_goes_to_megatron_lm_and_back(settings: dict[str, Any], dist: bool, tmp_path: Path) -> None:
    """With what its --use-checkpoint-args reads, and its padding."""
    model = ModelConfig(**settings)
    values = random_tensors(model)
    write_native(portable(model, values), tmp_path / "ours", final=tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=dist)
    assert (tmp_path / "theirs/latest_checkpointed_iteration.txt").read_text() == "release"
    found = read_megatron_lm(tmp_path / "theirs")
    assert_holds(found, values)
    assert found.model == model
    logits = megatron_lm_logits(tmp_path / "theirs", torch.arange(20).view(2, 10))
    assert logits.shape == (2, 10, 128)
    assert (logits[..., :101] - native_logits(tmp_path / "ours", torch.arange(20).view(2, 10))).abs().max() < 1e-5


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"position_embedding_type": "relative"}, ["'relative'", "GPT", "learned_absolute"]),
    ({"num_layers": 5}, ["4 layers", "num_layers 5"]),
    ({"ffn_hidden_size": 100}, ["decoder.layers.0.mlp.linear_fc1.weight", "[128, 32]", "[100, 32]"]),
    ({"untie_embeddings_and_output_weights": True}, ["output_layer.weight"]),
    ({"hidden_size": None}, ["hidden_size"]),
]


@pytest.mark.parametrize(("flags", "facts"), MISTAKES, ids=[next(iter(flags)) for flags, _ in MISTAKES])
def test_what_cannot_be_converted_is_said(flags: dict[str, Any], facts: list[str], tmp_path: Path) -> None:
    """A model that is almost ours must not come out as one."""
    write_torch(tmp_path, CLASSIC, random_tensors(ModelConfig(**CLASSIC)), style="core", **flags)
    with expect_error(CheckpointError, *facts):
        read_megatron_lm(tmp_path)


def test_missing_ranks_and_other_folders(tmp_path: Path) -> None:
    """A copy that lacks a rank's file, and folders that are something else."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path / "x", CLASSIC, values, style="core", tp=2, pp=2)
    (tmp_path / "x/iter_0000500/mp_rank_01_000/model_optim_rng.pt").unlink()
    with expect_error(CheckpointError, "tp 1", "pp 0"):
        read_megatron_lm(tmp_path / "x")
    with expect_error(CheckpointError, "mp_rank_"):
        read_megatron_lm(tmp_path)
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path / "nowhere")


def test_malicious_files_run_nothing(tmp_path: Path) -> None:
    """model_optim_rng.pt and common.pt are pickles from strangers."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path / "x", CLASSIC, values, style="core")

    class Attack:
        @override
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "pwned"), "w")

    torch.save({"args": Attack()}, tmp_path / "x/iter_0000500/mp_rank_00/model_optim_rng.pt")
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path / "x")
    dist_checkpoint(tmp_path / "d", CLASSIC, values, common_in_dcp=False)
    torch.save({"args": Attack()}, tmp_path / "d/common.pt")
    with expect_error(CheckpointError, "common.pt"):
        read_megatron_lm(tmp_path / "d")
    assert not (tmp_path / "pwned").exists()


def test_the_tokenizer_of_training_travels_along(tmp_path: Path) -> None:
    """Its vocabulary says where padding begins; its files lie beside the result, and training finds them there."""
    from megatron.core.tokenizers.build import build_tokenizer
    from tools import train_tokenizer

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"text {number} of many"}) + "\n" for number in range(50)))
    train_tokenizer.main(["--input", str(corpus), "--output-dir", str(tmp_path / "bpe"), "--vocab-size", "270"])
    settings = {**CLASSIC, "vocab_size": 500}
    values = random_tensors(ModelConfig(**settings))
    files = {"vocab_file": str(tmp_path / "bpe/vocab.json"), "merge_file": str(tmp_path / "bpe/merges.txt")}
    flags: dict[str, Any] = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_size": None,
        "padded_vocab_size": 500,
        **files,
    }
    write_torch(tmp_path / "theirs", settings, values, style="core", padded=500, **flags)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    found = read_native(tmp_path / "ours")
    tokenizer = build_tokenizer(found.tokenizer)
    assert found.model.vocab_size == tokenizer.vocab_size < 500
    assert found.tokenizer.vocab_file == str(tmp_path / "ours/iter_0000500/tokenizer/vocab.json")
    state = json.loads((tmp_path / "ours/iter_0000500/run.json").read_text())["state"]
    assert state["tokenizer"]["fingerprint"] == tokenizer.fingerprint
