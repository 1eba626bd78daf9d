"""Adapters beside a base that stays in few bits: the same numbers, in a part of the memory, at every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.config.lora import is_adapter
from megatron.core.parallel.context import ParallelContext
from megatron.core.quantization.stored import StoredWeights
from megatron.errors import ConfigError
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks
from tests.harness.runs import axes_of, context_of, saved_model, tiny_config, tiny_run
from tests.harness.sentences import expect_error
from tests.unit.training.evaluation.test_stored_weights import SCHEMES, quantized

MODEL = (
    "--swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --hidden-size 32 "
    "--ffn-hidden-size 48 --num-layers 2"
)
LORA = "--lora-rank 2 --lora-alpha 6 --lr 0.1"
LAYOUTS = {
    "one rank": "",
    "tp2 sp, pp2": "--world-size 4 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    "dp2 zero 2, recomputed": "--world-size 2 --zero-stage 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "tp2 cp2": "--world-size 4 --tensor-model-parallel-size 2 --context-parallel-size 2",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model whose weights lie on a grid, by scheme; and the plain one."""
    root = tmp_path_factory.mktemp("bases")
    saved_model(root, "gpt", flags=MODEL)
    found = {"none": root / "saved"}
    return found | {name: quantized(root / "saved", root / name, scheme) for name, scheme in SCHEMES.items()}


def adapters_after(context: ParallelContext, flags: str) -> tuple[dict[str, Tensor], int, int]:
    """This rank's adapters after two steps, and bytes of its frozen weights as numbers and as codes."""
    run = tiny_run(context_of(tiny_config(flags, ranks=context.mesh.world_size), context), flags)
    load(run)
    batches = run.data.training_batches(0)
    for _ in range(2):
        train_step(run, next(batches))
    parameters = [(name, each) for model in run.models for name, each in model.named_parameters()]
    held = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for _, each in parameters}.values())
    codes = run.context.operands.nbytes if isinstance(run.context.operands, StoredWeights) else 0
    return {name: each.detach().clone() for name, each in parameters if is_adapter(name)}, held, codes


def both(context: ParallelContext, flags: str) -> tuple[int, int, int]:
    """Train beside numbers and beside codes; bytes of weights as numbers, what is left of them, and of codes."""
    plain, before, _ = adapters_after(context, flags)
    found, after, codes = adapters_after(context, f"{flags} --lora-quantized-base")
    assert all(bool(each.any()) for each in found.values())
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    return before, after, codes


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("int8", "one rank"),
        ("int4-asym", "tp2 sp, pp2"),
        pytest.param("int4-asym", "one rank", marks=pytest.mark.slow),
        pytest.param("int8", "tp2 cp2", marks=pytest.mark.slow),
        pytest.param("int8", "dp2 zero 2, recomputed", marks=pytest.mark.slow),
        pytest.param("int4-asym", "dp2 zero 2, recomputed", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_the_same_beside_codes(scheme: str, layout: str, bases: dict[str, Path]) -> None:
    """The base was another one in few bits than in numbers, or kept its numbers beside its codes."""
    words = LAYOUTS[layout].split()
    world = int(words[1]) if words[:1] == ["--world-size"] else 1
    flags = f"--mock-data {MODEL} {LORA} {' '.join(words[2:])} --pretrained-checkpoint {bases[scheme]}"
    if world == 1:
        outcomes = [both(ParallelContext.single(), flags)]
    else:
        outcomes = run_ranks(both, flags, **axes_of(tiny_config(flags, ranks=world)))
    for before, after, codes in outcomes:
        assert 0 < codes < (before - after) / 2


def test_a_run_beside_codes_goes_on_from_its_checkpoint(bases: dict[str, Path], tmp_path: Path) -> None:
    """A resumed run had numbers that its checkpoint doesn't hold: those of a base without codes, or none at all."""
    saving = f"--mock-data {MODEL} {LORA} --lora-quantized-base --save {tmp_path} "
    run = tiny_run(ParallelContext.single(), f"{saving} --pretrained-checkpoint {bases['int8']}")
    load(run)
    batches = run.data.training_batches(0)
    train_step(run, next(batches))
    run.progress.iteration = 1
    Saver(run).save()
    resumed = tiny_run(ParallelContext.single(), f"{saving} --load {tmp_path}")
    load(resumed)
    second = next(batches)
    for each in (run, resumed):
        train_step(each, second)
    pairs = zip(run.models[0].named_parameters(), resumed.models[0].parameters())
    assert all(torch.equal(one, other) for (name, one), other in pairs if is_adapter(name))

    for flags, facts in {
        f"{LORA} --lora-quantized-base --pretrained-checkpoint {bases['none']}": ("--lora-quantized-base", "saved"),
        f"{LORA} --lora-quantized-base --pretrained-checkpoint {bases['int8']} --save {bases['int8']}": (
            "--save",
            "int8",
        ),
    }.items():
        with expect_error(ConfigError, *facts):
            load(tiny_run(ParallelContext.single(), f"--mock-data {MODEL} {flags}"))
    for flags, named in {
        f"{LORA} --lora-quantized-base --pretrained-checkpoint some --zero-stage 3": ("--zero-stage 3",),
        f"{LORA} --lora-quantized-base --pretrained-checkpoint some --log-params-norm": ("--log-params-norm",),
        "--lora-quantized-base": ("--lora-quantized-base", "--lora-rank"),
    }.items():
        with expect_error(ConfigError, *named):
            tiny_run(ParallelContext.single(), f"--mock-data {flags}")
