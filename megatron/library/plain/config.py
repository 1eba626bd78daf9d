"""Settings and rules of a run of the user's own module: flags that describe a model or data files are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import FamilyConfig, Purpose, Rule
from megatron.config.flags import flag_of, flags_of, not_available
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig

_DIVISIBLE = 40320  # by the usual tensor-parallel sizes, so that rules about this project's layers hold
DEFAULTS = {
    "num_layers": 1,
    "hidden_size": _DIVISIBLE,
    "num_attention_heads": _DIVISIBLE,
    "seq_length": 1,
    "vocab_size": 1,
    "num_workers": 0,
}
"""Values of settings that every run has, for a run whose model and data are Python objects."""

_DESCRIBED = tuple(spec.field for kind in (ModelConfig, TokenizerConfig, Fp8Config) for spec in flags_of(kind))
_OTHERS = (
    *("load_hf", "save_hf", "save_hf_ema", "pretrained_checkpoint", "mock_data", "data_path", "train_data_path"),
    *("valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path", "multiple_validation_sets"),
    *("data_order", "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "packing", "sft", "fim_rate"),
    *("recompute_granularity", "recompute_modules", "recompute_activations", "recompute_method"),
    *("recompute_num_layers", "cpu_offloading", "compile", "generate_samples_interval"),
)


class PlainConfig(FamilyConfig, Purpose):
    """A run of a module and data sets that the caller of ``megatron.pretrain`` has made."""

    name: ClassVar[str] = "plain"
    title: ClassVar[str] = "plain module"
    usual_tokenizer: ClassVar[str | None] = "NullTokenizer"
    reads_tokens: ClassVar[bool] = False

    @property
    @override
    def reads_own_data(self) -> bool:
        """Data sets are objects, not files."""
        return True

    @override
    def is_reported(self, field: str) -> bool:
        """Whether a setting is in the report: those that describe this project's models and data mean nothing here."""
        return field not in {*_DESCRIBED, *DEFAULTS, "split"}

    @override
    def describe_architecture(self) -> str:
        """What reports call the model."""
        return "a module of your own"

    @override
    def rules(self) -> Sequence[Rule]:
        """Layouts and flags that need a model or data of this project's own."""
        return RULES


def flags_are_of_the_run(run: RunConfig) -> str | None:
    """Model and data are objects, so flags that describe them would be ignored."""
    fields = dict.fromkeys((*_DESCRIBED, *_OTHERS))
    given = [flag_of(each) for each in fields if run.given(each) and not run.provenance[each].startswith("default of ")]
    return not_available(given, "for a module and data sets of your own") if given else None


RULES: tuple[Rule, ...] = (
    flags_are_of_the_run,
    rule(
        "--pipeline-model-parallel-size {run.parallel.pipeline_model_parallel_size} cuts a model into stages, and a "
        "module of your own is one: leave it out, or write a family, as in examples/own_model",
        lambda run: run.parallel.pipeline_model_parallel_size > 1,
    ),
    rule(
        "--context-parallel-size {run.parallel.context_parallel_size} cuts sequences into parts, and nothing says "
        "where the fields of your samples are sequences: leave it out, or write a family, as in examples/own_model",
        lambda run: run.parallel.context_parallel_size > 1,
    ),
    rule(
        "--expert-model-parallel-size {run.parallel.expert_model_parallel_size} is for the experts of this project's "
        "models: leave it out",
        lambda run: run.parallel.expert_model_parallel_size > 1,
    ),
)
GROUPS: tuple[type, ...] = (PlainConfig,)
