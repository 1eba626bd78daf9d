"""See a trained model speak: continue prompts given on the command line, in a file, or typed one after another."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.core.inference.engine import Engine, Generation, GenerationLimits, WholeText
from megatron.core.inference.sampling import Sampling
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.environment import launch_environment
from megatron.errors import ConfigError, DataError, MegatronError, run_command
from megatron.training.recipes.gpt import GPTRecipe
from megatron.training.trained_model import CheckpointChoice, TrainedModel, trained_model


def main(argv: list[str] | None = None) -> int:
    """Load the model and continue every prompt."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p)
    with trained_model(CheckpointChoice.of(arguments), {"gpt": GPTRecipe()}, launch_environment()) as trained:
        speaker = Speaker(trained, sampling, tokens_to_generate=arguments.tokens_to_generate, seed=arguments.seed)
        if arguments.prompt or arguments.prompt_file:
            speaker.answer(list(given_prompts(arguments)))
        else:
            speaker.converse()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; Megatron-LM's own form, a server's address, is explained."""
    if argv and re.fullmatch(r"[\w.\-]+:\d+", argv[0]):
        raise ConfigError(
            f"{argv[0]} is the address of a text-generation server, which this project does not have yet; "
            "name a checkpoint instead: --load DIR --prompt TEXT"
        )
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    CheckpointChoice.add_arguments(parser)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompt-file", help="file with one prompt a line")
    parser.add_argument("--tokens-to-generate", type=int, default=64, help="at most so many tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1)")
    parser.add_argument("--top-k", "--top_k", type=int, default=0, help="draw from the k likeliest tokens (1: greedy)")
    parser.add_argument("--top-p", "--top_p", type=float, default=0.0, help="draw from the likeliest tokens up to p")
    parser.add_argument("--seed", type=int, default=1234, help="the same seed gives the same text (default: 1234)")
    arguments = parser.parse_args(argv)
    if arguments.tokens_to_generate < 1:
        raise ConfigError(f"--tokens-to-generate {arguments.tokens_to_generate} must be at least 1")
    return arguments


def given_prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """Prompts of ``--prompt`` and of the lines of ``--prompt-file``."""
    yield from arguments.prompt
    if arguments.prompt_file:
        try:
            lines = Path(arguments.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt-file {arguments.prompt_file} cannot be read: {error}") from None
        yield from (line for line in lines if line)


class Speaker:
    """Prompts in, texts out, on rank 0; all ranks compute."""

    def __init__(self, trained: TrainedModel, sampling: Sampling, *, tokens_to_generate: int, seed: int) -> None:
        self._trained, self._sampling, self._tokens, self._seed = trained, sampling, tokens_to_generate, seed
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
        line: str | None = None
        if self._is_first:
            try:
                line = input("prompt> " if sys.stdin.isatty() else "")
            except EOFError:
                line = None
        return gather_objects(line, self._trained.context.mesh)[0]

    def _generate(self, ids: list[list[int]], *, first_number: int) -> list[Generation]:
        seeds = [self._seed + first_number + offset for offset in range(len(ids))]
        return self._engine.generate(ids, tokens_to_generate=self._tokens, sampling=self._sampling, seeds=seeds)


if __name__ == "__main__":
    run_command(main)
