"""Which backends of attention serve a run."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.config.run import RunConfig
from megatron.core.context_parallel.attention import actual_request
from megatron.core.device import capability
from megatron.core.models.train_spec import TrainSpec
from megatron.core.ops.attention.registry import choose
from megatron.core.ops.attention.request import AttentionRequest
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import workloads_of
from megatron.core.transformer.attention import Attention
from megatron.errors import ConfigError
from megatron.planning.model import latents_sent, planned_context, whole_model


def attention_choices(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> str:
    """The attention backend for each kind of layer and each ``--cp-comm-type``, in words."""
    model, asked = whole_model(config, train_spec), dict[AttentionRequest, str]()
    names = {id(module): name for name, module in model.named_modules()}
    for module, workload in workloads_of(model, train_spec.workload(config, planned_context(config))):
        if isinstance(module, Attention):
            request = replace(
                module.request(workload),
                device=context.device,
                capability=capability(context.device),
                deterministic=config.training.deterministic_mode,
                needs_grad=not config.training.skip_train,
            )
            path = [part for part in names[id(module)].split(".") if part != "layers" and not part.isdecimal()]
            asked.setdefault(request, " ".join(path))
    backend, kinds, texts = config.model.attention_backend, config.parallel.cp_comm_types, list[str]()
    for request, name in asked.items():
        for kind in kinds or ("p2p",):
            served = choose(actual_request(request, kind, context), backend).describe()
            texts.append(": ".join(filter(None, (name if len(asked) > 1 else "", kind if kinds else "", served))))
    return "; ".join([*texts, *latents_sent(config, train_spec)])


def check_backend(config: RunConfig, train_spec: TrainSpec) -> None:
    """Raise ConfigError when ``--attention-backend`` serves some layer neither on a CPU nor on a GPU.

    For a dry run, which need not run on the machine that will train.
    """
    if config.model.attention_backend == "auto":
        return
    planned, refusals = planned_context(config), list[ConfigError]()
    for device in (torch.device("cpu"), planned.device):  # backends ask whether it is a CPU
        try:
            attention_choices(config, train_spec, replace(planned, device=device))
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]
