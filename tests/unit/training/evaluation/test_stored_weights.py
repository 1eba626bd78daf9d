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
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import LazyScales, LazyTensor, Quantization, parameters_of
from megatron.core.inference.request import Request
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.moe.experts import StackedLinear
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
from tests.harness.published import random_model
from tests.harness.sentences import check_sentence, expect_error
from tests.published import MODELS

WITH_EXPERTS = pytest.mark.slow(reason="the same products of other experts")

SCHEMES = {"int8": scheme_named("int8"), "int4-asym": scheme_named("int4-asym", group_size=16)}


def lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(torch.clone, tensor))


def quantized(source: Path, target: Path, scheme: Scheme) -> Path:
    """The checkpoint in ``source`` with all weights of linear layers on a grid."""
    portable = read_native(source)
    tensors, scales, grid = dict(portable.tensors), dict[str, LazyScales](), scheme.weights
    for name, tensor in portable.tensors.items():
        if is_quantized(name):
            weight, rows = tensor.make(), tensor.shape[:-1]  # of experts, more than one dimension
            matrix = weight.flatten(0, -2)
            held = scales_of(matrix, grid)
            values = values_of_codes(codes_of(matrix, held, grid), held, grid, weight.dtype)
            tensors[name] = lazy(values.view(weight.shape))
            zeros = None if held.zeros is None else lazy(held.zeros.view(*rows, -1))
            scales[name] = LazyScales(lazy(held.factors.view(*rows, -1)), zeros)
    model = dataclasses.replace(portable, tensors=tensors, quantization=Quantization(scheme, scales))
    write_native(model, target, final=target)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gpt2(tmp_path_factory.mktemp("model"), layers=2).native


EXPERTS = {
    "mixtral": (12, 0),
    "qwen2_moe": (18, 0),
    "qwen3_moe": (12, 0),
    "deepseek_v3": (22, 3),
    "gpt_oss": (12, 0),
}
"""How many weights stay in few bits, and how many don't."""
OTHERS = {"mixtral": "int8", "qwen2_moe": "int4", "qwen3_moe": "int4-asym", "gpt_oss": "int4"}
OF_EXPERTS = {
    "int8": scheme_named("int8"),
    "int4-asym": scheme_named("int4-asym", group_size=16),
    "int4": scheme_named("int4", group_size=8),
    "fp8": scheme_named("fp8"),
}


def with_experts(name: str, folder: Path) -> Path:
    """A checkpoint of a random model with experts."""
    random_model(*MODELS[name]).save_pretrained(folder / "published")
    convert(Conversion("hf", folder / "published", "megatron", folder / "native", skip_proof=True), lambda line: None)
    return folder / "native"


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


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("deepseek_v3", "fp8"),
        *(pytest.param(name, scheme, marks=WITH_EXPERTS) for name, scheme in OTHERS.items()),
    ],
)
def test_experts_stay_in_few_bits(name: str, scheme: str, tmp_path: Path) -> None:
    """Experts are nearly all weights of a model that has some, and stayed numbers. Of latent attention, generation
    multiplies parts of one weight, which was said to be in few bits.
    """
    folder = quantized(with_experts(name, tmp_path), tmp_path / "few", OF_EXPERTS[scheme])
    with trained_model(TrainedModelConfig(load=str(folder)), {"gpt": GPTSpec()}, launch_environment({})) as few:
        found = stored_weights(few)
        assert (len(found.forms) + len(found.experts), found.others) == EXPERTS[name]
        expected = logprobs_of(few, None)
        assert len(expected) == 60 and expected.std() > 0.5
        # int8 rounds inputs of its products to 16 bits
        assert (logprobs_of(few, "stored") - expected).abs().max() < (1e-3 if scheme == "int8" else 1e-4)
        stacked = [each.weight for each in few.models[0].modules() if isinstance(each, StackedLinear)]
        assert stacked and all(weight.isnan().all() for weight in stacked)


def logprobs_of(trained: TrainedModel, quantization: str | None) -> Tensor:
    """Log-probabilities of the tokens of some texts; in few bits, the model is then of use to nobody else."""
    prompts = [tuple((7 * n + 5 * place) % 90 for place in range(21)) for n in range(3)]
    requests = [Request(id=str(n), prompt=each, max_tokens=1, prompt_logprobs=0) for n, each in enumerate(prompts)]
    config = InferenceConfig(quantization=quantization)  # type: ignore[arg-type]
    with generation_engine(trained, config, releases=quantization is not None) as engine:
        assert engine is not None
        found = [each.logprob for result in engine.generate(requests) for each in result.prompt_logprobs if each]
    return torch.tensor(found)


def test_weights_that_lie_on_no_grid(source: Path) -> None:
    """Nothing was said to be in few bits that isn't."""
    choice = TrainedModelConfig(load=str(source))
    with (
        trained_model(choice, {"gpt": GPTSpec()}, launch_environment({})) as plain,
        expect_error(ConfigError, "--quantization stored", "not quantized", "tools/quantize.py"),
    ):
        stored_weights(plain)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("dense", 2, marks=pytest.mark.slow(reason="as four")),
        ("dense", 4),
        pytest.param("experts", 2, marks=pytest.mark.slow(reason="as four")),
        ("experts", 4),
    ],
)
def test_a_ranks_part_of_the_scales(kind: str, ranks: int, source: Path, tmp_path: Path) -> None:
    """Of gates and heads that ranks divide, of experts, and of inputs whose groups begin on another rank."""
    portable = read_native(source if kind == "dense" else with_experts("qwen3_moe", tmp_path))
    scheme = scheme_named("int4", group_size=32 if kind == "dense" else 8)
    grid = scheme.weights
    for name, sharding in parameters_of(portable.model, portable.groups).items():
        if not is_quantized(name):
            continue
        weight = portable.tensors[name].make()
        held = scales_of(weight.flatten(0, -2), grid)
        codes = codes_of(weight.flatten(0, -2), held, grid).view(weight.shape)
        factors = held.factors.view(*weight.shape[:-1], -1)
        etp = 2 if kind == "experts" else None
        for rank in range(ranks):
            mesh = Mesh.of(tp=ranks, rank=rank, ep=ranks // 2 if kind == "experts" else 1, etp=etp)
            own, wanted = (torch.zeros(sharding.local_shape(mesh)) for _ in range(2))
            for piece in sharding.pieces(mesh):
                own[piece.slices(of_local=True)] = weight[piece.slices(of_local=False)]
                wanted[piece.slices(of_local=True)] = codes[piece.slices(of_local=False)].float()
            part = part_of(LazyScales(lazy(factors)), grid, own, sharding, mesh)
            assert torch.equal(part.codes(own.flatten(0, -2)).float(), wanted.flatten(0, -2)), (name, rank)
