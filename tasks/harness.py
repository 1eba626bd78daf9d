"""lm-evaluation-harness on this project's checkpoints: ``python -m tasks.harness run --model megatron --model_args …``.

The harness has no place where other packages announce models, so this module is its command with one model more. Model
arguments are the flags of any run without their dashes: ``load=runs/mine,tensor_model_parallel_size=2``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.config.run import RunConfig
from megatron.config.task import HarnessConfig
from megatron.core.inference.engine import Engine, GenerationLimits
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scoring import Passage
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.launch import parallel_context
from megatron.errors import ConfigError, run_command
from megatron.training.agreement import check_ranks_agree
from megatron.training.pretrain import parse
from megatron.training.reading import Likelihoods, LoadedModel, LogitsAtAnyLayout, load_model
from megatron.training.recipes.gpt import GPTRecipe
from tasks.registry import DEFAULTS

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
except ImportError as error:
    raise SystemExit(
        f"error: lm-evaluation-harness is not installed ({error}); pip install 'megatron[lm-eval]'"
    ) from None

PROG = "tasks/harness.py"
TextAndIds = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as texts, and each as ids."""


@register_model("megatron")
class MegatronLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint of this project as the harness sees it, at any layout: every rank is asked everything.

    No answer depends on what else is asked, nor on the batch size. ``opened``: the ranks' meeting, which whoever runs
    the harness ends, with its error if there is one.
    """

    opened = ExitStack()

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self._model, self._ours, self._length = model, model.tokenizer, model.config.data.seq_length
        self._harness = model.config.group(HarnessConfig)
        self._engine = Engine(LogitsAtAnyLayout(model), GenerationLimits(self._ours.eod, self._length))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> MegatronLM:
        """From ``--model_args``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> MegatronLM:
        """From model arguments; ``additional_config`` is what the harness's own flags say."""
        more = additional_config or {}
        config = settings(arg_dict, batch_size=more.get("batch_size"), device=more.get("device"))
        precision, seed = config.precision.params_dtype, config.training.seed
        context = cls.opened.enter_context(
            parallel_context(config.parallel, launch_environment(), params_dtype=precision, seed=seed)
        )
        check_ranks_agree(config, context)
        return cls(load_model(config, GPTRecipe(), context))

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self._ours.eod

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self._ours.eod if self._ours.bos is None else self._ours.bos

    @property
    def tokenizer_name(self) -> str:
        """By which the harness keeps requests."""
        return f"{self._ours.name}-{self._ours.fingerprint[:12]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        begins = self._harness.add_bos_token and add_special_tokens is not False
        return [self.prefix_token_id] * begins + self._ours.tokenize(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[TextAndIds], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy generation would give."""
        answers = self._answers([(context, continuation) for _, context, continuation in requests])
        for request, answer in zip(requests, answers):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _answers(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The same of ids; contexts lose their beginning where the model doesn't see all of them."""
        passages = [passage_of(context, continuation, self._length) for context, continuation in pairs]
        rows = self._model.read(passages, Likelihoods(compare=True)).tolist()
        return [(-nats, missed == 0) for nats, missed, _ in rows]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in the harness's windows: disjoint but the last, which is whole."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            ids = self.tok_encode(text)
            cut = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self._length, context_len=1)
            windows += [make_disjoint_window(window) for window in cut]
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(texts)
        for owner, (nats, _) in zip(owners, self._answers(windows)):
            totals[owner] += nats
        for text, total in zip(texts, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each text's continuation up to the first of its stop strings; requests with equal settings run together."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            asked = Asked.of(requests[numbers[0]].args[1], self._harness.max_gen_toks)
            prompts = {number: self._prompt(requests[number].args[0], asked) for number in numbers}
            numbers.sort(key=lambda number: -len(prompts[number]))
            size = self._model.config.training.micro_batch_size * self._model.context.mesh.size("dp")
            for first in range(0, len(numbers), size):
                batch = numbers[first : first + size]
                texts = self._generated([prompts[number] for number in batch], batch, asked)
                for number, text in zip(batch, texts):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _prompt(self, text: str, asked: Asked) -> list[int]:
        room = self._length - asked.tokens
        if room < 1:
            raise ConfigError(
                f"{asked.tokens} tokens to generate leave no room for a text in the model's {self._length}: "
                "give fewer with --gen_kwargs max_gen_toks=N"
            )
        return (self.tok_encode(text) or [self.prefix_token_id])[-room:]

    def _generated(self, prompts: list[list[int]], numbers: list[int], asked: Asked) -> list[str]:
        def is_complete(ids: Sequence[int]) -> bool:
            return any(end in self._ours.detokenize(ids) for end in asked.until)

        seed = self._model.config.training.seed
        results = self._engine.generate(
            prompts,
            tokens_to_generate=asked.tokens,
            sampling=asked.sampling,
            seeds=[seed + number for number in numbers],
            stop=is_complete,
        )
        texts = [self._ours.detokenize(result.generated) for result in results]
        return [min((text.partition(end)[0] for end in asked.until), key=len, default=text) for text in texts]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a text is to be continued: at most ``tokens`` tokens, up to the first string of ``until``."""

    tokens: int
    until: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def of(cls, asked: dict[str, Any], default_tokens: int) -> Asked:
        """From the harness's words for it; ConfigError for those that mean nothing here."""
        words = dict(normalize_gen_kwargs(asked, default_tokens))
        until = tuple(end for end in words.pop("until", ()) if end)
        tokens, samples = words.pop("max_gen_toks"), words.pop("do_sample", False)
        chosen = {name: words.pop(name) for name in ("temperature", "top_k", "top_p") if name in words}
        if words:
            raise ConfigError(
                f"--gen_kwargs {', '.join(words)}: generation here knows until, max_gen_toks, do_sample, temperature, "
                "top_k and top_p; leave the others out"
            )
        return cls(tokens=tokens, until=until, sampling=Sampling(**chosen) if samples else Sampling(temperature=0.0))


def passage_of(context: list[int], continuation: list[int], length: int) -> Passage:
    """A continuation to score after as much of its context as fits into ``length`` tokens."""
    if len(continuation) > length:
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is to be scored at once, and the model sees {length}: "
            "leave the task out"
        )
    ids = (context + continuation)[-(length + 1) :]
    return Passage(np.array(ids), first_scored=len(ids) - 1 - len(continuation))


def settings(flags: dict[str, Any], *, batch_size: int | str | None, device: str | None) -> RunConfig:
    """The run that the harness's arguments describe; raises ConfigError for flags that don't exist.

    ``batch_size``: samples of a forward pass, unless ``micro_batch_size`` says it; ``auto`` is the default. ``device``:
    where a rank computes is its launcher's to say, but ``cpu`` keeps it off a GPU.
    """
    defaults: dict[str, Any] = {**DEFAULTS, "skip_train": True}
    if device == "cpu":
        defaults["distributed_backend"] = "gloo"
    elif device is not None and not device.startswith("cuda"):
        raise ConfigError(f"--device {device}: ranks compute on the GPUs that are there, or on cpu; leave it out")
    if batch_size is not None and str(batch_size).partition(":")[0] != "auto":
        defaults["micro_batch_size"] = int(batch_size)
    return parse(words_of(flags), prog=PROG, groups=(HarnessConfig,), defaults=defaults)


def words_of(flags: dict[str, Any]) -> list[str]:
    """A command line of the arguments: ``x=True`` is ``--x``, ``x=False`` is ``--no-x``, a list is several values."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def main() -> int:
    """The harness's command; only the first rank speaks."""
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
