"""The Mamba-2 mixer: a state-space model of each head, with heads split over tensor-parallel ranks.

``in_proj`` gives, of each token, ``z`` (the gate), ``x``, ``B``, ``C`` and ``dt``. A causal convolution and SiLU act on
``x``, ``B`` and ``C``; a scan mixes the tokens; a norm gated by ``z`` and ``out_proj`` follow (arXiv:2405.21060).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.mamba import MambaConfig
from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.gated_norm import gated_norm
from megatron.core.ops.state_space import (
    ScanInputs,
    choose,
    default_chunk_size,
    output_of_initial_state,
    scan,
    step,
    total_decay,
    working_bytes,
)
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.collectives import all_reduce_among
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.exchange import RankGroup
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.ssm import sequences
from megatron.core.ssm.heads import head_parameter
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.ssm.short_convolution import BiasedShortConvolution, convolve_runs
from megatron.core.tensor_parallel.initialize import Constant, Uniform
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import Branch

_STEPS = (0.001, 0.1)  # initial time steps are between them, equally likely on a logarithmic scale
_LEAST_STEP = 1e-4
_DECAYS = (1.0, 16.0)


def mamba_branch(config: MambaConfig) -> Branch:
    """A Mamba-2 mixer as a residual branch."""
    return Branch("mixer", "norm", "mamba", functools.partial(MambaMixer, config=config))


def _as_bias(logarithm: Tensor) -> Tensor:
    """The bias whose softplus is a time step, from the logarithm of the step."""
    steps = logarithm.exp().clamp(min=_LEAST_STEP)
    return steps + torch.log(-torch.expm1(-steps))


class NormWeight(nn.Module):
    """Weight ``[channels]`` of the gated norm, which ranks divide."""

    def __init__(self, channels: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = make_parameter(Sharding((channels,), {0: "tp"}), Constant(1.0), context)


@dataclass(frozen=True)
class _Heads:
    """Parameters of the heads that a call computes: this rank's, or its part of them with all tokens.

    ``groups``: of B and C. ``conv_weight`` [c, 1, k], ``conv_bias`` [c]: channels of x, B and C. ``dt_bias``, ``a``,
    ``D`` [h].
    """

    groups: int
    conv_weight: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    a: Tensor
    D: Tensor


class MambaMixer(RecurrentMixer[_Heads]):
    """The mixer over this rank's heads. ``A_log``, ``D`` and ``dt_bias`` are fp32 or wider, and so are time steps and
    states.

    With fewer groups than ranks, the ranks of a group each compute its B and C, and average the squares of its norm.
    """

    def __init__(self, place: BranchPlace, *, config: MambaConfig) -> None:
        super().__init__(place, module="mamba", exchange=config.mamba_cp_comm_type)
        model, context = place.stack.model, place.context
        self._config, self._eps = config, model.norm_epsilon
        ranks, groups, heads = context.mesh.size("tp"), config.mamba_num_groups, config.num_heads(model)
        inner_size = config.inner_size(model)
        self._heads, self._groups = heads // ranks, max(1, groups // ranks)
        self._inner, self._states = self._heads * config.mamba_head_dim, self._groups * config.mamba_state_dim
        self._sharers = max(1, ranks // groups)
        self._scan = functools.partial(scan, chunk_size=config.mamba_chunk_size, backend=config.mamba_scan_backend)
        of_groups = StackedPart(groups * config.mamba_state_dim, groups=groups)
        inner = StackedPart(inner_size)
        parts = (inner, inner, of_groups, of_groups, StackedPart(heads))
        self.in_proj = self._projection_of(place, parts)
        self.conv1d = BiasedShortConvolution(parts[1:4], config.mamba_conv_kernel_dim, context)
        lowest, highest = (math.log(each) for each in _STEPS)
        self.dt_bias = head_parameter(heads, Uniform(lowest, highest, transform=_as_bias), context)
        self.A_log = head_parameter(heads, Uniform(*_DECAYS, torch.log), context)
        self.D = head_parameter(heads, Constant(1.0), context)
        self.norm = NormWeight(inner_size, context)
        self.out_proj = self._output_of(place, inner_size)

    def describe_backend(self, device: torch.device) -> tuple[str, str]:
        """What it computes by a backend, and the one that serves on ``device``, in words; ConfigError for none."""
        return "scan", choose(device, self._context.dtype, self._config.mamba_scan_backend).describe()

    @property
    def text_state(self) -> Slotted:
        """The last rows before the convolution, and the state of each head."""
        config, channels = self._config, self._inner + 2 * self._states
        state = (self._heads, config.mamba_head_dim, config.mamba_state_dim)
        return self._kept_of_a_text(config.mamba_conv_kernel_dim, channels, state)

    @override
    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, the rows of the convolution, and dt, of ``projected`` [s, b, z|x|B|C|dt]."""
        widths = [self._inner, self._inner + 2 * self._states, self._heads]
        gate, given, dt = torch.split(projected, widths, dim=-1)
        return gate, given, dt

    @override
    def _normalized(self, y: Tensor, gate: Tensor) -> Tensor:
        average = self._average if self._sharers > 1 else None
        return gated_norm(y, gate, self.norm.weight, eps=self._eps, groups=self._groups, average=average)

    def _average(self, mean: Tensor) -> Tensor:
        """The mean over all channels of a group, which neighbouring ranks divide equally."""
        mesh = self._context.mesh
        members = RankGroup.of(mesh, "tp").neighbours(self._sharers).members
        return all_reduce_among(mean.contiguous(), mesh, members).div_(self._sharers)

    @override
    def _own_heads(self) -> _Heads:
        conv, a = self.conv1d, -self.A_log.exp()
        return _Heads(self._groups, conv.weight, conv.bias, self.dt_bias, a, self.D)

    def _inputs(self, convolved: Tensor, dt: Tensor, heads: _Heads, document_ids: Tensor | None) -> ScanInputs:
        """What the scan takes, of what the convolution gives [b, l, x|B|C] and dt [b, l, h]."""
        config, groups = self._config, heads.groups
        states = groups * config.mamba_state_dim
        active = F.silu(convolved)
        x, B, C = torch.split(active, [active.shape[-1] - 2 * states, states, states], dim=-1)
        by_group = (*B.shape[:-1], groups, config.mamba_state_dim)
        steps, limits = F.softplus(dt + heads.dt_bias), config.mamba_time_step_limits
        return ScanInputs(
            x.view(*x.shape[:-1], -1, config.mamba_head_dim),
            steps if limits is None else steps.clamp(*limits),
            heads.a,
            B.view(by_group),
            C.view(by_group),
            document_ids,
        )

    @override
    def _recur(
        self, rows: Tensor, rest: Tensor, heads: _Heads, document_ids: Tensor | None, states: States | None = None
    ) -> tuple[Tensor, Tensor]:
        conv, before = (None, None) if states is None else (states["conv"], states["state"])
        rows = rows.transpose(0, 1)
        convolved = causal_conv(rows, heads.conv_weight, heads.conv_bias, initial=conv, document_ids=document_ids)
        inputs = self._inputs(convolved, rest.transpose(0, 1), heads, document_ids)
        if before is not None and rows.shape[1] == 1:  # the next token of each text
            y, state = step(inputs.token(0), before)
            y = y.unsqueeze(1)
        else:
            y, state = self._scan(inputs, before)
        return self._with_skip(y, inputs.x, heads).transpose(0, 1).flatten(2), state

    @staticmethod
    def _with_skip(y: Tensor, x: Tensor, heads: _Heads) -> Tensor:
        """``y + D·x`` [b, l, h, p], computed in fp32 or wider."""
        return (y + x * heads.D.unsqueeze(-1)).to(y.dtype)

    @override
    def _with_heads_split(self, projected: Tensor, document_ids: Tensor | None) -> Tensor:
        mesh, own = self._context.mesh, self._own_heads()
        channels = self._channels_of_ranks(projected.device)
        of_conv, of_heads = torch.split(
            channels[mesh.rank("cp")],
            [channels.shape[1] - len(own.D) // mesh.size("cp"), len(own.D) // mesh.size("cp")],
        )
        whole = sequences.to_heads(projected, channels, mesh)
        given, dt = torch.split(whole, [len(of_conv), len(of_heads)], dim=-1)
        of_conv, of_heads = of_conv - self._inner, of_heads - 2 * (self._inner + self._states)
        heads = _Heads(
            max(1, self._groups // mesh.size("cp")),
            own.conv_weight.index_select(0, of_conv),
            own.conv_bias.index_select(0, of_conv),
            *(each.index_select(0, of_heads) for each in (own.dt_bias, own.a, own.D)),
        )
        y, _ = self._recur(given, dt, heads, document_ids)
        return sequences.to_sequence(y, mesh)

    def _channels_of_ranks(self, device: torch.device) -> Tensor:
        """Channels of x|B|C|dt among those of ``in_proj`` that each context-parallel rank needs, [cp, c]."""
        ranks, dim = self._context.mesh.size("cp"), self._config.mamba_state_dim
        numbers = torch.arange(2 * (self._inner + self._states) + self._heads, device=device)
        widths = [self._inner, self._inner, self._states, self._states, self._heads]
        _, x, B, C, dt = torch.split(numbers, widths)
        B, C = (sequences.groups_by_rank(each, dim, ranks) for each in (B, C))
        return torch.cat((x.view(ranks, -1), B, C, dt.view(ranks, -1)), dim=1)

    @override
    def _with_states_passed(self, rows: Tensor, rest: Tensor, document_ids: Tensor | None) -> Tensor:
        mesh, heads = self._context.mesh, self._own_heads()
        rows, dt = sequences.runs_of(rows), sequences.runs_of(rest)
        runs = convolve_runs(rows, heads.conv_weight, heads.conv_bias, document_ids, mesh)
        inputs = self._inputs(runs.rows, dt, heads, runs.document_ids)
        y, added = self._scan(inputs)
        state = sequences.states_before(total_decay(inputs, previous=runs.previous), added, mesh)
        y = y + output_of_initial_state(inputs, state, previous=runs.previous)
        return sequences.joined(self._with_skip(y, inputs.x, heads)).flatten(2)

    def costs(self, workload: Workload) -> Costs:
        """Keeps what the projection gives and what is computed from it; recomputed, only what the projection gives.

        The scan counts as its products of whole chunks. Gradients of what is computed need most memory at a time, or
        while there are fewer of them the scan does, when those behind it have freed what they kept.
        """
        config, item, tokens = self._config, workload.itemsize, workload.tokens
        channels, chunk = self._inner + 2 * self._states, self._chunk(workload)
        inner = self.out_proj.weight.shape[1] * self._context.mesh.size("tp")
        states = config.mamba_num_groups * config.mamba_state_dim
        per_token = 2 * config.mamba_conv_kernel_dim * (inner + 2 * states) + 2 * chunk * (states + inner)
        flops = float(workload.all_tokens * (per_token + 4 * inner * config.mamba_state_dim))
        projected = tokens * (self._inner + channels + self._heads) * item
        inside = self._kept_between_projections(workload)
        kept, again = (projected, inside) if self._recomputes else (projected + inside, 0)
        gradients = projected + tokens * (channels + 2 * self._inner) * item
        scanned = tokens * (channels + self._inner) * item + self._working_of_scan(workload)
        matmuls = total_of((self.in_proj, self.out_proj), workload)
        return dataclasses.replace(
            matmuls,
            flops=matmuls.flops + flops,
            kept=matmuls.kept + kept,
            working=matmuls.working + max(gradients, scanned) + again,
        )

    def _working_of_scan(self, workload: Workload) -> int:
        """Bytes of what the scan's backward pass computes at a time."""
        config, length = self._config, self._scanned_length(workload)
        parts = self._context.mesh.size("cp") if config.mamba_cp_comm_type == "a2a" else 1  # of the heads
        return working_bytes(
            self._context.device,
            (workload.tokens * parts // length, length, self._heads // parts, config.mamba_head_dim),
            groups=max(1, self._groups // parts),
            states=config.mamba_state_dim,
            chunk_size=self._chunk(workload),
            itemsize=workload.itemsize,
        )

    def _scanned_length(self, workload: Workload) -> int:
        """Tokens that are scanned at a time, which are a run of a rank's where states are passed on."""
        ranks = self._context.mesh.size("cp")
        return workload.length // (1 if ranks == 1 or self._config.mamba_cp_comm_type == "a2a" else 2 * ranks)

    def _chunk(self, workload: Workload) -> int:
        size = self._config.mamba_chunk_size or default_chunk_size(self._context.device)
        return min(size, self._scanned_length(workload))

    def _kept_between_projections(self, workload: Workload) -> int:
        """Bytes of rows of the convolution before and after SiLU, time steps, states between chunks, the norm's input
        and one number per group, and of what context-parallel ranks send.
        """
        config, ranks = self._config, self._context.mesh.size("cp")
        item, wide, tokens, batch = workload.itemsize, self._wide.itemsize, workload.tokens, workload.batch
        length, channels = self._scanned_length(workload), self._inner + 2 * self._states
        numbers = self._heads * config.mamba_head_dim * config.mamba_state_dim
        sent, scanned = 0, channels
        if ranks > 1 and config.mamba_cp_comm_type == "a2a":  # a group that several ranks need is copied
            scanned = self._inner + 2 * self._states * max(1, ranks // self._groups)
            sent = tokens * (scanned + self._heads) * item
        elif ranks > 1:
            # Runs of tokens, C by groups, what states add to y; decays; what all runs do to states, those before them.
            grouped = self._states * (self._groups > 1)
            sent = tokens * ((channels + self._inner + grouped) * item + 2 * self._heads * wide)
            sent += 2 * ranks * batch * (2 * numbers + self._heads) * wide
            sent += 2 * batch * (numbers + (config.mamba_conv_kernel_dim - 1) * channels) * item
        sums = 2 if config.mamba_time_step_limits is None else 3
        states = tokens // length * -(-length // self._chunk(workload)) * numbers
        if ranks > 1 and config.mamba_cp_comm_type == "a2a":
            states = batch * -(-length // self._chunk(workload)) * numbers // ranks
        rows = tokens * ((2 * scanned + self._inner) * item + (sums * self._heads + self._groups) * wide)
        return rows + states * wide + sent
