"""What is saved, and what a run starts from."""

from __future__ import annotations

import os
from typing import Any, Literal

from megatron.config.checkpoint_storage import CheckpointStorageSettings
from megatron.config.flags import COUNT, flag, switch
from megatron.config.positions import ROTARY_FIELDS, ROTARY_TYPES

_CHANGEABLE = frozenset({*ROTARY_FIELDS, "norm_epsilon"} - {"rotary_percent", "rotary_interleaved", "no_rope_freq"})


def keeps_meaning(field: str, before: Any, after: Any) -> bool:
    """Whether weights keep their meaning when a field of the architecture changes, so that a new run on them may do so:
    how positions are scaled, and what norms add.
    """
    return field in _CHANGEABLE or (before in ROTARY_TYPES and after in ROTARY_TYPES)


class CheckpointConfig(CheckpointStorageSettings):
    """Saving and loading."""

    save: str | None = flag("Folder to write checkpoints into; may be a URL (s3://bucket/run).", default=None)
    overwrite_run: bool = switch(
        "Start a new run in a --save folder that holds another one, whose checkpoints are deleted once the first "
        "checkpoint of the new run is complete. Without it such a start is refused."
    )
    save_interval: int | None = flag(
        "Iterations between checkpoints.",
        default=None,
        aliases=("--persistent-save-interval",),
        at_least=1,
        at_most=COUNT,
    )
    keep_last_checkpoints: int | None = flag(
        "Number of newest checkpoints to keep.", default=None, at_least=1, at_most=COUNT
    )
    save_retain_interval: int | None = flag(
        "Keep the newest checkpoint and those whose iteration is a multiple of this.",
        default=None,
        aliases=("--keep-every",),
        at_least=1,
        at_most=COUNT,
    )
    save_optim: bool = switch("Leave optimizer state out of checkpoints.", off="--no-save-optim")
    save_rng: bool = switch("Leave random-number state out of checkpoints.", off="--no-save-rng")
    load: str | None = flag("Folder of checkpoints to resume from; may be a URL.", default=None)
    load_optim: bool = switch("Do not load optimizer state.", off="--no-load-optim")
    load_rng: bool = switch("Do not load random-number state.", off="--no-load-rng")
    ckpt_step: int | None = flag("Iteration to load instead of the newest.", default=None, at_least=0, at_most=COUNT)
    load_ema: bool = switch(
        "Take the weights from the moving average that a run with --ema-decay saved: with --finetune or --skip-train."
    )
    finetune: bool = switch("Load weights only and start at iteration 0.")
    pretrained_checkpoint: str | None = flag(
        "Folder to take weights from when --load has no checkpoint yet.", default=None
    )
    load_hf: str | None = flag(
        "Model to start from at iteration 0, a folder of Hugging Face's, ORG/NAME of the Hub or a GGUF file: "
        "architecture, tokenizer, weights. A run that finds a checkpoint in --load resumes from it and does not read "
        "this model.",
        default=None,
    )
    load_peft: str | None = flag(
        "PEFT folder with adapters (LoRA) beside the model of --load-hf, to train further: rank, alpha and targets are "
        "those of the folder.",
        default=None,
        aliases=("--adapter-name-or-path",),
    )
    load_hf_proof: Literal["auto", "required", "off"] = flag(
        "Before training from --load-hf, compare logits with those of transformers. auto: if transformers or memory is "
        "missing, print a remark instead; required: stop with an error then.",
        default="auto",
    )
    save_hf: str | None = flag(
        "New folder for the trained model in Hugging Face's format, written after the last iteration; may be a URL.",
        default=None,
    )
    save_hf_interval: int | None = flag(
        "Iterations between models in --save-hf, a multiple of --save-interval. Each model, the last one too, gets its "
        "own folder there, such as iter_0000500.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    save_hf_ema: bool = switch(
        "Write the moving average of the weights (--ema-decay) to --save-hf, instead of the weights of the last step."
    )
    exit_on_missing_checkpoint: bool = switch(
        "Fail when --load has no checkpoint, even if --load and --save name the same new folder."
    )
    use_checkpoint_args: bool = switch("Take the architecture from the checkpoint's settings.")
    use_mp_args_from_checkpoint_args: bool = switch("With --use-checkpoint-args: also take the model-parallel sizes.")
    use_tokenizer_model_from_checkpoint_args: bool = switch(
        "With --use-checkpoint-args: do not take --tokenizer-model from the checkpoint.",
        off="--no-use-tokenizer-model-from-checkpoint-args",
    )
    async_save: bool = switch("Write checkpoints in the background from a copy in main memory, one at a time.")

    @property
    def may_be_new(self) -> bool:
        """Whether ``--load`` may be empty: it is the ``--save`` folder, and nothing asks for one of its checkpoints."""
        return self.resumes_own and self.ckpt_step is None and not self.exit_on_missing_checkpoint

    @property
    def resumes_own(self) -> bool:
        """Whether ``--load`` is the ``--save`` folder, so that a restart of the command resumes what it has saved."""
        return self.save is not None and self.load is not None and place_of(self.save) == place_of(self.load)

    @property
    def saved_place(self) -> str:
        """A digest that names the ``--save`` folder, the same for every start of the command; empty without one."""
        import hashlib  # OpenSSL's library, which takes longer to load than most files of settings

        return "" if self.save is None else hashlib.sha256(place_of(self.save).encode()).hexdigest()[:16]


def place_of(named: str) -> str:
    """One spelling of a folder or URL, however it is ``named``."""
    path = named.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
