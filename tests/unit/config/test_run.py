"""A run as a whole: resolved values, JSON, digest, batch sizes over time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.config import ParallelConfig, PrecisionConfig, RunConfig, TokenizerConfig
from megatron.config.batch_ramp import BatchRamp
from megatron.config.lora import LoraConfig
from megatron.config.moe import MoEConfig
from megatron.config.parse import parse_run
from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.config.saved_settings import in_current_names
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.registry import saved_run
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse, run_of, words

GOLDEN = Path(__file__).parents[2] / "golden"


def test_resolved_values() -> None:
    """What follows from several groups is filled in once and frozen."""
    run = run_of(ranks=4)
    assert run.training.global_batch_size == 8
    assert run.model.max_position_embeddings == 32
    assert run.tokenizer.tokenizer_type == "NullTokenizer"
    assert run.model.vocab_size == 100
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.world_size = 8  # type: ignore[misc]


def test_data_parallel_size() -> None:
    """What is left of the ranks when every copy of the model has its own."""
    run = parse("--tensor-model-parallel-size 2 --global-batch-size 24", ranks=6)
    assert (run.data_parallel_size, run.num_microbatches()) == (3, 4)


def test_nan_check_is_off_with_a_dynamic_loss_scale() -> None:
    """fp16 finds its loss scale by overflowing; a constant scale or bf16 has no reason to."""
    on = run_of().training
    for precision, expected in (
        (PrecisionConfig(fp16=True), False),
        (PrecisionConfig(fp16=True, loss_scale=8.0), True),
        (PrecisionConfig(bf16=True), True),
    ):
        run = dataclasses.replace(run_of(), precision=precision)
        assert (on.check_for_nan_in_loss_and_grad, run.training.check_for_nan_in_loss_and_grad) == (True, expected)


def test_sequence_parallelism_needs_several_tensor_ranks() -> None:
    """As in Megatron-LM the switch is off on one rank."""
    off = dataclasses.replace(run_of(), parallel=ParallelConfig(sequence_parallel=True))
    on = ParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2)
    assert not off.parallel.sequence_parallel
    assert dataclasses.replace(run_of(ranks=2), parallel=on).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("tokenizer", "mock", "kind"),
    [
        (TokenizerConfig(), False, "GPT2BPETokenizer"),
        (TokenizerConfig(), True, "GPT2BPETokenizer"),
        (TokenizerConfig(vocab_size=9), True, "NullTokenizer"),
        (TokenizerConfig(vocab_size=9), False, "GPT2BPETokenizer"),
        (TokenizerConfig(vocab_size=9, vocab_file="v"), True, "GPT2BPETokenizer"),
        (TokenizerConfig(vocab_size=9, tokenizer_type="TikTokenizer"), True, "TikTokenizer"),
    ],
)
def test_default_tokenizer(tokenizer: TokenizerConfig, mock: bool, kind: str) -> None:
    """GPT-2's, as in Megatron-LM; mock data of a given vocabulary needs none."""
    base = run_of()
    run = dataclasses.replace(base, tokenizer=tokenizer, data=dataclasses.replace(base.data, mock_data=mock))
    assert run.tokenizer.tokenizer_type == kind


def test_vocabulary_size() -> None:
    """The tokenizer's, or more when asked; less is an error. NullTokenizer adds one id to what was asked."""
    run = dataclasses.replace(run_of(), tokenizer=TokenizerConfig(), model=run_of(model={"vocab_size": None}).model)
    unknown = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=None))
    assert unknown.with_vocab_size(50257).padded_vocab_size == 50304
    asked = dataclasses.replace(unknown, tokenizer=TokenizerConfig(tokenizer_type="TikTokenizer", vocab_size=60000))
    assert asked.with_vocab_size(50257).model.vocab_size == 60000
    assert asked.with_vocab_size(50257).with_vocab_size(50257) == asked
    with expect_error(ConfigError, "--vocab-size 60000", "70000", "--vocab-size"):
        asked.with_vocab_size(70000)
    assert run_of().with_vocab_size(100) == run_of()


def test_json_round_trip() -> None:
    """A saved run is the run, through text; settings and their order don't matter to the digest."""
    run = parse(
        "--bf16 --train-samples 100 --rampup-batch-size 4 4 8 --global-batch-size 8 --tiktoken-special-tokens a b",
        without="--train-iters",
        ranks=2,
    )
    restored = RunConfig.from_json(json.loads(json.dumps(run.to_json())), groups=[type(each) for each in run.extra])
    assert restored == run
    assert restored.digest == run.digest
    assert restored.training.rampup_batch_size == (4, 4, 8)
    assert restored.data_parallel_size == 2


def test_a_familys_own_settings_come_back() -> None:
    """A BERT without a second head would be loaded, converted and shown as one with it."""
    bert = dataclasses.replace(
        run_of(),
        extra=(
            BertConfig(bert_binary_head=False, mask_prob=0.2),
            TokenTypesConfig(),
            MoEConfig(),
            LoraConfig(),
            QuantizationTrainingConfig(),
        ),
    )
    assert saved_run(json.loads(json.dumps(bert.to_json())), name="bert", where="x") == bert
    settings = bert.to_json()
    del settings["tokentypes"], settings["moe"], settings["lora"]  # which earlier versions had not
    assert saved_run(settings, name="bert", where="x") == bert
    assert saved_run(run_of().to_json(), name="gpt", where="x").extra == tuple(group() for group in GPT_GROUPS)


def test_digest_sees_every_setting_and_nothing_else() -> None:
    """Two ranks with unequal settings are found out; where a value came from is no setting."""
    assert parse().digest == parse("--hidden-size 64 --weight-decay 0.01").digest
    assert parse().digest != parse("--weight-decay 0.02").digest
    assert parse().digest != parse(ranks=2).digest
    assert parse("--dry-run").digest == parse().digest


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            ("model", "depth", 3),
            "model.depth",
        ),
        (("model", "num_layers", "x"), "model.num_layers"),
        (
            ("model", "num_layers", -3),
            "model.num_layers",
        ),
        (("model", "num_layers", None), "model.num_layers"),
    ],
)
def test_foreign_json(change: tuple[str, str, object], fact: str) -> None:
    """Settings of another version are refused by name, not half understood."""
    saved = run_of().to_json()
    group, name, value = change
    saved[group][name] = value
    with expect_error(ConfigError, fact):
        RunConfig.from_json(saved)


def test_activations_saved_as_five_switches() -> None:
    """Checkpoints of earlier versions have a switch for each; none is lost, and what else they say stays."""
    off = dict.fromkeys(("swiglu", "geglu", "relu", "squared_relu", "exact_gelu"), False)
    for on, activation in (
        ((), "gelu_tanh"),
        (("exact_gelu",), "gelu"),
        (("swiglu",), "swiglu"),
        (("geglu",), "geglu_tanh"),
        (("geglu", "exact_gelu"), "geglu"),
        (("relu",), "relu"),
        (("squared_relu",), "squared_relu"),
    ):
        run = run_of()
        saved = run.to_json()
        del saved["model"]["activation"]
        saved["model"] |= off | dict.fromkeys(on, True)
        found = RunConfig.from_json(in_current_names(saved, where="run.json", error=ConfigError))
        assert (found.model.activation, found.model.num_layers) == (activation, run.model.num_layers)
    assert in_current_names(run.to_json(), where="run.json", error=ConfigError) == run.to_json()
    saved["model"]["geglu"] = "yes"
    with expect_error(ConfigError, "run.json"):
        in_current_names(saved, where="run.json", error=ConfigError)


def test_older_json() -> None:
    """A setting that did not exist when the run was saved takes its default; one that was needed is missed."""
    saved = run_of().to_json()
    del saved["model"]["qk_layernorm"], saved["inference"]
    assert RunConfig.from_json(saved, groups=(GPTConfig,)) == run_of()
    del saved["model"]["num_layers"]
    with expect_error(ConfigError, "model.num_layers"):
        RunConfig.from_json(saved)


def test_diff_from_defaults() -> None:
    """What a start-up report shows: everything that was given or derived, nothing else."""
    assert parse("--weight-decay 0.01").diff_from_defaults() == parse().diff_from_defaults()
    found = parse("--weight-decay 0.02 --disable-bias-linear").diff_from_defaults()
    assert found["weight_decay"] == 0.02
    assert found["add_bias_linear"] is False
    assert "adam_eps" not in found


def test_ramp_equals_megatron() -> None:
    """Recorded from Megatron-LM 0.12: 8 to 32 by 8 over 100 samples, micro batch 2 on two replicas."""
    run = parse(
        "--train-samples 480 --global-batch-size 32 --rampup-batch-size 8 8 100", without="--train-iters", ranks=2
    )
    recorded = json.loads((GOLDEN / "rampup_v012.json").read_text())
    consumed = [(c, run.global_batch_size_at(c), run.num_microbatches(c)) for c, *_ in recorded]
    assert consumed == [tuple(row) for row in recorded]
    steps = [row for row in recorded if row[0] + row[1] <= 480]
    assert run.train_iters == len(steps)


def ramps() -> list[BatchRamp]:
    shapes = [(4, 4, 16), (2, 2, 8), (8, 8, 8), (1, 1, 5), (3, 5, 13)]
    steps = [
        [(0, 3)],
        [(0, 4), (1, 8)],
        [(0, 2), (6, 4), (7, 6), (8, 2)],
        [(0, 9), (40, 1)],
        [(0, 1), (5, 7), (300, 2)],
    ]
    return [
        *(
            BatchRamp.growing(start=a, increment=i, samples=n, full=full)
            for a, i, full in shapes
            for n in (0, 1, 7, 40)
        ),
        *map(BatchRamp.of_steps, steps),
    ]


def test_iterations_by_simulation() -> None:
    """Steps from samples and samples from steps agree with walking through the run step by step."""
    for ramp in ramps():
        starts = [ramp.start_of(index) for index in range(len(ramp.sizes))]
        walked, consumed = [0], 0
        while consumed < 400:
            reached = [size for start, size in zip(starts, ramp.sizes) if start <= consumed]
            assert ramp.size_at(consumed) == reached[-1]
            consumed += reached[-1]
            walked.append(consumed)
        for steps, samples in enumerate(walked[:-1]):
            assert ramp.samples_after(steps) == samples
            for between in range(samples, walked[steps + 1]):
                assert ramp.iterations(between) == steps


def test_a_schedule_as_megatron_reads_it() -> None:
    """Thresholds are tokens, in any order, with suffixes on both sides; the run would take other batches than there."""
    text = "0.128K:1k, 0:0.01K 96:20 160:20"
    for each in (text, text.replace(",", " "), text.replace(", ", ",")):
        run = parse_run(
            [*words("--train-samples 5000", without="--train-iters"), "--step-batch-size-schedule", each],
            extra_groups=GPT_GROUPS,
        )
        assert run.training.global_batch_size == 20  # as the last size, unless it is given
        assert (
            RunConfig.from_json(json.loads(json.dumps(run.to_json())), groups=[type(each) for each in run.extra]) == run
        )
        assert run.batch_steps == ((0, 10), (3, 20), (4, 1000), (5, 20))


def test_length_in_either_unit() -> None:
    """Iterations come to samples and samples to whole iterations."""
    by_iterations = parse("--global-batch-size 8")
    assert (by_iterations.train_iters, by_iterations.train_samples) == (10, 80)
    by_samples = parse("--global-batch-size 8 --train-samples 85", without="--train-iters")
    assert (by_samples.train_iters, by_samples.train_samples) == (10, 85)
    assert parse("--skip-train", without="--train-iters --lr").train_iters == 0


def test_saved_settings_of_other_types() -> None:
    """A list in place of a group was a TypeError without a word of the file."""
    sizes = {"num_layers": "abc", "hidden_size": 8, "num_attention_heads": 2}
    for model, facts in (([1], ["model"]), ("abc", ["model"]), (None, ["model"]), (sizes, ["--num-layers", "'abc'"])):
        with expect_error(ConfigError, *facts):
            RunConfig.from_json({"model": model, "world_size": 1})
