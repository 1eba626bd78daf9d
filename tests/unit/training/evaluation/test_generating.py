"""The flags of generation must reach the engine, and those that can't work must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.core.inference import products
from megatron.core.inference.engine import Engine
from megatron.core.inference.products import INT8
from megatron.core.inference.request import Request, Result
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import TrainedModel, _for_inference, trained_model
from megatron.training.evaluation import generating
from megatron.training.evaluation.generating import exactness, generation_engine, limits_of, weights_form
from tests.harness.evaluation import small_gpt2
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_line, check_sentence, expect_error


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and smaller ones."""
    sizes = {"model": (4, 64), "small": (1, 64), "short": (1, 32)}
    return {
        name: small_gpt2(tmp_path_factory.mktemp(name), layers=layers, positions=positions).native
        for name, (layers, positions) in sizes.items()
    }


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path]) -> Iterator[TrainedModel]:
    with trained_model(
        TrainedModelConfig(load=str(folders["model"])), {"gpt": GPTSpec()}, launch_environment({})
    ) as it:
        yield it


def answers(trained: TrainedModel, **settings: Any) -> tuple[list[Result], Engine]:
    requests = [
        Request(id=str(n), prompt=(5 + n, 6, 7), max_tokens=20, sampling=Sampling(temperature=n % 2), seed=n)
        for n in range(4)
    ]
    with generation_engine(trained, InferenceConfig(**settings)) as engine:
        assert engine is not None
        return engine.generate(requests), engine


def test_drafts_change_steps_and_never_the_text(trained: TrainedModel, folders: dict[str, Path]) -> None:
    """The model itself as its draft is always right, so that three of four steps are saved."""
    expected, plain = answers(trained)
    assert len({result.text for result in expected}) == 4
    settings: list[tuple[dict[str, Any], float]] = [
        ({"num_speculative_tokens": 3}, 1.0),
        ({"num_speculative_tokens": 3, "draft_load": str(folders["small"])}, 1.0),
        ({"num_speculative_tokens": 3, "draft_load": str(folders["model"])}, 0.3),
        ({"inference_max_requests": 2, "inference_dynamic_batching_block_size": 4}, 2.1),
    ]
    for changed, share in settings:
        found, engine = answers(trained, **changed)
        assert [result.text for result in found] == [result.text for result in expected]
        assert engine.statistics.steps <= share * plain.statistics.steps


def test_memory_is_what_texts_need_or_what_is_allowed(trained: TrainedModel) -> None:
    """A cache of gigabytes for a model of a megabyte, or one that the machine doesn't have."""
    assert limits_of([trained], InferenceConfig()).num_blocks == 1 + 32
    assert limits_of([trained], InferenceConfig()).max_length == 64
    per_token = 4 * 2 * 32 * 4  # layers, keys and values, width, bytes
    little = InferenceConfig(inference_dynamic_batching_buffer_size_gb=5.5 * 16 * per_token / 2**30)
    config = InferenceConfig(**{**vars(little), "inference_dynamic_batching_block_size": 16})
    assert limits_of([trained], config).num_blocks == 5
    assert limits_of([trained], InferenceConfig(inference_max_seq_length=9)).max_length == 9


def test_refuses_settings_that_cannot_work(trained: TrainedModel, folders: dict[str, Path]) -> None:
    draft = {"num_speculative_tokens": 2, "draft_load": str(folders["short"])}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"inference_dynamic_batching_buffer_size_gb": 1e-6}, "2"),
        ({"inference_max_requests": 600}, "--inference-max-requests 600"),
        ({"draft_load": str(folders["small"])}, "--num-speculative-tokens"),
        (draft, "--inference-max-seq-length 32"),
    ]
    for settings, fact in cases:
        with expect_error(ConfigError, fact):
            answers(trained, **settings)
    assert answers(trained, **draft, inference_max_seq_length=32)[0]


def test_stages_must_divide_ranks_and_layers(folders: dict[str, Path]) -> None:
    choice = TrainedModelConfig(load=str(folders["model"]))
    stages = trained_model(
        choice,
        {"gpt": GPTSpec()},
        launch_environment({}),
        layout=TrainedModelLayoutConfig(pipeline_model_parallel_size=2),
    )
    with expect_error(ConfigError, "--pipeline-model-parallel-size", "2", "1 ranks"), stages:
        pass


@pytest.mark.parametrize(
    ("flags", "parts", "facts"),
    [
        ("--num-experts 4 --moe-ffn-hidden-size 6", 4, ["6 columns", "start 1 or 2"]),
        (
            "--num-experts 4 --moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 9",
            2,
            ["9 columns", "shared experts", "start 1"],
        ),
        ("--ffn-hidden-size 30", 4, ["30 columns", "start 1 or 2"]),
        ("", 3, ["4 heads", "64 columns", "start 1, 2"]),
    ],
)
def test_layers_must_divide_over_ranks(flags: str, parts: int, facts: list[str]) -> None:
    """A width of experts that doesn't was a traceback on every rank."""
    saved = tiny_config(f"--mock-data --num-attention-heads 4 --num-layers 2 {flags}")
    choice = TrainedModelConfig(load="runs/mine")
    with expect_error(ConfigError, f"{parts} ranks", "runs/mine", *facts):
        _for_inference(saved, choice, parts, 1)
    assert _for_inference(saved, choice, 2, 2).parallel.tensor_model_parallel_size == 1


def test_says_how_exact_generation_is(trained: TrainedModel) -> None:
    """A user who compares two runs, or reproduces one, must know whether neighbours may have changed a text."""
    check_line(exactness(trained, InferenceConfig()), "float32")
    check_sentence(exactness(trained, InferenceConfig(), together=False), "float32")  # one text at a time
    check_sentence(exactness(trained, InferenceConfig(batch_invariant=True)), "float32")
    half = replace(trained, context=replace(trained.context, dtype=torch.bfloat16))
    check_sentence(exactness(half, InferenceConfig()), "bfloat16")
    ranks = replace(trained, context=replace(trained.context, mesh=Mesh.of(tp=2, pp=2)))
    check_line(exactness(ranks, InferenceConfig()), "float32", "2 tensor x 2 pipeline-parallel ranks")


def test_quantization_is_for_bf16_and_fp32_models(trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was no setting. Processors without its products refuse it."""
    config = InferenceConfig(quantization="int8")
    wide = replace(trained, context=replace(trained.context, dtype=torch.float64))
    with expect_error(ConfigError, "--quantization int8", "float64"):
        weights_form(wide, config)
    monkeypatch.setattr(products, "_works", lambda form, dtype: "this torch or processor computes it wrongly")
    with expect_error(ConfigError):
        weights_form(trained, config)
    monkeypatch.setattr(products, "_works", lambda form, dtype: None)
    assert weights_form(trained, config) is INT8
    half = replace(trained, context=replace(trained.context, dtype=torch.bfloat16))
    assert weights_form(half, config) is INT8
    check_line(exactness(half, config), "bfloat16", "int8")
    assert weights_form(trained, InferenceConfig()) is None


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--bf16 --fp8-format e4m3 --fp8-recipe delayed"])
def test_a_model_in_16_bits_is_computed_in_fp32_on_request(flags: str) -> None:
    """On a processor without instructions for bf16 nothing made a single text of a bf16 model as fast as in fp32."""
    saved = tiny_config(f"--mock-data --num-attention-heads 4 --num-layers 2 {flags}")
    found = _for_inference(saved, TrainedModelConfig(load="runs/mine", fp32=True), 1, 1)
    assert found.precision.params_dtype == "fp32" and not found.fp8.is_on
    assert _for_inference(saved, TrainedModelConfig(load="runs/mine"), 1, 1).precision == saved.precision


def test_a_processor_without_bf16_says_what_is_faster(trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wondered why a small model was slow was told nothing."""
    monkeypatch.setattr(generating, "lacks_bf16", lambda: True)
    narrow = replace(trained, context=ModelContext.single(dtype=torch.bfloat16))
    check_line(exactness(narrow, InferenceConfig()), "--fp32")
    assert "--fp32" not in exactness(trained, InferenceConfig())
    monkeypatch.setattr(generating, "lacks_bf16", lambda: False)
    assert "--fp32" not in exactness(narrow, InferenceConfig())
