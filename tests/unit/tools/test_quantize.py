"""Quantizing a checkpoint as a user does it: flags, other programs' names, and nothing half-written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.core.conversion import native
from megatron.core.conversion.native import read_native
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.loop import train_from_start_to_end
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_sentence, expect_error
from tools.quantize import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model."""
    folder = tmp_path_factory.mktemp("quantize") / "run"
    config = tiny_config(f"--mock-data --train-iters 1 --save {folder}")
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)
    return folder


@pytest.mark.parametrize(
    ("flags", "scheme"),
    [
        ("--scheme int4 --group-size 16", "int4"),
        ("--export-quant-cfg INT8_WEIGHT_ONLY_CFG --tensor-model-parallel-size 2 --export-kv-cache-quant none", "int8"),
    ],
)
def test_a_checkpoint_is_quantized_once(
    flags: str, scheme: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM's names are taken; what is quantized can't be quantized again, and nothing is overwritten."""
    there = str(tmp_path / "made")
    assert main(["--load", str(run), "--save", there, *flags.split()]) == 0
    made = read_native(tmp_path / "made")
    assert made.quantization is not None and made.quantization.scheme.name == scheme
    assert len(made.quantization.scales) == 8
    assert there in capsys.readouterr().out
    with expect_error(CheckpointError, f"--save {there}"):
        main(["--load", str(run), "--save", there, *flags.split()])
    with expect_error(CheckpointError, "--load", scheme, "rtn"):
        main(["--load", there, "--save", str(tmp_path / "again"), *flags.split()])


def test_rounded_again_after_rounded_training_it_keeps_its_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model trained in groups of 8 and quantized in groups of 16 was rounded to groups of 8 wherever it was loaded.

    Of which groups it was trained in, nothing was said.
    """
    trained, made = tmp_path / "trained", tmp_path / "made"
    qat = "--quantization-aware-training int4 --qat-group-size 8"
    config = tiny_config(f"--mock-data --train-iters 1 --save {trained} {qat}")
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)
    capsys.readouterr()
    assert main(["--load", str(trained), "--save", str(made), *["--scheme", "int4", "--group-size", "16"]]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "aware" in line]
    check_sentence(notes[0], "--quantization-aware-training int4", "--qat-group-size 8")
    portable = read_native(made)
    assert QuantizationTrainingConfig.among(portable.groups).rounding is None
    assert QuantizationTrainingConfig.among(read_native(trained).groups).rounding == ("int4", 8)
    assert portable.notes and "aware" not in " ".join(portable.notes)


def test_mistakes(run: Path, tmp_path: Path) -> None:
    """Before any work: texts that are missing, and grids that there are not."""
    paths = ["--load", str(run), "--save", str(tmp_path / "made")]
    for flags, facts in (
        ("--scheme int4 --group-size 16 --method gptq", ("--method gptq", "--data-path")),
        ("--scheme fp8-tensor", ("--scheme fp8-tensor", "--data-path")),
        ("--scheme int8 --kv-cache-scales fp8", ("--kv-cache-scales fp8", "--data-path")),
        ("--export-quant-cfg NVFP4_DEFAULT_CFG", ("--export-quant-cfg", "INT4_AWQ_CFG", "FP8_DEFAULT_CFG")),
        ("--export-quant-cfg MXFP8_DEFAULT_CFG", ("--export-quant-cfg", "FP8_PER_CHANNEL_PER_TOKEN_CFG")),
        ("--export-quant-cfg fp8_blockwise", ("convert.py", "fp8-block")),
        ("--export-quant-cfg INT3_CFG", ("INT3_CFG", "INT4_AWQ_CFG", "int8_sq")),
        ("--scheme int8 --export-kv-cache-quant nvfp4", ("--export-kv-cache-quant nvfp4", "fp8")),
        ("--scheme int8 --auto-quantize-bits 4.8", ("--auto-quantize-bits 4.8", "--quantize-ignore")),
        ("--scheme int8 --export-real-quant-cfg fp8_blockwise_real_quant", ("fp8-block",)),
    ):
        with expect_error(ConfigError, *facts):
            main([*paths, *flags.split()])
    assert not (tmp_path / "made").exists()


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a checkpoint would be taken for a whole one."""

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new" / "made"))

    monkeypatch.setattr(native, "save_streamed", full)
    with expect_error(CheckpointError, "No space left", "nothing was left", exit_code=1):
        main(["--load", str(run), "--save", str(tmp_path / "new" / "made"), "--scheme", "int8"])
    assert not (tmp_path / "new").exists()
