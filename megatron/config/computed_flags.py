"""Flags of Megatron-LM's forks that mean values of other flags: tokens counted in samples, windows, scales, norms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import COUNT, abridged
from megatron.errors import ConfigError


class NeededFlagError(ConfigError):
    """A flag whose meaning depends on another ``flag``, which is not given."""

    def __init__(self, flag: str) -> None:
        super().__init__(f"its meaning depends on {flag}; give it, too")
        self.flag = flag


@dataclass(frozen=True)
class Told:
    """What a command line says besides the flag: the flags' ``values`` by field, and ``flags`` of other programs.

    ``fields``: those that the run has.
    """

    values: Mapping[str, Any]
    flags: Collection[str]
    fields: Collection[str] = ()

    def needed(self, field: str, flag: str) -> Any:
        """The value of a field that must be given; ``flag``: its spelling."""
        if field not in self.values:
            raise NeededFlagError(flag)
        return self.values[field]


Computed = Callable[[list[str], Told], Mapping[str, Any]]
"""A function from a flag's words to the fields that it means, with their values; None unsets a field. Raises
ConfigError with what is wrong.
"""


def _number(words: list[str], *, least: float = 1) -> float:
    try:
        (word,) = words
        number = float(word)
    except ValueError:
        raise ConfigError(f"it takes one number, not {abridged(' '.join(words)) or 'none'}") from None
    if not least <= number <= COUNT:
        raise ConfigError(f"the number must be between {least:g} and {COUNT}")
    return number


def _whole_number(words: list[str], *, least: int = 1) -> int:
    """A number that may be written as 300e9."""
    number = _number(words, least=least)
    if not number.is_integer():
        raise ConfigError("the number must be a whole one")
    return int(number)


def _samples(words: list[str], told: Told) -> int:
    return _whole_number(words, least=0) // max(int(told.needed("seq_length", "--seq-length")), 1)


def _train_tokens(words: list[str], told: Told) -> Mapping[str, Any]:
    """DeepSpeed's other end of a run: whichever of tokens and iterations or samples is reached first."""
    samples, iterations = _samples(words, told), told.values.get("train_iters")
    if iterations is None:
        return {"train_samples": min(samples, told.values.get("train_samples", samples))}
    if iterations * told.needed("global_batch_size", "--global-batch-size") <= samples:
        return {"train_iters": iterations}
    if "rampup_batch_size" in told.values:
        raise ConfigError(f"which end comes first, it or --train-iters {iterations}? Keep one of them")
    return {"train_iters": None, "train_samples": samples}


def _length_in_tokens(field: str) -> Computed:
    """A length of the schedule, which goes before those in iterations and samples."""
    return lambda words, told: {f"{field}_iters": None, f"{field}_samples": _samples(words, told)}


def _sliding_window(words: list[str], told: Told) -> Mapping[str, Any]:
    """The window of ``--sliding-window N``, where N keys are visible to a query, its own among them."""
    return {"window_size": (_whole_number(words) - 1, 0)}


def _alternating_window(words: list[str], told: Told) -> Mapping[str, Any]:
    """Gemma 2: every second layer has full attention."""
    return {**_sliding_window(words, told), "window_attn_skip_freq": "2"}


def _scalar_of_queries(words: list[str], told: Told) -> Mapping[str, Any]:
    return {"softmax_scale": _number(words) ** -0.5}


def _embedding_factor(words: list[str], told: Told) -> Mapping[str, Any]:
    return {"embedding_multiplier": math.sqrt(told.needed("hidden_size", "--hidden-size"))}


def _scale_of_depth(words: list[str], told: Told) -> Mapping[str, Any]:
    depth = max(told.needed("num_layers", "--num-layers"), 1)
    return {"residual_multiplier": _number(words, least=1e-9) / math.sqrt(depth)}


def _base_width(words: list[str], told: Told) -> Mapping[str, Any]:
    return {"logits_multiplier": _number(words) / max(told.needed("hidden_size", "--hidden-size"), 1)}


def _norms_after_both(words: list[str], told: Told) -> Mapping[str, Any]:
    missing = {"--post-self-attn-layernorm", "--post-mlp-layernorm"} - {*told.flags}
    if missing:
        raise ConfigError(f"a norm after one of the two sublayers is not available; give {' and '.join(missing)}, too")
    return {"norm_placement": "both"}


def _published_tokenizer(words: list[str], told: Told) -> Mapping[str, Any]:
    """A Hugging Face tokenizer, which lies beside the checkpoint unless its folder is given."""
    found = {"tokenizer_type": "HuggingFaceTokenizer"}
    if "tokenizer_model" not in told.values:
        found["tokenizer_model"] = told.needed("load", "--tokenizer-model")
    return found


def _two_levels(words: list[str], told: Told) -> Mapping[str, Any]:
    """Ranks that exchange heads, out of those of context parallelism; the others form rings."""
    heads, ranks = _whole_number(words), told.needed("context_parallel_size", "--context-parallel-size")
    if ranks % heads:
        raise ConfigError(f"--context-parallel-size {ranks} is not divisible by it")
    return {"hierarchical_context_parallel_sizes": (heads, ranks // heads)}


def _scaled_positions(words: list[str], told: Told) -> Mapping[str, Any]:
    """MindSpeed's word for the scaling that its --rope-scaling flags describe."""
    match words:
        case ["llama3"]:
            return {"use_rope_scaling": True}
        case ["linear"]:
            factor = told.needed("rope_scaling_factor", "--rope-scaling-factor")
            return {"rotary_seq_len_interpolation_factor": factor, "rope_scaling_factor": None}
        case ["yarn"]:
            factor = told.needed("rope_scaling_factor", "--rope-scaling-factor")
            return {
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": factor,
                "rope_scaling_factor": None,
            }
    raise ConfigError("use linear, llama3 or yarn, or --position-embedding-type with the flags of its scaling")


_MODULES_WITHOUT_MORE = re.compile(r"local|\w+_layer_specs|(gemma2|qwen3|deepseek)_spec")
_HYBRID_MODULES = ("mamba_layer_specs", "hybrid_layer_specs")


def _layers_of_a_module(words: list[str], told: Told) -> Mapping[str, Any]:
    """A Python object that builds layers; some build what the other flags describe, and a hybrid's are two of them."""
    module = words[0].rpartition(".")[2] if words else ""
    if module in _HYBRID_MODULES and "is_hybrid_model" in told.fields:
        return {"is_hybrid_model": True}
    if module not in _HYBRID_MODULES and _MODULES_WITHOUT_MORE.fullmatch(module):
        return {}
    raise ConfigError("layers are chosen by model flags, not by a Python object; leave it out")


COMPUTED: dict[str, Computed] = {
    "train-tokens": _train_tokens,
    "lr-decay-tokens": _length_in_tokens("lr_decay"),
    "lr-warmup-tokens": _length_in_tokens("lr_warmup"),
    "sliding-window": _sliding_window,
    "interleave-sliding-window": _alternating_window,
    "query-pre-attn-scalar": _scalar_of_queries,
    "input-embeds-norm": _embedding_factor,
    "scale-depth": _scale_of_depth,
    "dim-model-base": _base_width,
    "post-self-attn-layernorm post-mlp-layernorm": _norms_after_both,
    "patch-tokenizer-type": _published_tokenizer,
    "ulysses-degree-in-cp": _two_levels,
    "rope-scaling-type": _scaled_positions,
    "spec": _layers_of_a_module,
}
"""Computed flags by their names, without dashes."""
