"""What is saved, and what a run starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron.config.flags import check_flags, flag, switch


@check_flags
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag("Folder to write checkpoints into; may be a URL (s3://bucket/run).", default=None)
    save_interval: int | None = flag(
        "Iterations between checkpoints.", default=None, aliases=("--persistent-save-interval",), at_least=1
    )
    keep_last_checkpoints: int | None = flag("Number of newest checkpoints to keep.", default=None, at_least=1)
    save_retain_interval: int | None = flag(
        "Keep the newest checkpoint and those whose iteration is a multiple of this.",
        default=None,
        aliases=("--keep-every",),
        at_least=1,
    )
    save_optim: bool = switch("Leave optimizer state out of checkpoints.", off="--no-save-optim")
    save_rng: bool = switch("Leave random-number state out of checkpoints.", off="--no-save-rng")
    load: str | None = flag("Folder of checkpoints to resume from; may be a URL.", default=None)
    load_optim: bool = switch("Do not load optimizer state.", off="--no-load-optim")
    load_rng: bool = switch("Do not load random-number state.", off="--no-load-rng")
    ckpt_step: int | None = flag("Iteration to load instead of the newest.", default=None, at_least=0)
    finetune: bool = switch("Load weights only and start at iteration 0.")
    pretrained_checkpoint: str | None = flag(
        "Folder to take weights from when --load has no checkpoint yet.", default=None
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
        if self.save is None or self.load is None or self.ckpt_step is not None or self.exit_on_missing_checkpoint:
            return False
        return _place(self.save) == _place(self.load)


def _place(named: str) -> str:
    path = named.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
