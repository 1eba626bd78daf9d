"""Curves in Weights & Biases, an optional package, under the same names as in TensorBoard."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.files.remote_path import is_url
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

_AGAINST_SAMPLES = " vs samples"


class WandbWriter:
    """Writes the points of a TensorBoard writer to a wandb run.

    wandb draws against steps only, so points against samples become one curve, ``samples vs steps``.
    """

    def __init__(self, config: ReportingConfig, *, save: str | None) -> None:
        """Start a wandb run, whose steps are iterations.

        Raises ConfigError when the package is missing or wandb refuses.
        """
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                f"--wandb-project {config.wandb_project} needs the wandb package, which is not installed; "
                "pip install wandb, or leave the flag out"
            ) from None
        self._step, self._wandb = 0, wandb
        folder = Path(config.wandb_save_dir or Path("." if save is None or is_url(save) else save, "wandb"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run: Any = wandb.init(
                project=config.wandb_project, entity=config.wandb_entity, name=config.wandb_exp_name, dir=str(folder)
            )
        except (OSError, wandb.Error) as error:
            raise ConfigError(
                f"--wandb-project {config.wandb_project} cannot be opened ({error}): log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave the flag out"
            ) from error

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""
        if tag.endswith(_AGAINST_SAMPLES):
            self._run.log({"samples vs steps": global_step}, step=self._step)
        else:
            self._step = global_step
            self._run.log({tag: scalar_value}, step=global_step)

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting as one of the wandb run's."""
        for name, value in values.items():
            self._run.config[name] = str(value)

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text of an iteration."""
        self._step = global_step
        self._run.log({tag: self._wandb.Html(f"<pre>{html.escape(text_string)}</pre>")}, step=global_step)

    def flush(self) -> None:
        """Do nothing: wandb writes in the background."""

    def close(self) -> None:
        """End the wandb run."""
        self._run.finish()
