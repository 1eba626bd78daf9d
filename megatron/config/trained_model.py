"""The trained model that a tool uses."""

from __future__ import annotations

from megatron.config.flags import COUNT, Settings, flag, switch
from megatron.config.tokenizer import REFUSED_TOKENIZERS, RENAMED_TOKENIZERS, TokenizerType
from megatron.errors import ConfigError


class TrainedModelConfig(Settings):
    """The trained model. Architecture and tokenizer come from the checkpoint."""

    load: str = flag("Folder of checkpoints.")
    ckpt_step: int | None = flag("Iteration to load instead of the newest.", default=None, at_least=0, at_most=COUNT)
    load_ema: bool = switch("Take the weights from the moving average that a run with --ema-decay saved.")
    fp32: bool = switch(
        "Compute in fp32, whatever type the model was trained in, with its fp32 master weights where the checkpoint "
        "has them. Weights take more memory than in bf16; a CPU without instructions for bf16 takes less than half the "
        "time for a single text."
    )
    tokenizer_type: TokenizerType | None = flag(
        "Kind of tokenizer, for a checkpoint that stores none.",
        default=None,
        renamed_values=RENAMED_TOKENIZERS,
        refused_values=REFUSED_TOKENIZERS,
    )
    vocab_extra_ids: int | None = flag(
        "Sentinel tokens of the tokenizer, for a checkpoint that stores none.",
        default=None,
        at_least=0,
        at_most=1_000_000,
    )
    vocab_file: str | None = flag("Path of vocab.json, if it has moved since training.", default=None)
    merge_file: str | None = flag("Path of merges.txt, if it has moved.", default=None)
    tokenizer_model: str | None = flag("Path of the tokenizer's model file, if it has moved.", default=None)


class TrainedModelLayoutConfig(Settings):
    """How the ranks that were started divide the trained model."""

    tensor_model_parallel_size: int = flag(
        "Ranks that divide each layer: all those of a stage.", derived="ranks / pipeline stages", at_least=1
    )
    pipeline_model_parallel_size: int = flag(
        "Pipeline stages. Each takes an equal part of the ranks, which divide its layers' heads.", default=1, at_least=1
    )

    def check(self, world_size: int) -> None:
        """Raise ConfigError unless the ranks that were started are those of the layout."""
        asked, stages = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if asked is not None and asked * stages != world_size:
            raise ConfigError(
                f"--tensor-model-parallel-size {asked} x --pipeline-model-parallel-size {stages} is {asked * stages}, "
                f"and {world_size} {'rank was' if world_size == 1 else 'ranks were'} started: start as many, or leave "
                "--tensor-model-parallel-size out, and all ranks of a stage divide each layer"
            )
