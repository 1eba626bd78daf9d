"""Continue prompts with a trained model; prompts come from the command line, a file, or the terminal.

With HOST:PORT as the first argument a running text-generation server answers, without --load.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Sequence
from pathlib import Path

from megatron.config.inference import InferenceConfig
from megatron.config.parse import parse_groups
from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.core.models.trained_model_flags import parse_with_trained_model
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import DataError, run_command
from megatron.small_files import check_regular
from tools.generation.settings import (
    ClientConfig,
    GenerateConfig,
    LocalConfig,
    check_ways,
    flags_of_clients,
    flags_without_effect,
)


def main(argv: Sequence[str]) -> int:
    """Continue prompts: with a server when its HOST:PORT is the first argument, otherwise with a checkpoint."""
    prog, about = "text_generation_cli.py", __doc__ or ""
    if argv and not argv[0].startswith(("-", "@")):
        from tools.generation.client import Client, api_of

        url = api_of(argv[0])
        config, settings = parse_groups(
            argv[1:],
            GenerateConfig,
            ClientConfig,
            prog=f"{prog} {argv[0]}",
            about=about,
            legacy=flags_without_effect(),
        )
        client = Client(url, config, settings)
        prompts = prompts_of(config)
        if prompts:
            client.answer(prompts)
        else:
            client.converse()
        return 0
    with errors_once_per_node():
        config, local, inference, choice, layout = parse_with_trained_model(
            argv,
            GenerateConfig,
            LocalConfig,
            InferenceConfig,
            TrainedModelConfig,
            TrainedModelLayoutConfig,
            prog=prog,
            about=about,
            legacy=flags_of_clients(),
        )
        check_ways(config, local)
        prompts = prompts_of(config)
    from megatron.training.checkpoints.several_adapters import named_folders
    from megatron.training.checkpoints.trained_model import trained_model
    from megatron.training.evaluation.generating import exactness, generation_engine
    from tools.generation.batch import answer_file
    from tools.generation.families import GENERATIVE
    from tools.generation.local import Generator

    with (
        trained_model(choice, GENERATIVE, launch_environment(), layout=layout) as trained,
        generation_engine(trained, inference, releases=True) as engine,
    ):
        if engine is None:  # another rank, whose work is done
            return 0
        together = len(prompts_of(config)) > 1 or local.input_jsonl is not None
        line = exactness(trained, inference, together=together, is_invariant=engine.is_batch_invariant)
        print(line, file=sys.stderr, flush=True)
        generator = Generator(trained, engine, config, local, named_folders(inference.lora_modules))
        if local.input_jsonl is not None and local.output_jsonl is not None:
            answer_file(generator, Path(local.input_jsonl), Path(local.output_jsonl))
        elif local.chat:
            generator.chat()
        elif prompts:
            generator.answer(prompts)
        else:
            generator.converse()
    return 0


def prompts_of(config: GenerateConfig) -> list[str]:
    """Prompts of ``--prompt``, then the lines of ``--prompt-file``, empty lines left out."""
    path = config.prompt_file
    if path is None:
        return list(config.prompt)
    check_regular(Path(path), where=f"--prompt-file {path}", error=DataError)
    try:
        prompts = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not prompts:
        raise DataError(f"--prompt-file {path} holds no prompts; write one a line")
    return [*config.prompt, *prompts]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
