"""Several adapters beside one model: each text has its own, whatever else is in the batch and wherever ranks are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.config.inference import InferenceConfig
from megatron.config.lora import LoraConfig, is_adapter
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.peft.reading import with_peft
from megatron.core.conversion.peft.writing import write_peft
from megatron.core.conversion.portable import LazyTensor, parameters_of
from megatron.core.inference.request import Request
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.checkpoints.several_adapters import load_adapters, named_folders
from megatron.training.checkpoints.trained_model import chosen_run, load_model
from megatron.training.evaluation.generating import generation_engine
from tests.harness.ranks import run_ranks
from tests.harness.runs import saved_model
from tests.harness.sentences import expect_error
from tests.unit.training.checkpoints.test_adapters import trained
from tools.generation.families import GENERATIVE

LLAMA = (
    "--swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --normalization "
    "RMSNorm --position-embedding-type rope --disable-bias-linear --num-layers 2 --seq-length 32 "
    "--max-position-embeddings 32"
)
PROMPT = (5, 9, 3, 1, 7, 7, 3, 2, 11, 0, 4, 8)
ASKED = [(PROMPT, 0), (PROMPT, 1), (PROMPT, 2), ((*PROMPT, 5), 1), ((*PROMPT, 5), 2), (PROMPT[:3], 0), (PROMPT, 2)]
Answer = tuple[list[int], list[float], int]


@dataclasses.dataclass(frozen=True)
class Folders:
    """A base, two adapters of it (a checkpoint and a PEFT folder), and the model with each of them alone."""

    base: str
    adapters: tuple[str, ...]
    alone: tuple[str, ...]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    saved_model(root, "gpt", flags=LLAMA)
    base, one, peft, two = root / "saved", root / "one", root / "peft", root / "two"
    trained(base, f"{LLAMA} --lora-rank 2 --lora-alpha 6 --lr 0.3", one)
    plain = read_native(base)
    lora = LoraConfig(lora_rank=3, lora_alpha=5.0, lora_targets=("q_proj", "v_proj", "linear_proj", "linear_fc2"))
    groups, tensors, generator = (*plain.groups, lora), dict(plain.tensors), torch.Generator().manual_seed(1)
    for name, layout in parameters_of(plain.model, groups).items():
        if is_adapter(name):
            drawn = torch.randn(layout.shape, generator=generator) * 0.5
            tensors[name] = LazyTensor(tuple(layout.shape), torch.float32, drawn.clone)
    write_peft(dataclasses.replace(plain, tensors=tensors, groups=groups), peft, base=None)
    write_native(with_peft(plain, peft), two, final=two)
    return Folders(str(base), (f"one={one}", f"two={peft}"), (str(base), str(one), str(two)))


def generated(
    context: ParallelContext, load: str, adapters: tuple[str, ...], asked: list[tuple[tuple[int, ...], int]]
) -> list[Answer] | None:
    """Tokens, their log-probabilities and cached tokens of prompts with adapters, in one batch; None off rank 0."""
    mesh = context.mesh
    config, train_spec = chosen_run(TrainedModelConfig(load=load), GENERATIVE, mesh.world_size, mesh.size("pp"))
    settings = InferenceConfig(lora_modules=adapters, inference_dynamic_batching_block_size=4)
    with generation_engine(load_model(config, train_spec, context), settings) as engine:
        if engine is None:
            return None
        requests = [
            Request(id=str(number), prompt=prompt, max_tokens=8, logprobs=0, seed=1, adapter=adapter)
            for number, (prompt, adapter) in enumerate(asked)
        ]
        found = engine.generate(requests)
        with pytest.raises(DataError):
            engine.check(dataclasses.replace(requests[0], adapter=len(adapters) + 1))
    return [
        (
            [token.id for token in each.tokens],
            [token.logprobs.logprob for token in each.tokens if token.logprobs],
            each.cached_tokens,
        )
        for each in found
    ]


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_each_text_has_its_own_adapter(tp: int, pp: int, folders: Folders) -> None:
    """A text had the adapter of its neighbour in the batch, or the keys and values of another's equal prompt."""
    context = ParallelContext.single(dtype=torch.float64)
    alone = [generated(context, folders.alone[adapter], (), [(prompt, 0)]) for prompt, adapter in ASKED]
    together = generated(context, folders.base, folders.adapters, ASKED)
    ranks = run_ranks(generated, folders.base, folders.adapters, ASKED, tp=tp, pp=pp, dtype=torch.float64)
    for batch in (together, ranks[0]):
        assert batch is not None
        for one, wanted in zip(batch, alone):
            assert wanted is not None
            assert one[0] == wanted[0][0]
            assert one[1] == pytest.approx(wanted[0][1], rel=1e-9, abs=1e-9)
    assert together is not None
    assert together[0][1][0] != pytest.approx(together[1][1][0]) != pytest.approx(together[2][1][0])
    assert [each[2] for each in together] == [0, 0, 0, 12, 12, 0, 8]


def test_adapters_that_cannot_be_beside_others_are_refused(folders: Folders, tmp_path: Path) -> None:
    """An adapter of another base answers, and answers wrongly."""
    context = ParallelContext.single()

    def loaded(load: str, *given: str) -> None:
        config, train_spec = chosen_run(TrainedModelConfig(load=load), GENERATIVE, 1, 1)
        load_adapters(load_model(config, train_spec, context), named_folders(given))

    base, (_, one, two) = folders.base, folders.alone
    (tmp_path / "other").mkdir()
    saved_model(tmp_path / "other", "gpt", flags=f"{LLAMA} --seed 5")
    wide = tmp_path / "wide"
    trained(Path(base), f"{LLAMA} --lora-rank 2 --train-only *layernorm*", wide)
    for load, given, facts in (
        (one, f"a={one}", ("--load", "one", "--lora-modules")),
        (str(tmp_path / "other" / "saved"), f"a={one}", ("a=", "saved", "--load")),
        (base, f"a={base}", ("a=", "--load")),
        (base, f"a={two}", ("a=", "--to peft")),
        (base, f"a={wide}", ("decoder.layers.0.input_layernorm.weight", "--train-only")),
        (base, f"a={tmp_path / 'nothing'}", ("nothing",)),
    ):
        with expect_error(CheckpointError, *facts):
            loaded(load, given)
    for names, facts in (
        (("a",), ("'a'", "NAME=FOLDER")),
        (("a=b", "a=c"), ("two adapters 'a'",)),
        (tuple(f"a{number}=b" for number in range(65)), ("65", "64")),
    ):
        with expect_error(ConfigError, *facts):
            named_folders(names)


def refusal(context: ParallelContext, load: str, adapter: str) -> str:
    """What a rank says that refuses an adapter."""
    try:
        generated(context, load, (adapter,), [])
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flags", ["--lora-targets linear_fc1", "--lora-rank 2 --train-only decoder.layers.1.*norm*"])
def test_every_rank_refuses_what_one_stage_does(flags: str, tmp_path: Path) -> None:
    """Experts, or what was trained beside adapters, may lie on one stage of the pipeline: the other waited for it."""
    model = f"{LLAMA} --num-experts 2 --moe-router-topk 2 --moe-layer-freq [0,1]"
    saved_model(tmp_path, "gpt", flags=model)
    trained(tmp_path / "saved", f"{model} --lora-rank 2 {flags}", tmp_path / "adapter")
    said = run_ranks(refusal, str(tmp_path / "saved"), f"a={tmp_path / 'adapter'}", pp=2, timeout=60)
    assert all("linear_fc1" in each or "decoder.layers.1" in each for each in said), said
