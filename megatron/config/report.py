"""The model, settings with their sources and the layout of ranks, as text for start-up reports and dry runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.config.flags import plural_s
from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, MLP
from megatron.config.pipeline import model_stages, schedule_name
from megatron.config.run import RunConfig

_MOST_LISTED = 8  # stages that are listed one by one


def describe_model(run: RunConfig) -> str:
    """The architecture in one line."""
    model = run.model
    if own := run.family.describe_architecture():
        return own
    letters = run.part(HybridConfig).all_letters  # none where all layers have attention and a network
    heads = f"{model.num_attention_heads} heads of {model.kv_channels}"
    if model.num_query_groups != model.num_attention_heads:
        heads += f" ({model.num_query_groups} for keys and values)"
    if model.multi_latent_attention:
        heads += f" with values of {model.v_head_dim} from latents of {model.kv_lora_rank}"
    mlp = {"swiglu": "SwiGLU", "geglu": "GEGLU", "geglu_tanh": "GEGLU"}.get(model.activation, model.activation)
    network = f"{mlp} MLP of {model.ffn_hidden_size}{' in parallel with attention' if model.parallel_attention else ''}"
    decoder = run.num_layers - model.num_layers
    layers = f"{model.num_layers} encoder and {decoder} decoder" if decoder else f"{model.num_layers}"
    parts = [
        f"{layers} layers of {model.hidden_size}",
        *([heads] if not letters or ATTENTION in letters else []),
        *([network] if not letters or MLP in letters else []),
        *(words for part in run.parts for words in part.described(run)),
        model.normalization + (f" {model.norm_placement} sublayers" if model.norm_placement != "before" else ""),
        f"{'no' if model.position_embedding_type == 'none' else model.position_embedding_type} positions",
        f"vocabulary {model.vocab_size:,}, padded to {run.padded_vocab_size:,}",
    ]
    return ", ".join(parts)


def settings_report(run: RunConfig) -> list[str]:
    """``--flag value  (source)`` for each setting that is not its flag's default, in aligned columns."""
    rows = []
    for spec in run.flags():
        value = run.value(spec)
        if spec.options.internal or value == spec.default:
            continue
        source = run.provenance.get(spec.field, "")
        if source.startswith(("derived", "default of ")) and not run.family.is_reported(spec.field):
            continue
        rows.append((spec.typed(value), source))
    width = min(max((len(text) for text, _ in rows), default=0), 60)
    return [f"{text:<{width}}  {source}".rstrip() for text, source in rows]


def layout_report(run: RunConfig, *, ranks_per_node: int) -> list[str]:
    """Each axis of more than one rank: its size, its groups, and whether a group is within a node."""
    nodes = -(-run.world_size // ranks_per_node)
    where = f"{nodes:,} nodes of {ranks_per_node}" if nodes > 1 else "one node"
    lines = [f"{run.world_size:,} rank{plural_s(run.world_size)} on {where}"]
    shown_axes = [(name, size, stride) for name, size, stride in axes(run) if size > 1]
    width = max(len(name) for name in ("pipeline", *(name for name, *_ in shown_axes)))
    for name, size, stride in shown_axes:
        members = range(0, size * stride, stride)
        shown = ", ".join(map(str, members)) if size <= 4 else f"{members[0]}, {members[1]}, ... {members[-1]}"
        # Groups lie in blocks of consecutive ranks; unless blocks fill nodes evenly, some group is in two nodes.
        within = "within a node" if nodes == 1 or ranks_per_node % (stride * size) == 0 else "across nodes"
        groups = run.world_size // size
        which = f"{groups:,} groups, the first is {shown}" if groups > 1 else "all of them"
        lines.append(f"{name:<{width}} {size:>5,} ranks: {which} ({within})")
    return lines


def axes(run: RunConfig) -> Iterator[tuple[str, int, int]]:
    """Name, size and stride of each axis, the fastest first."""
    parallel = run.parallel
    data, pipeline = ("data", run.data_parallel_size), ("pipeline", parallel.pipeline_model_parallel_size)
    slow = (pipeline, data) if parallel.use_tp_pp_dp_mapping else (data, pipeline)
    stride = 1
    for name, size in (
        ("tensor", parallel.tensor_model_parallel_size),
        ("context", parallel.context_parallel_size),
        *slow,
    ):
        yield name, size, stride
        if name == "data" and (copies := parallel.num_distributed_optimizer_instances) > 1:
            yield "in a copy", size // copies, stride
            yield "copies", copies, stride * size // copies
        stride *= size
    yield "workers", parallel.num_workers, stride
    if parallel.etp != parallel.tensor_model_parallel_size:
        yield "expert tensor", parallel.etp, 1
    yield "expert", parallel.expert_model_parallel_size, parallel.etp


def stages_report(run: RunConfig) -> str:
    """``1f1b: 3 stages of 3, 3 and 2 layers``; in long lists equal neighbours are counted; empty without a pipeline."""
    if run.parallel.pipeline_model_parallel_size == 1:
        return ""
    stages = model_stages(run)
    sizes = [str(len(stage.layers)) for stage in stages]
    is_even = len(set(sizes)) == 1
    if len(sizes) > _MOST_LISTED:
        runs = [(size, len(list(same))) for size, same in itertools.groupby(sizes)]
        sizes = [f"{size} ({times} times)" if times > 1 else size for size, times in runs]
    each = len(stages[0].layers) if is_even else f"{', '.join(sizes[:-1])} and {sizes[-1]}"
    return f"{schedule_name(run)}: {len(stages)} stages of {each} layers"


def count(number: float) -> str:
    """``1.24 B``: a count in three digits."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def gigabytes(size: float) -> str:
    """``12.34 GB``, of 10^9 bytes; in megabytes below one."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
