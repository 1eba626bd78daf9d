"""Flags of the server."""

from __future__ import annotations

import re

from megatron.config.flags import Settings, flag, switch
from megatron.config.legacy_flags import LegacyFlag
from megatron.errors import ConfigError

API_KEY_VARIABLE = "MEGATRON_API_KEY"
FLAGS_OF_REQUESTS = dict.fromkeys(
    ("--temperature", "--top_k", "--top-k", "--top_p", "--top-p", "--greedy", "--out-seq-length", "--num-samples"),
    LegacyFlag("ignored", "each request says how its tokens are sampled, and how long it may be"),
)
"""Flags of launch lines of Megatron-LM's server."""


class ServerConfig(Settings):
    """The text-generation server: where it listens, whom it answers, and its limits."""

    host: str = flag("Address to listen on; the default serves this machine alone, 0.0.0.0 any.", default="127.0.0.1")
    port: int = flag("Port to listen on; 0: a free one, which is printed.", default=5000, at_least=0, at_most=65535)
    served_model_name: str | None = flag(
        "Name of the model in requests and answers; default: the folder of checkpoints.", default=None
    )
    api_key: tuple[str, ...] = flag(
        f"Keys of which a request must bring one (Authorization: Bearer KEY); also ${API_KEY_VARIABLE}, separated by "
        "commas. Without them anybody is served.",
        default=(),
    )
    allowed_origins: tuple[str, ...] = flag(
        "Web pages (as https://host:port, or * for all) whose scripts may ask this server.", default=()
    )
    max_queue: int = flag(
        "Texts that may wait for those that run (--inference-max-requests); more are refused with status 429.",
        default=256,
        at_least=0,
    )
    max_body_size_mb: int = flag("Largest body of a request in MiB.", default=8, at_least=1, at_most=1024)
    request_timeout: float = flag("Seconds after which a request is ended.", default=600.0, above=0, at_most=1e6)
    client_timeout: float = flag(
        "Seconds that a client may take to send a request's headers, and its body.", default=30.0, above=0, at_most=1e6
    )
    shutdown_timeout: float = flag(
        "Seconds that unfinished requests have after SIGTERM.", default=30.0, at_least=0, at_most=1e6
    )
    health_timeout: float = flag(
        "Seconds without a finished step after which GET /health answers 503.", default=120.0, above=0, at_most=1e6
    )
    chat_template: str | None = flag(
        "Jinja file that writes conversations as text; default: the template that the checkpoint was fine-tuned with, "
        "or the tokenizer's own.",
        default=None,
    )
    end_tokens: tuple[str, ...] = flag(
        "Tokens, or their ids, that end a text, such as <|im_end|>, in place of those that the checkpoint keeps; the "
        "tokenizer's own end always does, too.",
        default=(),
    )
    max_images: int = flag(
        "Most images of a request, for a model that reads them.", default=16, at_least=0, at_most=4096
    )
    max_image_pixels: int = flag(
        "Most pixels of an image; larger ones are refused before they are decoded.",
        default=1 << 25,
        at_least=1,
        at_most=1 << 26,
    )
    trust_request_chat_template: bool = switch("Requests may bring a chat template of their own.")
    vllm_metric_names: bool = switch(
        "Metrics have vLLM's names (vllm:…), which dashboards know, instead of megatron_…."
    )
    no_access_log: bool = switch("Print no line for each request.")


def check_access(config: ServerConfig) -> None:
    """Raise ConfigError for an address or a web page that would let in others than it says."""
    if not config.host:
        raise ConfigError("--host is empty; give an address: 127.0.0.1 serves this machine alone, 0.0.0.0 any")
    for origin in config.allowed_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^A-Z\s/?#]+", origin):
            raise ConfigError(
                f"--allowed-origins {origin!r} is no page that a browser names: give https://host or "
                "https://host:port, in small letters and without a path, or * for all"
            )


def api_keys(config: ServerConfig, variable: str) -> list[str]:
    """The keys of ``--api-key`` and of the environment's ``variable``; none: anybody is served.

    Raises ConfigError for a key that no request can bring, and for an empty one, which any request would.
    """
    listed = [each.strip() for each in variable.split(",") if each.strip()]
    if variable and not listed:
        raise ConfigError(f"${API_KEY_VARIABLE} is {variable!r} and holds no key: give one, or unset it")
    found = [*config.api_key, *listed]
    for key in found:
        if not re.fullmatch("[!-~]+", key):
            what = "empty" if not key else "no word of printable ASCII characters, as headers carry it"
            raise ConfigError(f"an API key (--api-key, ${API_KEY_VARIABLE}) is {what}: give another")
    return found
