"""The proof of a folder of ONNX graphs: onnxruntime computes the source's logits from them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.conversion.onnx.graph import Named, Run, onnx_format
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.proof import Proof, compare
from megatron.core.conversion.questions import Answer, Question
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class OnnxProof(Proof):
    """Result of comparing logits. ``ways``: how many times the graphs were asked, in sizes of their own."""

    ways: int = 1

    @override
    def __str__(self) -> str:
        version = importlib.metadata.version("onnxruntime")
        return f"onnxruntime {version} computes it in {self.ways} ways: {super().__str__()}"


def prove_onnx(folder: Path, portable: PortableModel, before: Answer, question: Question) -> OnnxProof:
    """The proof that the graphs in ``folder`` give the logits ``before``, those of the source's files, however texts
    are divided over calls; ProofError otherwise.
    """
    words = portable.model.vocab_size
    unpadded = {name: logits[..., :words] if name == "words" else logits for name, logits in before.items()}
    answers = onnx_format(portable).answers(_sessions(folder), question, unpadded)
    found = max((compare(*pair) for pair in answers), key=lambda proof: proof.difference)
    return OnnxProof(found.difference, found.largest, len(answers))


def _sessions(folder: Path) -> Run:
    """Runs graphs of the folder by onnxruntime on a CPU. What a caller keeps of texts is empty where it isn't given."""
    import onnxruntime

    opened, options = dict[str, Any](), onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # its own, one a core, wait by turning

    def run(name: str, inputs: Named) -> Named:
        path = folder / f"{name}.onnx"
        try:
            if name not in opened:
                opened[name] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            session = opened[name]
            rows = len(next(iter(inputs.values())))
            given = {
                each.name: (inputs[each.name] if each.name in inputs else _empty(each.shape, rows)).numpy()
                for each in session.get_inputs()
            }
            names = [each.name for each in session.get_outputs()]
            return dict(zip(names, map(torch.from_numpy, session.run(names, given))))
        except Exception as error:  # onnxruntime raises anything for graphs that it doesn't like
            first = str(error).partition("\n")[0]
            raise CheckpointError(f"onnxruntime cannot run {path.name}: {type(error).__name__}: {first}") from error

    return run


def _empty(shape: Sequence[int | str], rows: int) -> Tensor:
    """What is kept of no tokens: ``rows`` texts, and 0 for other free sizes."""
    return torch.zeros(rows, *(size if isinstance(size, int) else 0 for size in shape[1:]))
