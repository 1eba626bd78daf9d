"""Continue prompts with a trained model; prompts come from the command line, a file, or the terminal."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.flags import check_flags, flag
from megatron.config.parse import parse_groups
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import ConfigError, DataError, MegatronError, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.inference.engine import Generation
    from megatron.training.checkpoints.trained_model import TrainedModel


@check_flags
@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Prompts, and how tokens are sampled."""

    prompt: tuple[str, ...] = flag("Texts to continue; without them the terminal asks for prompts.", default=())
    prompt_file: str | None = flag("File with one prompt a line.", default=None)
    tokens_to_generate: int = flag("Maximum number of tokens to generate.", default=64, at_least=1)
    temperature: float = flag("Divides the logits; 0 always takes the most probable token.", default=1.0, at_least=0)
    top_k: int = flag(
        "Sample from this many most probable tokens; 0: from all.", default=0, aliases=("--top_k",), at_least=0
    )
    top_p: float = flag(
        "Sample from the most probable tokens whose probabilities together exceed this; 0: from all.",
        default=0.0,
        aliases=("--top_p",),
        at_least=0,
        at_most=1,
    )
    seed: int = flag("Seed: the same one gives the same text.", default=1234, at_least=0)


def main(argv: Sequence[str]) -> int:
    """Load the model and continue every prompt."""
    if argv and re.fullmatch(r"[\w.\-]+:\d+", argv[0]):
        raise ConfigError(
            f"{argv[0]} is the address of a text-generation server, which this project does not have yet; "
            "name a checkpoint instead: --load DIR --prompt TEXT"
        )
    with errors_once_per_node():
        config, choice = parse_groups(
            argv, GenerateConfig, TrainedModelConfig, prog="text_generation_cli.py", about=__doc__ or ""
        )
        prompts = [*config.prompt, *prompts_of(config.prompt_file)]
    from megatron.core.models.gpt.train_spec import GPTSpec
    from megatron.training.checkpoints.trained_model import trained_model

    with trained_model(choice, {"gpt": GPTSpec()}, launch_environment()) as trained:
        speaker = Speaker(trained, config)
        if prompts:
            speaker.answer(prompts)
        else:
            speaker.converse()
    return 0


def prompts_of(path: str | None) -> list[str]:
    """Lines of ``--prompt-file``, empty ones left out."""
    if path is None:
        return []
    try:
        prompts = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt-file {path} cannot be read: {error}") from None
    if not prompts:
        raise DataError(f"--prompt-file {path} holds no prompts; write one a line")
    return prompts


class Speaker:
    """Prompts in, texts out, on rank 0; all ranks compute."""

    def __init__(self, trained: TrainedModel, config: GenerateConfig) -> None:
        from megatron.core.inference.engine import Engine, GenerationLimits, WholeText
        from megatron.core.inference.sampling import Sampling

        self._trained, self._config = trained, config
        self._sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        limits = GenerationLimits(trained.tokenizer.eod, trained.config.model.max_position_embeddings)
        self._engine = Engine(WholeText(trained.model), limits, trained.context.device)
        self._is_first = trained.context.mesh.world_rank == 0

    def answer(self, prompts: list[str]) -> None:
        """Continue all prompts and print each with its continuation."""
        ids = self._trained.tokenizer.tokenize_batch(prompts)
        for first in range(0, len(prompts), batch := self._trained.config.inference.inference_max_requests):
            results = self._generate(ids[first : first + batch], first_number=first)
            for number, result in enumerate(results, start=first + 1):
                if self._is_first:
                    heading = f"-- {number}\n" if len(prompts) > 1 else ""
                    print(f"{heading}{self._trained.tokenizer.detokenize(result.tokens)}", flush=True)

    def converse(self) -> None:
        """Ask for prompts until the input ends."""
        while (prompt := self._ask()) is not None:
            if not prompt:
                continue
            try:
                self.answer([prompt])
            except MegatronError as error:  # a prompt that is too long ends nothing
                if self._is_first:
                    print(f"error: {error}", file=sys.stderr)

    def _ask(self) -> str | None:
        from megatron.core.parallel.collectives import gather_objects

        line: str | None = None
        if self._is_first:
            try:
                line = input("prompt> " if sys.stdin.isatty() else "")
            except EOFError:
                line = None
        return gather_objects(line, self._trained.context.mesh)[0]

    def _generate(self, ids: list[list[int]], *, first_number: int) -> list[Generation]:
        seeds = [self._config.seed + first_number + offset for offset in range(len(ids))]
        return self._engine.generate(
            ids, tokens_to_generate=self._config.tokens_to_generate, sampling=self._sampling, seeds=seeds
        )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
