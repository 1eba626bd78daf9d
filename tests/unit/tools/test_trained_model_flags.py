"""Launch lines of Megatron-LM's text-generation server, whose flags are mostly those of training."""

from __future__ import annotations

import shlex

import pytest

from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.core.models.trained_model_flags import parse_with_trained_model
from megatron.errors import ConfigError
from megatron.serving.settings import FLAGS_OF_REQUESTS, ServerConfig
from tests.harness.sentences import check_line, expect_error

LINES = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024"
    " --load runs/mine --num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer --fp16"
    " --micro-batch-size 1 --seq-length 1024 --out-seq-length 1024 --temperature 1.0 --vocab-file v --merge-file m"
    " --top_p 0.9 --seed 42",
    "--load runs/mine --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --use-checkpoint-args"
    " --max-tokens-to-oom 12000000 --port 5000 --micro-batch-size 1",
    "--port 5000 --expert-model-parallel-size 4 --tokenizer-type HuggingFaceTokenizer --tokenizer-model t"
    " --load runs/mine --use-mcore-models --swiglu --bf16 --num-experts 60 --moe-router-topk 4 --use-flash-attn"
    " --transformer-impl transformer_engine --no-masked-softmax-fusion --no-position-embedding --decoder-num-layers 2",
)
"""As public scripts write them."""


def parse(line: str) -> tuple[ServerConfig, TrainedModelConfig, TrainedModelLayoutConfig]:
    """The settings of a server's command line."""
    groups = (ServerConfig, TrainedModelConfig, TrainedModelLayoutConfig)
    server, choice, layout = parse_with_trained_model(shlex.split(line), *groups, prog="x", legacy=FLAGS_OF_REQUESTS)
    return server, choice, layout


@pytest.mark.parametrize("line", LINES)
def test_public_launch_lines_start_the_server(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag is a setting of the server, or a remark says that it has no effect."""
    server, choice, layout = parse(line)
    assert (server.port, choice.load) == (5000, "runs/mine")
    said = capsys.readouterr().err
    settings = ["--load", "--port", "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"]
    settings += ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
    for flag in (word for word in shlex.split(line) if word.startswith("--")):
        assert (flag in said) != (flag in settings)
    if "--seed" in line:
        assert said.count("\n") == 2
        check_line(said, "checkpoint")
        check_line(said, "--temperature 1.0", "--top_p 0.9")
    assert layout.tensor_model_parallel_size == (None if "--expert" in line else 8 if "to-oom" in line else 1)


def test_other_flags_are_still_mistakes() -> None:
    with expect_error(ConfigError, "--num-layer"):
        parse("--load runs/mine --num-layer 24")


def test_layout_is_that_of_the_ranks_that_were_started() -> None:
    asked = TrainedModelLayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    asked.check(4)
    TrainedModelLayoutConfig(pipeline_model_parallel_size=3).check(4)  # refused with the model's number of layers
    with expect_error(ConfigError, "--pipeline-model-parallel-size 2", "4", "1"):
        asked.check(1)
