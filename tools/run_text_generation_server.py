"""Serve a trained model over HTTP: OpenAI's completions and chat, and Megatron-LM's PUT /api."""

from __future__ import annotations

import os
import signal
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Sequence

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.core.models.trained_model_flags import parse_with_trained_model
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import ConfigError, run_command
from megatron.serving.settings import API_KEY_VARIABLE, FLAGS_OF_REQUESTS, ServerConfig, api_keys, check_access


def main(argv: Sequence[str]) -> int:
    """Load the model, and serve it until a signal ends the server."""
    with errors_once_per_node():
        server, inference, choice, layout = parse_with_trained_model(
            argv,
            ServerConfig,
            InferenceConfig,
            TrainedModelConfig,
            TrainedModelLayoutConfig,
            prog="run_text_generation_server.py",
            about=__doc__ or "",
            legacy=FLAGS_OF_REQUESTS,
        )
        check_access(server)
        keys = api_keys(server, os.environ.get(API_KEY_VARIABLE, ""))
        try:
            from megatron.serving import serve as serving
        except ImportError as error:
            raise ConfigError(
                f"the server needs the library {error.name}: pip install starlette uvicorn prometheus_client jinja2, "
                "or this project's extra serve"
            ) from None
    from megatron.training.checkpoints.several_adapters import named_folders
    from megatron.training.checkpoints.trained_model import trained_model
    from megatron.training.evaluation.generating import exactness, generation_engine
    from tools.generation.families import GENERATIVE

    launch = launch_environment()
    if (
        launch.rank > 0
    ):  # a launcher sends its signal to all ranks, and rank 0 needs the others until its texts have ended
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
    # A taken port is noticed before the model is loaded.
    listener = serving.bound_socket(server) if launch.rank == 0 else None
    with (
        trained_model(choice, GENERATIVE, launch, layout=layout) as trained,
        generation_engine(trained, inference, releases=True) as engine,
    ):
        if engine is not None and listener is not None:  # else another rank, whose work is done
            print(exactness(trained, inference, is_invariant=engine.is_batch_invariant), file=sys.stderr, flush=True)
            model = serving.served_model(
                trained,
                server,
                max_length=engine.limits.max_length,
                quantization=engine.quantization,
                adapters=named_folders(inference.lora_modules),
            )
            serving.serve(engine, model, server, listener, keys=keys)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
