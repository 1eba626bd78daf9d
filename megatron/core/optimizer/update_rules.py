"""The update rules by name, and what each keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.element_rules import SGD, AdamW, AdEMAMix, Lion
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.soap import Soap
from megatron.core.optimizer.update_rule import ElementRule, MatrixRule

UpdateRule = ElementRule | MatrixRule
UPDATE_RULES: Mapping[str, Callable[[OptimizerConfig], UpdateRule]] = {
    "adam": AdamW,
    "sgd": SGD,
    "lion": Lion,
    "ademamix": AdEMAMix,
    "muon": Muon,
    "adafactor": Adafactor,
    "soap": Soap,
}
"""The update rules by their names in ``--optimizer`` and in a parameter's policy."""


ROUNDED_STOCHASTICALLY = frozenset({"exp_avg_sq"})
"""State that changes by less than half a unit of bf16 a step, see ``storage.StochasticallyRounded``."""


def is_narrow(state_name: str, config: OptimizerConfig) -> bool:
    """Whether a tensor of an update rule's state is stored in bf16, and not in fp32."""
    formats = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    return formats.get(state_name) == "bf16"


def state_bytes(rule: str, config: OptimizerConfig) -> int:
    """Bytes for each parameter of what an optimizer keeps in flat buffers between steps, beside the weights and their
    masters: the state of the update rule and the average of ``--ema-decay``.
    """
    names = UPDATE_RULES[rule](config).state_names
    return sum(2 if is_narrow(name, config) else 4 for name in names) + 4 * (config.ema_decay is not None)
