"""A user's module on a rank: its device and type, the layout of its parameters, and equal values on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from megatron.core.parallel.collectives import broadcast
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, persistent_buffers, sharded_parameters
from megatron.core.tensor_parallel.initialize import initialize_parameters
from megatron.errors import ConfigError

ModuleMaker = Callable[[ModelContext], nn.Module]
"""Makes this rank's part of a module, such as ``lambda context: Net(width=64)``."""


def make_module(source: nn.Module | ModuleMaker, context: ModelContext, *, seed: int | None) -> nn.Module:
    """The given module, or the one that the function makes with torch's global generator seeded.

    Raises ConfigError for what is no module that can be trained.
    """
    if not isinstance(source, nn.Module):
        if seed is not None:
            torch.manual_seed(seed)
        source = source(context)
    check_module(source)
    return source


def check_module(module: Any) -> None:
    """Raise ConfigError for what is no module that can be trained, naming the parameter."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model has type {type(module).__name__}: give a torch.nn.Module or a function that makes one"
        )
    name = type(module).__name__
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        raise ConfigError(
            f"the model is wrapped in {name}, and megatron.pretrain does data parallelism itself: pass model.module"
        )
    for parameter_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigError(
                f"{parameter_name} of {name} has no shape yet (a lazy layer): call the module once with a batch first"
            )
        if tensor.is_complex():
            raise ConfigError(f"{parameter_name} of {name} is complex; keep its real and imaginary parts instead")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"{name} has no parameter to train: give it one with requires_grad=True")
    for module_name, each in module.named_modules():
        if getattr(each, "sparse", False):
            raise ConfigError(
                f"{module_name or name} ({type(each).__name__}) makes sparse gradients, which are not summed over "
                "ranks here: build it with sparse=False"
            )


def place(module: nn.Module, context: ParallelContext, *, seed: int | None) -> nn.Module:
    """The module on the rank's device in the run's type, with a ``Sharding`` for each parameter. A collective.

    A parameter without one is replicated. Replicas start with the values of the first. Raises ConfigError for a layout
    that the parameters don't have, naming one.
    """
    name = type(module).__name__
    for parameter_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise ConfigError(
                f"{parameter_name} of {name} is on the meta device and has no values: build it on the CPU"
            )
    module.zero_grad(set_to_none=True)
    module.to(device=context.device, dtype=context.dtype)
    own = set(assign_shardings(module, context))
    if seed is not None:
        declared = (each for each in sharded_parameters(module) if hasattr(each[1], "initialization"))
        initialize_parameters(declared, context.mesh, seed=seed)
    for parameter_name, parameter, sharding in sharded_parameters(module):
        parameter.data = parameter.data.contiguous()
        axes = sharding.reduce if parameter_name in own else (*sharding.reduce, "tp")
        broadcast(parameter.data, context.mesh, *axes)
    broadcast_buffers(module, context.mesh, "dc", "dp", "cp", "tp")
    if context.dtype.itemsize < 4:
        cast_inputs_and_outputs(module, context.dtype)
    return module


def broadcast_buffers(module: nn.Module, mesh: Mesh, *axes: Axis) -> None:
    """Give every replica the buffers of the first one, such as the running statistics of a BatchNorm. A collective."""
    if mesh.size(*axes) == 1:
        return
    for _, buffer in persistent_buffers(module):
        sent = buffer.detach().contiguous()
        broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, mesh, *axes)
        if sent.data_ptr() != buffer.data_ptr():
            buffer.copy_(sent)


def assign_shardings(module: nn.Module, context: ParallelContext) -> list[str]:
    """Give each parameter without a ``Sharding`` that of a replica, and return the names of those that have their own.

    Raises ConfigError for a parameter that doesn't fit the layout.
    """
    name, mesh, own = type(module).__name__, context.mesh, list[str]()
    for parameter_name, parameter in module.named_parameters():
        sharding = getattr(parameter, "sharding", None)
        if sharding is not None and not getattr(parameter, "is_replica_here", False):
            own.append(parameter_name)
            if (expected := sharding.local_shape(mesh)) != tuple(parameter.shape):
                raise ConfigError(
                    f"parameter {parameter_name} of {name} has the shape {list(parameter.shape)}, and its Sharding "
                    f"gives this rank {list(expected)}: build it with sharding.local_shape(context.mesh)"
                )
            continue
        if context.sequence_parallel:
            raise ConfigError(
                f"parameter {parameter_name} of {name} has no Sharding, and with --sequence-parallel a rank may see "
                'only a part of its gradient: give it one, with partial_grad=("tp",) if it works on parts of sequences'
            )
        parameter.sharding = Sharding(tuple(parameter.shape))  # type: ignore[attr-defined]
        parameter.is_replica_here = True  # type: ignore[attr-defined]
    tp = mesh.size("tp")
    if tp > 1 and not any("tp" in sharding.split.values() for _, _, sharding in sharded_parameters(module)):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} divides nothing: no parameter of {name} has a Sharding that splits it "
            'over "tp"; leave the flag out, or build layers of megatron.core.tensor_parallel'
        )
    return own


def meta_twin(module: nn.Module, twins: dict[Tensor, nn.Parameter] | None = None) -> nn.Module:
    """The tree of a module's modules and parameters on the meta device, without their code, for planning.

    ``twins``: parameters made so far, by the original, so that shared parameters stay shared.
    """
    twins = {} if twins is None else twins
    methods: dict[str, Any] = {}
    if hasattr(module, "costs"):
        methods = {"costs": lambda _, workload: module.costs(workload), "forward": lambda _: None}  # type: ignore[operator]
    twin: nn.Module = type(type(module).__name__, (nn.Module,), methods)()
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in twins:
            made = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            if not getattr(parameter, "is_replica_here", False) and hasattr(parameter, "sharding"):
                made.sharding = parameter.sharding  # type: ignore[attr-defined]
            twins[parameter] = made
        twin.register_parameter(name, None if parameter is None else twins[parameter])
    for name, child in module._modules.items():
        twin.add_module(name, None if child is None else meta_twin(child, twins))
    return twin


def cast_inputs_and_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point inputs to ``dtype`` and 16-bit outputs to fp32 by hooks, as Megatron-LM does."""

    def cast_in(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return converted((args, kwargs), lambda tensor: tensor.to(dtype))

    def cast_out(_: nn.Module, args: Any, output: Any) -> Any:
        return converted(output, lambda tensor: tensor.float() if tensor.dtype.itemsize < 4 else tensor)

    for handle in getattr(module, "cast_hooks", ()):
        handle.remove()
    handles = module.register_forward_pre_hook(cast_in, with_kwargs=True), module.register_forward_hook(cast_out)
    object.__setattr__(module, "cast_hooks", handles)


def converted(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every floating-point tensor in its tuples, lists and dictionaries changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(converted(each, change) for each in value)
    if isinstance(value, dict):
        changed = {name: converted(each, change) for name, each in value.items()}
        if type(value) is dict:
            return changed
        for name, each in changed.items():  # an output class of transformers, whose attributes follow its items
            value[name] = each
    return value
