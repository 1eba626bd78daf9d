"""The gated delta net: linear attention with heads split over tensor-parallel ranks (arXiv:2412.06464).

``in_proj`` gives, of each token, queries, keys, values, ``z`` (the gate), ``beta`` and ``alpha``. A causal convolution
and SiLU act on queries, keys and values; the gated delta rule mixes the tokens, ``beta`` being its rate and ``alpha``
its decay; a norm of each value head, gated by ``z``, and ``out_proj`` follow.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.core.ops.backend_choice import Choice
from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.delta_rule.backends import Backend, choose
from megatron.core.ops.delta_rule.recurrent import step
from megatron.core.ops.delta_rule.request import DeltaInputs, DeltaOptions
from megatron.core.ops.delta_rule.state_passing import slice_map
from megatron.core.ops.gated_norm import gated_norm
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.ssm import sequences
from megatron.core.ssm.heads import head_parameter
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.ssm.short_convolution import ShortConvolution, convolve_runs
from megatron.core.tensor_parallel.initialize import Constant, Uniform
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import Branch

_DECAYS = (1.0, 16.0)


def delta_net_branch(config: GatedDeltaNetConfig) -> Branch:
    """A gated delta net as a residual branch, in place of self-attention and with the names of its modules."""
    build = functools.partial(GatedDeltaNet, config=config)
    return Branch("self_attention", "input_layernorm", "attention", build, norm_placement=config.linear_norm_placement)


class _HeadNormWeight(nn.Module):
    """Weight ``[dv]`` of the gated norm, which all value heads share: each rank has the gradient of its heads."""

    def __init__(self, width: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = make_parameter(Sharding((width,), partial_grad=("tp",)), Constant(1.0), context)


@dataclass(frozen=True)
class _Heads:
    """Parameters of the heads that a call computes: this rank's, or its part of them with all tokens.

    ``key_heads``: how many. ``conv_weight`` [c, 1, k]: channels of queries, keys and values. ``dt_bias``, ``A_log``
    [h]: of the value heads.
    """

    key_heads: int
    conv_weight: Tensor
    dt_bias: Tensor
    A_log: Tensor


class GatedDeltaNet(RecurrentMixer[_Heads]):
    """The mixer over this rank's heads. ``A_log`` and ``dt_bias`` are fp32 or wider, and so are decays and states.

    With fewer key heads than ranks, the ranks of a key head divide its value heads and each compute its queries and
    keys.
    """

    def __init__(self, place: BranchPlace, *, config: GatedDeltaNetConfig) -> None:
        super().__init__(place, module="gated_delta_net", exchange=config.linear_cp_comm_type)
        self._config, context = config, place.context
        self._eps = config.linear_norm_epsilon or place.stack.model.norm_epsilon
        ranks, key_heads, heads = context.mesh.size("tp"), config.linear_num_key_heads, config.linear_num_value_heads
        self._key_heads, self._heads = max(1, key_heads // ranks), heads // ranks
        self._keys = self._key_heads * config.linear_key_head_dim
        self._values = self._heads * config.linear_value_head_dim
        keys, values = StackedPart(config.key_width, groups=key_heads), StackedPart(config.value_width)
        of_heads = StackedPart(heads)
        parts = (keys, keys, values, values, of_heads, of_heads)
        self.in_proj = self._projection_of(place, parts)
        self.conv1d = ShortConvolution(parts[:3], config.linear_conv_kernel_dim, context)
        self.dt_bias = head_parameter(heads, Constant(1.0), context)
        self.A_log = head_parameter(heads, Uniform(*_DECAYS, transform=torch.log), context)
        self.out_norm = _HeadNormWeight(config.linear_value_head_dim, context)
        self.out_proj = self._output_of(place, config.value_width)
        self._options = DeltaOptions(
            scale=config.linear_key_head_dim**-0.5, normalizes=True, chunk_size=config.linear_attention_chunk_size
        )
        self._backend = self._choice(context.device).backend

    def describe_backend(self, device: torch.device) -> tuple[str, str]:
        """What it computes by a backend, and the one that serves on ``device``, in words; ConfigError for none."""
        return "delta rule", self._choice(device).describe()

    def _choice(self, device: torch.device) -> Choice[Backend]:
        config = self._config
        return choose(
            config.linear_attention_backend,
            device=device,
            dtype=self._context.dtype,
            key_width=config.linear_key_head_dim,
        )

    @property
    def _channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self._keys + self._values

    @property
    def text_state(self) -> Slotted:
        """The last rows before the convolution, and the state of each value head."""
        config = self._config
        state = (self._heads, config.linear_key_head_dim, config.linear_value_head_dim)
        return self._kept_of_a_text(config.linear_conv_kernel_dim, self._channels, state)

    @override
    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``z``, the rows of the convolution, and ``beta`` with ``alpha``."""
        rows, z, gates = torch.split(projected, [self._channels, self._values, 2 * self._heads], dim=-1)
        return z, rows, gates

    @override
    def _normalized(self, y: Tensor, gate: Tensor) -> Tensor:
        """The norm of each value head, times SiLU of the gate."""
        weight = self.out_norm.weight.repeat(self._heads)
        return gated_norm(y, gate, weight, eps=self._eps, groups=self._heads, norm_before_gate=True)

    @override
    def _own_heads(self) -> _Heads:
        return _Heads(self._key_heads, self.conv1d.weight, self.dt_bias, self.A_log)

    @override
    def _recur(
        self, rows: Tensor, rest: Tensor, heads: _Heads, document_ids: Tensor | None, states: States | None = None
    ) -> tuple[Tensor, Tensor]:
        before, first = (None, None) if states is None else (states["conv"], states["state"])
        rows, gates = rows.transpose(0, 1), rest.transpose(0, 1)
        convolved = causal_conv(rows, heads.conv_weight, None, initial=before, document_ids=document_ids)
        inputs = self._inputs(convolved, gates, heads, document_ids)
        if first is not None and rows.shape[1] == 1:  # the next token of each text
            out, state = step(inputs.token(0), first, self._options)
            out = out.unsqueeze(1)
        else:
            out, state = self._backend.apply(inputs, self._options, first)
        return out.transpose(0, 1).flatten(2), state

    def _inputs(self, convolved: Tensor, gates: Tensor, heads: _Heads, document_ids: Tensor | None) -> DeltaInputs:
        """What the delta rule takes, of what the convolution gives [b, l, q|k|v] and [b, l, beta|alpha]."""
        config, keys = self._config, heads.key_heads * self._config.linear_key_head_dim
        active = F.silu(convolved)
        q, k, v = torch.split(active, [keys, keys, active.shape[-1] - 2 * keys], dim=-1)
        beta, alpha = gates.to(self._wide).chunk(2, dim=-1)
        rate = beta.sigmoid()
        by_head = (*q.shape[:-1], heads.key_heads, config.linear_key_head_dim)
        return DeltaInputs(
            q.view(by_head),
            k.view(by_head),
            v.view(*v.shape[:-1], -1, config.linear_value_head_dim),
            log_decay=-heads.A_log.exp() * F.softplus(alpha + heads.dt_bias),
            beta=rate * 2.0 if config.linear_negative_eigenvalues else rate,
            document_ids=document_ids,
        )

    @override
    def _with_heads_split(self, projected: Tensor, document_ids: Tensor | None) -> Tensor:
        mesh, own = self._context.mesh, self._own_heads()
        size = mesh.size("cp")
        channels, of_heads = self._channels_of_ranks(projected.device)
        own_channels, own_heads = channels[mesh.rank("cp")], of_heads[mesh.rank("cp")]
        first = self._channels + self._values
        wanted = torch.cat((channels, first + of_heads, first + self._heads + of_heads), dim=1)
        whole = sequences.to_heads(projected, wanted, mesh)
        rows, gates = torch.split(whole, [len(own_channels), 2 * len(own_heads)], dim=-1)
        heads = _Heads(
            max(1, self._key_heads // size),
            own.conv_weight.index_select(0, own_channels),
            own.dt_bias.index_select(0, own_heads),
            own.A_log.index_select(0, own_heads),
        )
        mixed, _ = self._recur(rows, gates, heads, document_ids)
        return sequences.to_sequence(mixed, mesh)

    def _channels_of_ranks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Channels of q|k|v and value heads that each context-parallel rank computes, [cp, c] and [cp, h]. A key head
        goes to all ranks that have value heads of it.
        """
        ranks, width = self._context.mesh.size("cp"), self._config.linear_key_head_dim
        q, k, v = torch.split(torch.arange(self._channels, device=device), [self._keys, self._keys, self._values])
        q, k = (sequences.groups_by_rank(each, width, ranks) for each in (q, k))
        heads = torch.arange(self._heads, device=device).view(ranks, -1)
        return torch.cat((q, k, v.view(ranks, -1)), dim=1), heads

    @override
    def _with_states_passed(self, rows: Tensor, rest: Tensor, document_ids: Tensor | None) -> Tensor:
        """What the states before runs add is known once all ranks have told what their runs do to a state."""
        mesh, heads = self._context.mesh, self._own_heads()
        rows, gates = sequences.runs_of(rows), sequences.runs_of(rest)
        runs = convolve_runs(rows, heads.conv_weight, None, document_ids, mesh)
        inputs = self._inputs(runs.rows, gates, heads, runs.document_ids)
        found = slice_map(inputs, self._options, self._backend, continues=runs.continues)
        every = sequences.gather_runs(torch.cat((found.transition, found.added), dim=-1), mesh)  # [2·cp, b, h, dk, …]
        state, states = torch.zeros_like(every[0, ..., found.transition.shape[-1] :]), list[Tensor]()
        for run in every:
            states.append(state)
            transition, added = torch.split(run, [state.shape[-2], state.shape[-1]], dim=-1)
            state = torch.matmul(transition, state) + added
        mine = torch.cat([states[number] for number in sequences.own_runs(mesh)])
        return sequences.joined(found.outputs_after(mine)).flatten(2)

    def costs(self, workload: Workload) -> Costs:
        """Keeps what the projection gives, the convolution's rows before and after SiLU, decays and rates, the states
        between chunks, and the norm's input and one number per head; recomputed, only what the projection gives.

        The delta rule counts as its products of whole chunks; gradients of what it keeps need most memory at a time.
        """
        config, ranks = self._config, self._context.mesh.size("cp")
        item, wide, tokens = workload.itemsize, self._wide.itemsize, workload.tokens
        key_width, value_width, passes = config.linear_key_head_dim, config.linear_value_head_dim, ranks > 1
        exchanges = passes and config.linear_cp_comm_type == "a2a"
        length = workload.length // (1 if not passes or exchanges else 2 * ranks)
        chunk = min(config.linear_attention_chunk_size, length)
        with_map = key_width * (passes and not exchanges)
        states = tokens * -(-length // chunk) / length * self._heads * key_width * (value_width + with_map)
        projected = tokens * (self._channels + self._values + 2 * self._heads) * item
        kept = tokens * (2 * self._channels + self._values) * item
        kept += tokens * (5 + config.linear_negative_eigenvalues) * self._heads * wide + int(states) * wide
        if exchanges:  # copies with the whole sequence, of shared key heads several
            shared = 2 * self._keys * (max(1, ranks // self._key_heads) - 1)
            kept += tokens * (self._channels + 2 * self._heads + 3 * shared) * item
        if with_map:
            kept += tokens * self._heads * (2 * with_map + value_width) * item
        heads, channels = config.linear_num_value_heads, 2 * config.key_width + config.value_width
        of_head = chunk * (5 * key_width + 3 * value_width) + 6 * key_width * value_width
        flops = float(workload.all_tokens * (2 * config.linear_conv_kernel_dim * channels + heads * of_head))
        matmuls = total_of((self.in_proj, self.out_proj), workload)
        kept, again = (0, kept) if self._recomputes else (kept, 0)
        # Chunks are computed in the wide type, and five of their matrices have a gradient at a time.
        chunks = tokens * self._heads * (5 * chunk + 4 * key_width + 3 * value_width) * wide
        return dataclasses.replace(
            matmuls,
            flops=matmuls.flops + flops,
            kept=matmuls.kept + projected + kept,
            working=matmuls.working + 2 * chunks + again,
        )
