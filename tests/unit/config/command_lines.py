"""Command lines for tests: a sound one, and ways to change it."""

from __future__ import annotations

from typing import Any

from megatron.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TokenizerConfig, TrainingConfig
from megatron.config.parse import parse_run
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.registry import owner_of

SOUND: dict[str, str | None] = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "0.001",
    "--mock-data": None,
    "--vocab-size": "100",
}


def words(changes: str = "", *, without: str = "") -> list[str]:
    """The sound command line with flags replaced or added by ``changes`` and the flags in ``without`` left out."""
    given = changes.split()
    replaced = {*without.split(), *(word for word in given if word.startswith("--"))}
    kept = [word for flag, value in SOUND.items() if flag not in replaced for word in (flag, value) if word is not None]
    return kept + given


def parse(changes: str = "", *, without: str = "", ranks: int = 1, **options: Any) -> RunConfig:
    """The run of such a command line on ``ranks`` ranks: unless ``options`` say else, of a GPT without parts, where
    there is no checkpoint yet, and a published model is that of ``run_of``.
    """
    readers: dict[str, Any] = {
        "extra_groups": (GPTConfig,),
        "checkpoint_config": lambda load, step: None,
        "published_config": lambda folder, groups, adapter: run_of().to_json(),
    }
    given = words(changes, without=without)
    return parse_run(given, world_size=ranks, owner_of=owner_of, **{**readers, **options})


def run_of(*, ranks: int = 1, length: int = 32, **sections: dict[str, Any]) -> RunConfig:
    """A small run built directly; ``sections`` change the fields of ``model`` and ``training``."""
    model = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "vocab_size": 100,
        **sections.get("model", {}),
    }
    training = {"micro_batch_size": 2, "train_iters": 10, **sections.get("training", {})}
    return RunConfig(
        model=ModelConfig(**model),
        training=TrainingConfig(**training),
        data=DataConfig(seq_length=length, mock_data=True),
        optimizer=OptimizerConfig(lr=1e-3),
        tokenizer=TokenizerConfig(vocab_size=99),  # NullTokenizer adds one
        extra=(GPTConfig(),),
        world_size=ranks,
    )
