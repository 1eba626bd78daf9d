"""A quantized checkpoint in generation: weights stay in its bits, on every rank, and texts are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import LazyScales, LazyTensor, Quantization, parameters_of
from megatron.core.inference.request import Request
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.mesh import Mesh
from megatron.core.quantization.grid import codes_of, scales_of, values_of_codes
from megatron.core.quantization.scheme import Scheme, scheme_named
from megatron.core.quantization.targets import is_quantized
from megatron.errors import ConfigError
from megatron.training.checkpoints.stored_parts import part_of
from megatron.training.checkpoints.trained_model import TrainedModel, trained_model
from megatron.training.evaluation.generating import generation_engine
from megatron.training.evaluation.stored_weights import stored_weights
from tests.harness.evaluation import small_gpt2
from tests.harness.sentences import check_sentence, expect_error

SCHEMES = {"int8": scheme_named("int8"), "int4-asym": scheme_named("int4-asym", group_size=16)}


def lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(torch.clone, tensor))


def quantized(source: Path, target: Path, scheme: Scheme) -> Path:
    """The checkpoint in ``source`` with all weights of linear layers on a grid."""
    portable = read_native(source)
    tensors, scales, grid = dict(portable.tensors), dict[str, LazyScales](), scheme.weights
    for name, tensor in portable.tensors.items():
        if is_quantized(name):
            weight = tensor.make()
            held = scales_of(weight, grid)
            tensors[name] = lazy(values_of_codes(codes_of(weight, held, grid), held, grid, weight.dtype))
            scales[name] = LazyScales(lazy(held.factors), None if held.zeros is None else lazy(held.zeros))
    model = dataclasses.replace(portable, tensors=tensors, quantization=Quantization(scheme, scales))
    write_native(model, target, final=target)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gpt2(tmp_path_factory.mktemp("model"), layers=2).native


@pytest.fixture(scope="module", params=SCHEMES)
def trained(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainedModel]:
    folder = quantized(source, tmp_path_factory.mktemp("few") / "few", SCHEMES[request.param])
    with trained_model(TrainedModelConfig(load=str(folder)), {"gpt": GPTSpec()}, launch_environment({})) as it:
        yield it


def texts(trained: TrainedModel, quantization: str | None, *, releases: bool = False) -> list[str]:
    requests = [Request(id=str(n), prompt=(5 + n, 6, 7), max_tokens=16) for n in range(3)]
    config = InferenceConfig(quantization=quantization)  # type: ignore[arg-type]
    with generation_engine(trained, config, releases=releases) as engine:
        assert engine is not None
        return [result.text for result in engine.generate(requests)]


def test_texts_are_those_of_the_numbers(trained: TrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """In a half or a quarter of the memory; the report says how much."""
    found = stored_weights(trained)
    assert len(found.forms) == 8 and found.others == 0
    expected = texts(trained, None)
    capsys.readouterr()
    assert len(set(expected)) == 3 and texts(trained, "stored") == expected
    check_sentence(capsys.readouterr().err.splitlines()[0], "8 weights", found.scheme)


def test_weights_that_lie_on_no_grid(source: Path) -> None:
    """Nothing was said to be in few bits that isn't."""
    choice = TrainedModelConfig(load=str(source))
    with (
        trained_model(choice, {"gpt": GPTSpec()}, launch_environment({})) as plain,
        expect_error(ConfigError, "--quantization stored", "not quantized", "tools/quantize.py"),
    ):
        stored_weights(plain)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_part_of_the_scales(source: Path, ranks: int) -> None:
    """Of gates and heads that ranks divide, and of inputs whose groups begin on another rank."""
    portable, scheme = read_native(source), scheme_named("int4", group_size=32)
    grid = scheme.weights
    for name, sharding in parameters_of(portable.model, portable.groups).items():
        if not is_quantized(name):
            continue
        weight = portable.tensors[name].make()
        held = scales_of(weight, grid)
        codes = codes_of(weight, held, grid)
        for rank in range(ranks):
            mesh = Mesh.of(tp=ranks, rank=rank)
            own, wanted = (torch.zeros(sharding.local_shape(mesh)) for _ in range(2))
            for piece in sharding.pieces(mesh):
                own[piece.slices(of_local=True)] = weight[piece.slices(of_local=False)]
                wanted[piece.slices(of_local=True)] = codes[piece.slices(of_local=False)].float()
            part = part_of(LazyScales(lazy(held.factors)), grid, own, sharding, mesh)
            assert torch.equal(part.codes(own).float(), wanted), (name, rank)
