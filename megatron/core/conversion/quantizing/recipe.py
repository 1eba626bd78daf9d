"""What is asked of quantization: scheme, method and texts, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.conversion.portable import PortableModel, refuse_quantized
from megatron.core.conversion.quantizing.matrices import quantized_parameters
from megatron.core.models.registry import family_of
from megatron.core.quantization.scheme import Scheme
from megatron.core.quantization.statistics import MOST_TOKENS
from megatron.errors import ConfigError

Method = Literal["rtn", "gptq", "awq", "smoothquant"]


@dataclass(frozen=True)
class Recipe:
    """How weights get their codes. ``orders``: GPTQ rounds the columns of the largest inputs first. ``exponent``:
    SmoothQuant's. ``ignore``: patterns of weights that stay as they are. ``cache``: keys and values get FP8 scales.
    """

    scheme: Scheme
    method: Method = "rtn"
    orders: bool = True
    exponent: float = 0.5
    ignore: tuple[str, ...] = ()
    cache: bool = False

    @property
    def needs_sums(self) -> bool:
        """Whether sums of inputs are needed, and not only their largest magnitudes."""
        return self.method in ("gptq", "awq")

    @property
    def needs_texts(self) -> bool:
        """Whether the model must read texts."""
        return self.method != "rtn" or self.scheme.needs_calibration or self.cache

    def check(self) -> None:
        """Raise ConfigError for a method that doesn't fit the scheme."""
        name = self.scheme.name
        if self.scheme.weights.block[0] > 1:
            raise ConfigError(
                f"--scheme {name} has scales of blocks of rows, which exports arrange anew: round the weights while "
                f"they are exported, with convert.py --to hf --quantize {name}"
            )
        if self.method == "smoothquant" and name != "w8a8":
            raise ConfigError(
                f"--method smoothquant makes inputs of products easier to round to int8: it is for --scheme w8a8, not "
                f"{name}; for weights alone there are gptq and awq"
            )
        if self.method in ("gptq", "awq") and self.scheme.weights.kind == "float":
            raise ConfigError(
                f"--method {self.method} is for integers, and --scheme {name} has FP8 weights, which rounding hardly "
                "changes: give --method rtn"
            )

    def parameters(self, portable: PortableModel) -> dict[str, tuple[int, ...]]:
        """The weights that it quantizes, by name, with their shapes.

        Raises CheckpointError for a model that is quantized already, ConfigError for what doesn't fit the model.
        """
        self.check()
        refuse_quantized(portable, "--load", what="its weights have lost what another choice of codes needs")
        family = family_of(portable.groups)
        if self.needs_texts and not family.train_spec.continues_texts:
            raise ConfigError(
                f"the model in --load is a {family.title}, and calibration reads texts with models that continue them: "
                "give --method rtn and a scheme without calibration"
            )
        if self.cache and portable.model.multi_latent_attention:
            raise ConfigError(
                "--kv-cache-scales fp8: the model in --load has latent attention, which caches latents and neither "
                "keys nor values; leave --kv-cache-scales out"
            )
        found = quantized_parameters(portable.model, portable.groups, self.ignore)
        for name, shape in found.items():
            self.scheme.weights.check_divides((shape[-2], shape[-1]), name)
        return found


def check_length(portable: PortableModel, *, samples: int, length: int, learned: bool) -> None:
    """Raise ConfigError for more tokens than sums are exact for, or sequences longer than the model's ``learned``
    positions.
    """
    if samples * length > MOST_TOKENS:
        raise ConfigError(
            f"--samples {samples} of --seq-length {length} are {samples * length:,} tokens, and sums over more than "
            f"{MOST_TOKENS:,} aren't exact: give fewer samples; 128 to 512 of 2048 tokens are usual"
        )
    most = portable.model.max_position_embeddings
    if learned and most is not None and length > most:
        raise ConfigError(f"--seq-length {length} is longer than the {most} positions that the model has learned")


def described(recipe: Recipe, names: Sequence[str]) -> str:
    """What will be done, in a line."""
    grid = recipe.scheme.weights
    group = f", groups of {grid.block[1]} inputs" if grid.block == (1, grid.block[1]) and grid.block[1] else ""
    return f"{recipe.scheme.name}{group} by {recipe.method}: {len(names)} weights of linear layers"
