"""Make a smaller model of a checkpoint: leave out layers, channels, neurons, heads and experts that matter least.

Importance is measured on texts (Minitron, arXiv:2407.14679), with one layer in memory at a time. Under torchrun ranks
divide the texts. Then train the smaller model on with --teacher-load (distillation).
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from megatron.config.flags import COUNT, Settings, flag, switch
from megatron.config.legacy_flags import LegacyFlag, legacy_table
from megatron.config.parse import parse_groups
from megatron.core.files.remote_path import path_of
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import CheckpointError, ConfigError, exit_code_of, kept_on_interrupt, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from torch import Tensor

    from megatron.core.conversion.portable import PortableModel
    from megatron.core.models.gpt.pruning.targets import Targets

LEGACY_FLAGS = legacy_table(
    {"samples": "calib-size", "load": "pretrained-model-path"},
    {
        "target-mamba-num-heads target-mamba-head-dim": LegacyFlag(
            "refused",
            "heads of Mamba-2 stay as they are: their groups share matrices of the state; prune --target-hidden-size, "
            "--target-ffn-hidden-size or --target-num-layers",
        ),
        "prune-export-config": LegacyFlag(
            "refused", "each size has a flag: --target-num-layers, --target-ffn-hidden-size ... (see --help)"
        ),
        "pruning-scores-path": LegacyFlag("refused", "scores are not stored; they are measured each time"),
    },
    ignored="""
each rank has one whole layer in memory, and ranks divide the texts: a layout changes nothing
    tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size expert-tensor-parallel-size
    context-parallel-size sequence-parallel data-parallel-size
the architecture comes from the checkpoint
    export-model-type export-te-mcore-model export-legacy-megatron export-default-te-spec export-force-local-attention
nothing is generated
    prompts references
""",
    refused="",
)


class PruneConfig(Settings):
    """The checkpoint, the sizes of the smaller model, and the texts on which importance is measured."""

    load: str = flag("Folder of the checkpoint.")
    save: str = flag("New folder for the smaller model.")
    target_num_layers: int | None = flag(
        "Layers of the smaller model. Those that change hidden states least are left out (block influence, "
        "arXiv:2403.03853).",
        default=None,
        at_least=1,
    )
    layers_to_drop: tuple[int, ...] = flag(
        "Numbers of the layers to leave out, counted from 1, in place of --target-num-layers.", default=(), at_least=1
    )
    target_hidden_size: int | None = flag("Hidden size of the smaller model.", default=None, at_least=1)
    target_ffn_hidden_size: int | None = flag("Inner width of its MLPs.", default=None, at_least=1)
    target_num_attention_heads: int | None = flag(
        "Query heads of its attention layers; each query group keeps equally many. A head is as wide as it was.",
        default=None,
        at_least=1,
    )
    target_num_query_groups: int | None = flag(
        "Query groups (key/value heads) of its attention layers; as many as heads where each has its own.",
        default=None,
        at_least=1,
    )
    target_num_moe_experts: int | None = flag("Experts of its layers with experts.", default=None, at_least=1)
    target_moe_ffn_hidden_size: int | None = flag("Inner width of an expert.", default=None, at_least=1)
    target_moe_shared_expert_intermediate_size: int | None = flag(
        "Inner width of the shared experts.", default=None, at_least=1
    )
    drop_mtp: bool = switch("Leave out the layers of multi-token prediction, which are not measured.")
    data_path: str | None = flag(
        "Texts: the prefix of a .bin and .idx file, or JSON lines, or text (.txt). With --layers-to-drop alone none "
        "are needed, and no loss is measured.",
        default=None,
    )
    json_key: str = flag("Key of the text in JSON lines.", default="text")
    samples: int = flag("Sequences on which importance is measured.", default=1024, at_least=1, at_most=COUNT)
    seq_length: int | None = flag(
        "Tokens of a sequence; that of training unless given, at most 2048.", default=None, at_least=2
    )
    seed: int = flag("Seed of the choice of sequences.", default=1234, at_least=0, at_most=2**32 - 1)
    ckpt_step: int | None = flag("Iteration to prune instead of the newest.", default=None, at_least=0)
    load_ema: bool = switch("Take the checkpoint's moving average of the weights.")


def main(argv: Sequence[str]) -> int:
    """Prune, and say what is left."""
    with errors_once_per_node():
        (config,) = parse_groups(argv, PruneConfig, prog="prune.py", about=__doc__ or "", legacy=LEGACY_FLAGS)
        from megatron.core.conversion.averaging import read_average
        from megatron.core.conversion.convert import check_target
        from megatron.core.conversion.native import read_native
        from megatron.core.models.gpt.pruning.targets import without_mtp

        targets = targets_of(config)
        launch, save = launch_environment(), path_of(config.save)
        check_target(save)
        reads = read_average if config.load_ema else read_native
        portable = reads(path_of(config.load), step=config.ckpt_step)
        portable = without_mtp(portable) if config.drop_mtp else portable
        targets.sizes(portable)
        tokens = texts_of(config, targets, portable)
    say: Callable[[str], None] = print if launch.rank == 0 else lambda line: None
    for note in portable.notes:
        say(note)
    try:
        with kept_on_interrupt(lambda: f"nothing is written to --save {save}"):
            prune(config, portable, targets, tokens, say=say)
    except OSError as error:
        where = error.filename or save
        said = f"{where}: {error.strerror or error}; nothing was left in {save.parent}"
        raise CheckpointError(said, exit_code=exit_code_of(error)) from error
    say(f"wrote {save}: train it on with --load {save} --use-checkpoint-args --finetune --teacher-load {config.load}")
    return 0


def targets_of(config: PruneConfig) -> Targets:
    """What the flags ask for. Raises ConfigError where they ask for nothing."""
    from megatron.core.models.gpt.pruning.targets import Targets

    targets = Targets(
        hidden_size=config.target_hidden_size,
        ffn_hidden_size=config.target_ffn_hidden_size,
        num_attention_heads=config.target_num_attention_heads,
        num_query_groups=config.target_num_query_groups,
        num_experts=config.target_num_moe_experts,
        moe_ffn_hidden_size=config.target_moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.target_moe_shared_expert_intermediate_size,
        num_layers=config.target_num_layers,
        drop=tuple(number - 1 for number in config.layers_to_drop),
    )
    if targets == Targets():
        raise ConfigError(
            "nothing says what the smaller model is: give --target-ffn-hidden-size, --target-num-layers or another "
            "--target flag"
        )
    return targets


def texts_of(config: PruneConfig, targets: Targets, portable: PortableModel) -> Tensor | None:
    """Sequences [samples, length]; None where nothing is measured. ConfigError where they are missing."""
    from megatron.core.conversion.quantizing.recipe import check_length
    from megatron.core.conversion.quantizing.texts import calibration_texts

    if config.data_path is None:
        if targets.needs_scores:
            raise ConfigError(
                "importance is measured on texts: name some with --data-path, such as a part of the training data, or "
                "name layers with --layers-to-drop alone"
            )
        return None
    length = config.seq_length or min(2048, portable.seq_length)
    learned = any(name.startswith("embedding.position") for name in portable.tensors)
    check_length(portable, samples=config.samples, length=length, learned=learned)
    key, samples, seed = config.json_key, config.samples, config.seed
    return calibration_texts(portable, config.data_path, key=key, samples=samples, length=length, seed=seed).tokens


def prune(
    config: PruneConfig,
    portable: PortableModel,
    targets: Targets,
    tokens: Tensor | None,
    *,
    say: Callable[[str], None],
) -> None:
    """Measure on all ranks, write on the first, and measure the smaller model. A collective."""
    from megatron.config.parallel import ParallelConfig
    from megatron.core.conversion.convert import check_target
    from megatron.core.conversion.native import write_native
    from megatron.core.conversion.remote import becoming
    from megatron.core.models.gpt.pruning.importance import importance_of, nothing_measured
    from megatron.core.models.gpt.pruning.pruned import pruned
    from megatron.core.models.gpt.pruning.report import table_of
    from megatron.core.parallel.launch import parallel_context

    launch, save = launch_environment(), path_of(config.save)
    with parallel_context(ParallelConfig(), launch, params_dtype="fp32", seed=config.seed) as context:
        scores = (
            nothing_measured(portable) if tokens is None else importance_of(portable, tokens, context=context, say=say)
        )
        made = pruned(portable, targets, scores)
        aside = becoming(save, say=say, check=lambda: check_target(save)) if launch.rank == 0 else nullcontext()
        with aside as folder:
            if folder is not None:
                write_native(made.model, folder, final=save)
            loss = None if tokens is None else importance_of(made.model, tokens, context=context).loss
    for line in table_of(portable, made, scores, loss):
        say(line)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
