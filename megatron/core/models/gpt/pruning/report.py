"""What a smaller model keeps of the larger one, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.core.conversion.portable import PortableModel
from megatron.core.models.gpt.pruning.importance import Importance
from megatron.core.models.gpt.pruning.pruned import Pruned
from megatron.core.models.gpt.pruning.targets import sizes_of

_TITLES = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "ffn_hidden_size": "inner width of MLPs",
    "num_attention_heads": "attention heads",
    "num_query_groups": "query groups",
    "num_experts": "experts",
    "moe_ffn_hidden_size": "inner width of experts",
    "moe_shared_expert_intermediate_size": "inner width of shared experts",
}
_KINDS = {
    "ffn_hidden_size": "neurons",
    "num_attention_heads": "heads",
    "num_experts": "experts",
    "moe_ffn_hidden_size": "neurons of experts",
    "moe_shared_expert_intermediate_size": "neurons of shared experts",
}


def table_of(portable: PortableModel, made: Pruned, importance: Importance, loss: float | None) -> Iterator[str]:
    """Lines about sizes, parameters and the ``loss`` of the smaller model, if it was measured, with the share of the
    summed scores that what is kept has.
    """
    before, after = sizes_of(portable), sizes_of(made.model)
    yield _row("", "before", "after", "")
    for name, title in _TITLES.items():
        if before[name]:
            note = "" if before[name] == after[name] or loss is None else _share(name, made, importance)
            if name == "num_layers" and after[name] < before[name]:
                gone = [str(layer + 1) for layer in range(before[name]) if layer not in made.layers]
                note = f"without {', '.join(gone)}"
            yield _row(title, f"{before[name]:,}", f"{after[name]:,}", note)
    parameters = portable.num_parameters, made.model.num_parameters
    share = f"{100 * parameters[1] / parameters[0]:.1f} %"
    yield _row("parameters", f"{parameters[0]:,}", f"{parameters[1]:,}", share)
    if loss is not None:
        yield _row("loss of the texts", f"{importance.loss:.4f}", f"{loss:.4f}", "")


def _row(title: str, before: str, after: str, note: str) -> str:
    return f"{title:<30} {before:>15} {after:>15}  {note}".rstrip()


def _share(name: str, made: Pruned, importance: Importance) -> str:
    """The part of the summed scores that is kept, in layers that are kept."""
    pairs = list[tuple[Tensor, Tensor]]()
    if name == "hidden_size":
        pairs.append((importance.channels, made.channels))
    pairs += [(importance.units[key], kept) for key, kept in made.units.items() if key[0] == _KINDS.get(name)]
    return f"{100 * _kept(pairs):.1f} % of the scores" if pairs else ""


def _kept(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    total = sum(float(scores.sum()) for scores, _ in pairs)
    return sum(float(scores.gather(-1, kept).sum()) for scores, kept in pairs) / max(total, 1e-300)
