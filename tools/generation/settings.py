"""Flags of tools/text_generation_cli.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.flags import Settings, flag, flags_of, switch
from megatron.config.inference import InferenceConfig
from megatron.config.legacy_flags import LegacyFlag
from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.errors import ConfigError

DEFAULT_SEED = 1234


class GenerateConfig(Settings):
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
    top_p_decay: float = flag("Multiplies top-p after each token; 0: it stays.", default=0.0, at_least=0, at_most=1)
    top_p_bound: float = flag("Top-p never falls below this.", default=0.0, at_least=0, at_most=1)
    seed: int | None = flag(
        f"Seed: the same one gives the same text. Default: {DEFAULT_SEED}; a server draws one.",
        default=None,
        at_least=0,
    )

    def sampling(self) -> dict[str, Any]:
        """Fields of ``Sampling``, which are also those of ``PUT /api``."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound")}


class ClientConfig(Settings):
    """Generation with a server, whose HOST:PORT is the first argument."""

    request_timeout: float = flag("Seconds to wait for an answer.", default=600.0, above=0, at_most=1e6)


class LocalConfig(Settings):
    """Generation with a checkpoint: more ways to sample, chat, and batches of JSON lines."""

    min_p: float = flag(
        "Sample from tokens at least this times as likely as the most probable one; 0: from all.",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    repetition_penalty: float = flag(
        "Divides the logits of tokens that prompt or text hold; 1: off.", default=1.0, above=0
    )
    presence_penalty: float = flag(
        "Subtracted from the logits of tokens that the text holds.", default=0.0, at_least=-2, at_most=2
    )
    frequency_penalty: float = flag(
        "Subtracted from a token's logit for each time that the text holds it.", default=0.0, at_least=-2, at_most=2
    )
    min_tokens: int = flag("Nothing ends a text before that many tokens.", default=0, at_least=0)
    stop: tuple[str, ...] = flag("A text ends before the first of these that appears.", default=())
    end_tokens: tuple[str, ...] = flag(
        "Tokens, or their ids, that end a text, such as <|im_end|>, in place of those that the checkpoint keeps; the "
        "tokenizer's own end always does, too.",
        default=(),
    )
    lora_module: str | None = flag(
        "Adapter of --lora-modules for all prompts; the base unless given. A line of --input-jsonl may name one as "
        "model.",
        default=None,
    )
    image: tuple[str, ...] = flag(
        "Image files that each prompt, or the first message of --chat, is about: one for each <image> in it, before "
        "it where it has none.",
        default=(),
    )
    chat: bool = switch("Hold a conversation in the terminal, written with the chat template.")
    system: str | None = flag("System message of the conversation.", default=None)
    chat_template: str | None = flag(
        "Jinja file that writes conversations as text; default: the template that the checkpoint was fine-tuned with, "
        "or the tokenizer's own.",
        default=None,
    )
    input_jsonl: str | None = flag(
        'File of JSON lines to answer, each with "prompt" or "messages"; "image" or "images" are files beside it or '
        "data URLs.",
        default=None,
    )
    output_jsonl: str | None = flag(
        "File that gets the answers, one line for each of --input-jsonl in its order; lines that are there are kept, "
        "and the rest is answered.",
        default=None,
    )

    def sampling(self) -> Mapping[str, Any]:
        """Fields of ``Sampling``."""
        names = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
        return {name: getattr(self, name) for name in names}


def flags_without_effect() -> dict[str, LegacyFlag]:
    """What to do instead, by spelling, of flags of this tool that a server isn't asked for."""
    own = "PUT /api has no such field; leave it out, or give --load in place of the server's address"
    servers = "a setting of the server; give it to run_text_generation_server.py, and leave it out here"
    groups = {
        LocalConfig: own,
        TrainedModelConfig: servers,
        TrainedModelLayoutConfig: servers,
        InferenceConfig: servers,
    }
    return {
        spelling: LegacyFlag("refused", word)
        for group, word in groups.items()
        for spec in flags_of(group)
        for spelling in spec.spellings()
    }


def flags_of_clients() -> dict[str, LegacyFlag]:
    """What to do instead, by spelling, of flags that have an effect with a server alone."""
    word = "it is about a server; give its HOST:PORT as the first argument, or leave it out"
    return {spelling: LegacyFlag("refused", word) for spec in flags_of(ClientConfig) for spelling in spec.spellings()}


def check_ways(config: GenerateConfig, local: LocalConfig) -> None:
    """Raise ConfigError for flags that do not go together."""
    given = [flag for flag, value in (("--prompt", config.prompt), ("--prompt-file", config.prompt_file)) if value]
    if local.chat:
        given.append("--chat")
    if local.input_jsonl:
        given.append("--input-jsonl")
    if (local.chat or local.input_jsonl) and len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are different ways to ask; keep one")
    if local.image and local.input_jsonl:
        raise ConfigError("--image has no effect on --input-jsonl: leave it out, or give prompts with --prompt")
    if local.min_tokens > config.tokens_to_generate:
        raise ConfigError(
            f"--min-tokens {local.min_tokens} is more than --tokens-to-generate {config.tokens_to_generate}: lower the "
            "one or raise the other"
        )
    if (local.input_jsonl is None) != (local.output_jsonl is None):
        raise ConfigError("--input-jsonl and --output-jsonl belong together: questions, and the file for their answers")
    if local.system is not None and not local.chat:
        raise ConfigError("--system is the first message of a conversation, and there is none; add --chat")
    if local.chat_template is not None and not (local.chat or local.input_jsonl):
        raise ConfigError("--chat-template writes conversations, and there is none; add --chat or --input-jsonl")
