"""A portable model as a folder of ONNX graphs, made by torch's exporter, with settings and tokenizer beside them."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from megatron.core.conversion.huggingface.writing import published_config, write_settings
from megatron.core.conversion.onnx.experts import without_dispatch
from megatron.core.conversion.onnx.graph import Graph, Named, onnx_format
from megatron.core.conversion.portable import PortableModel, load_weights
from megatron.core.models.registry import family_of
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import CheckpointError

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_OPSET = 20
_IN_ONE_FILE = 1_800_000_000  # bytes; protocol buffers end at 2 GiB


def check_packages(*, proves: bool) -> None:
    """Raise CheckpointError where a package is missing: the exporter's, and onnxruntime for a proof."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing and (proves or missing != ["onnxruntime"]):
        raise CheckpointError(
            f"ONNX files are written with onnx and onnxscript and proven with onnxruntime; {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install onnx onnxscript onnxruntime"
        )


@torch.no_grad()
def write_onnx(portable: PortableModel, folder: Path, *, say: Callable[[str], None]) -> None:
    """Write the model into the new ``folder``: its graphs in fp32, settings and tokenizer.

    CheckpointError for a model that has no graph.
    """
    written, context = onnx_format(portable), ModelContext.single()
    if portable.model.mtp_num_layers:
        say("note: the graph predicts the next token alone: layers of multi-token prediction are left out")
    model = dataclasses.replace(portable.model, attention_backend="eager")
    stage = family_of(portable.groups).train_spec.build_model(model, portable.groups, context)
    stage.eval().requires_grad_(False)
    load_weights(stage, portable, context.mesh)
    without_dispatch(stage)
    folder.mkdir(parents=True)
    write_settings(portable, _config(portable, say), folder)
    with context.products.by(F.linear):  # plain products, as a graph has them
        for graph in written.graphs(stage, portable):
            _write(graph, stage, folder / f"{graph.name}.onnx")


def _config(portable: PortableModel, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The config.json of the published type that the model is of; None where it is of none, which ``say`` is told."""
    try:
        found = published_config(portable)
    except CheckpointError as error:
        say(f"note: the folder has no config.json, which some programs read beside the graphs: {error}")
        return None
    return {**found, **{name: "float32" for name in ("dtype", "torch_dtype") if name in found}}


class _OverNames(nn.Module):
    """A graph as the exporter wants it: a module over a dictionary of tensors, to a list of them."""

    def __init__(self, graph: Graph, stage: nn.Module) -> None:
        super().__init__()
        self._graph, self._stage = graph, stage  # parameters of the stage become the graph's weights

    @override
    def forward(self, inputs: Named) -> Sequence[Tensor]:
        """The outputs, in their order."""
        return list(self._graph.compute(inputs).values())


def _write(graph: Graph, stage: nn.Module, path: Path) -> None:
    names = list(graph.compute(graph.inputs))
    dims: dict[str, Any] = {size: torch.export.Dim(size) for sizes in graph.free.values() for size in sizes.values()}
    dims |= dict.fromkeys(graph.sums, torch.export.Dim.DYNAMIC)
    free = {name: {dim: dims[size] for dim, size in graph.free[name].items()} for name in graph.inputs}
    with _quiet():
        program: Any = torch.onnx.export(
            _OverNames(graph, stage),
            # Each its own tensor: the tracer takes two inputs that are one tensor for one input.
            kwargs={"inputs": {name: each.clone() for name, each in graph.inputs.items()}},
            dynamic_shapes={"inputs": free},
            dynamo=True,
            opset_version=_OPSET,
            input_names=list(graph.inputs),
            output_names=names,
            verbose=False,
        )
    _name_sizes(program, graph)
    size = sum(each.nbytes for each in stage.parameters())
    program.save(str(path), external_data=size > _IN_ONE_FILE)


def _name_sizes(program: Any, graph: Graph) -> None:
    """Give sizes that are free the names by which users know them, in place of the tracer's symbols."""
    import onnx_ir

    known: dict[str, str] = {}
    for value in program.model.graph.inputs:
        for dim, name in graph.free[value.name].items():
            known.setdefault(str(value.shape[dim].value), name)
            value.shape[dim] = onnx_ir.SymbolicDim(name)
    for value in program.model.graph.outputs:
        for dim, size in enumerate(value.shape):
            if isinstance(size, onnx_ir.SymbolicDim):
                value.shape[dim] = onnx_ir.SymbolicDim(known.get(str(size.value), str(size.value)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off what the exporter says of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
