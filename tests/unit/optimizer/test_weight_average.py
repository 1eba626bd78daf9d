"""The moving average of the weights against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.core.optimizer.update_rules import state_bytes
from tests.unit.optimizer.test_optimizer import COUNT, Setup


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_the_average_is_torchs(dtype: torch.dtype, offload: bool) -> None:
    """An average of rounded weights stops moving in bf16, and one that begins at zero is too small for long."""
    settings: dict[str, Any] = {
        "optimizer_cpu_offload": offload,
        "use_precision_aware_optimizer": dtype == torch.bfloat16,
    }
    setup = Setup(dtype, ema_decay=0.8, **settings)
    model: AveragedModel | None = None
    for step in range(4):
        setup.set_grads(step)
        setup.optimizer.update(count=COUNT, lr=0.01, weight_decay=0.0)
        found = {entry.name: entry.tensor.double().reshape(-1) for entry in setup.optimizer.entries()}
        masters = {
            name: found.get(f"optimizer.fp32_param.{name}", parameter.detach().double().reshape(-1))
            for name, parameter in setup.parameters.items()
        }
        now = nn.ParameterDict({name: nn.Parameter(each.clone()) for name, each in masters.items()})
        model = model or AveragedModel(now, multi_avg_fn=get_ema_multi_avg_fn(0.8))  # type: ignore[no-untyped-call]
        model.update_parameters(now)
        for name, average in dict(model.module.named_parameters()).items():
            torch.testing.assert_close(found[f"optimizer.ema.{name}"], average.detach(), rtol=1e-6, atol=1e-7)


def test_its_bytes_are_counted() -> None:
    """A run that was planned without its average ran out of memory: 4 bytes per weight beside Adam's 8."""
    configs = [Setup(torch.float32, ema_decay=decay).optimizer._config for decay in (None, 0.9)]
    assert [state_bytes("adam", config) for config in configs] == [8, 12]
