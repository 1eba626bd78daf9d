"""lm-evaluation-harness on this project's checkpoints: ``python tasks/lm_eval.py --model megatron --model_args …``.

The harness finds no models of other packages, so this is its command with one more model. Model arguments are flags
without their dashes: ``load=runs/mine,tensor_model_parallel_size=2``.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from megatron.core.models.registry import family_of
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.launch import parallel_context
from megatron.errors import RESTART_CANNOT_HELP, run_command
from megatron.training.checkpoints.trained_model import TrainedModel, load_model
from megatron.training.run.agreement import check_ranks_agree
from tasks.model_args import run_of
from tasks.result import checkpoint_facts
from tasks.settings import HarnessConfig
from tasks.zero_shot.questions import Asked, Questions, sample_of

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    print(
        f"error: lm-evaluation-harness is not installed ({error}); pip install lm_eval, or in a checkout "
        "pip install -e '.[lm-eval]'",
        file=sys.stderr,
    )
    raise SystemExit(RESTART_CANNOT_HELP) from None

TextAndIds = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as texts, and each as ids."""


@register_model("megatron")
class MegatronLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint as a model of the harness, at any layout; every rank gets all requests.

    ``opened``: holds the process group, which ``main`` closes with the harness's error, if any.
    """

    opened = ExitStack()

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self._model, self._ours, self._questions = model, model.tokenizer, Questions(model)
        self._settings = model.config.group(HarnessConfig)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> MegatronLM:
        """The model that ``--model_args`` describes."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> MegatronLM:
        """The model that a dictionary of arguments describes; ``additional_config``: the harness's own flags."""
        more = additional_config or {}
        config = run_of(arg_dict, batch_size=more.get("batch_size"), device=more.get("device"))
        precision, seed = config.precision.params_dtype, config.training.seed
        context = cls.opened.enter_context(
            parallel_context(config.parallel, launch_environment(), params_dtype=precision, seed=seed)
        )
        check_ranks_agree(config, context)
        return cls(load_model(config, family_of(config.extra).train_spec, context))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._ours.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self._ours.eod if self._ours.bos is None else self._ours.bos

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return f"{self._ours.name}-{self._ours.fingerprint[:12]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        begins = self._settings.add_bos_token and add_special_tokens is not False
        return [self.prefix_token_id] * begins + self._ours.tokenize(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[TextAndIds], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy generation gives it."""
        length = self._questions.length
        answers = self._questions.likelihoods(
            [sample_of(context, continuation, length=length) for _, context, continuation in requests]
        )
        for request, answer in zip(requests, answers):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts."""
        texts = [request.args[0] for request in requests]
        totals = self._questions.of_whole_texts([self.tok_encode(text) for text in texts], prefix=self.prefix_token_id)
        for text, total in zip(texts, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each text's continuation up to its first stop string; requests with equal settings form batches."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            words = normalize_gen_kwargs(requests[numbers[0]].args[1], self._settings.max_gen_toks)
            prompts = [self.tok_encode(requests[number].args[0]) or [self.prefix_token_id] for number in numbers]
            for number, text in zip(numbers, self._questions.continuations(prompts, numbers, Asked.of(words))):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """The checkpoint, for the harness's results."""
        return {"checkpoint": checkpoint_facts(self._model.folder)}


def main() -> int:
    """The harness's command; only the first rank prints."""
    with ExitStack() as quiet:
        if launch_environment().rank > 0:
            os.environ["TQDM_DISABLE"] = "1"
            logging.disable(logging.WARNING)
            quiet.enter_context(contextlib.redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
        with MegatronLM.opened:
            cli_evaluate()
    return 0


if __name__ == "__main__":
    run_command(main)
