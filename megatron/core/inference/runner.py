"""The model runner of one rank: computes step plans with a trained model and a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.inference.cache import CachedStep, KeyValueCache
from megatron.core.inference.products import Form, GenerationProducts, StoredForm
from megatron.core.inference.recording import RecordedSteps
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, RunningStep, StepPlan
from megatron.core.moe.experts import StackedLinear
from megatron.core.ops.compiled import bodies_are_compiled
from megatron.core.ops.text_cache import LayerStates, TextCache
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.tensor_parallel.low_rank import AdaptersOfTokens
from megatron.core.transformer.output_layer import OutputLayer, VocabularyOutput
from megatron.errors import ConfigError


@runtime_checkable
class GenerativeModel(Protocol):
    """A model that goes on with texts, or a pipeline stage of it."""

    def layer_states(self) -> LayerStates:
        """What its layers need of a text so far."""
        ...

    def continue_texts(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        *,
        cache: TextCache,
        hidden: Tensor | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
    ) -> VocabularyOutput | Tensor:
        """Tokens of several texts side by side, ``[1, t]``, and their positions, to the vocabulary output, or before
        the last stage to hidden states. ``hidden``: what the stage before returned. ``replaced``: places ``[1, t]`` of
        images, and what stands there, ``[t, 1, h]``.
        """
        ...


@runtime_checkable
class ImageReader(Protocol):
    """A :class:`GenerativeModel` with images in its texts. ``joint_attention``: as the setting."""

    joint_attention: str

    def image_features(self, images: Tensor) -> Tensor:
        """Hidden states ``[f, t, h]`` of the language model for tiles ``[t, 3, H, W]``."""
        ...

    def with_row_end(self, features: Tensor) -> Tensor:
        """Features ``[n, h]`` and, behind them, what stands at ends of rows of patches, where the model has it."""
        ...


@runtime_checkable
class EncoderDecoder(Protocol):
    """A :class:`GenerativeModel` whose texts each depend on an encoder prompt."""

    def encode(self, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Token ids ``[1, T]`` through the stage's part of the encoder, to hidden states ``[T, 1, h]``: the encoder's
        output, once the encoder ends. ``hidden``: what the stage before returned.
        """
        ...


def costs_little(context: ParallelContext) -> bool:
    """Whether batch invariance costs so little that it is the default: in bf16 and fp16 on a CPU."""
    return context.device.type == "cpu" and context.dtype.itemsize < 4


class CachedRunner:
    """A :class:`ModelStage`, and for a model on one rank a :class:`ModelRunner`.

    With ``is_batch_invariant`` the logits of a text have the same bits in any batch, chunks and blocks. None: in bf16
    and fp16 on a CPU, where it costs little, unless layers have states of fixed size, which then must be computed token
    by token. Rotary positions that depend on the length of a text are those of the
    longest it can get, ``limits.max_length``, so that every text is computed by one function.
    """

    depth = 1
    failure = None

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig,
        context: ModelContext,
        limits: RunnerLimits,
        *,
        is_batch_invariant: bool | None = None,
        form: Form | None = None,
        stored: Mapping[int, StoredForm] | None = None,
        experts: Mapping[int, Sequence[StoredForm]] | None = None,
        adapters: AdaptersOfTokens | None = None,
    ) -> None:
        """Prepare a model for generation. ``model``: a :class:`GenerativeModel`, a stage of the pipeline or all of it.
        ``form``: of its weights. ``stored``: of those whose codes were chosen before, by id; ``experts``: of stacked
        ones.
        ``adapters``: which tokens have which adapter, where the model has several. Raises ConfigError for a
        model of which layers need whole texts.
        """
        assert isinstance(model, GenerativeModel), f"{type(model).__name__} doesn't generate text"
        states = model.layer_states()
        if states.unknown:
            raise ConfigError(
                f"layers with {', '.join(states.unknown)} don't say what they keep of a text (text_state), so this "
                "model can't generate with a cache; WholeTextRunner reads the whole text for each token"
            )
        attention = model.joint_attention if isinstance(model, ImageReader) else "causal"
        has_states = limits.has_states or bool(states.slotted)
        limits = replace(limits, has_states=has_states, joint_attention=attention)
        self.limits, self.device = limits, context.device
        self.logits_dtype = torch.promote_types(context.dtype, torch.float32)
        self._model, self._config, self._context = model, config, context
        self._adapters = adapters
        self._has_cache = len(states.paged) > 0
        self._cache = KeyValueCache(
            states.paged, limits, dtype=context.dtype, device=context.device, slotted=states.slotted
        )
        if is_batch_invariant is None:
            is_batch_invariant = costs_little(context) and not limits.has_states
        self._is_batch_invariant = is_batch_invariant
        self._multiply = GenerationProducts(
            is_batch_invariant=is_batch_invariant, form=form, stored=stored, experts=experts
        )
        # Recorders don't see what ranks exchange and compiled functions do. A GPU computes while Python runs ahead.
        is_alone = context.mesh.world_size == context.mesh.size("pp")
        self._records = context.device.type == "cpu" and is_alone and not bodies_are_compiled()
        self._recorded = RecordedSteps(self._of_single_tokens)

    def warm_up(self, *, releases: bool = False) -> None:
        """Copy weights for their kernels and measure what bits depend on, before the first request, by a step whose
        result is dropped. Collective on the ranks of a stage.

        ``releases``: nothing else uses the model, so weights of which copies are used give up their memory.
        """
        row = PlanRow(slot=0, start=0, tokens=(0,), blocks=(1,), logits_from=0)
        plans = (
            [StepPlan((replace(row, blocks=(), logits_from=1, encoder=True),))]
            if self.limits.max_encoder_length
            else []
        )
        for plan in (*plans, StepPlan((row,))):
            is_first = self._context.mesh.rank("pp") == 0
            self.run(plan, [] if is_first else [each.zero_() for each in self.buffers(plan)])
        size = self.limits.block_size
        self._cache.clear(torch.arange(size, 2 * size, device=self.device))
        self._cache.encoder_outputs.clear()
        if releases:
            kinds = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, OutputLayer, StackedLinear)
            layers = [module for module in self._model.modules() if isinstance(module, kinds)]
            self._multiply.release([layer.weight for layer in layers if layer.weight is not None])

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache of keys, values and states."""
        return self._cache.num_bytes

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> RunningStep:
        """Compute a step."""
        return RunningStep(Handle(self.run(plan, ())))

    def buffers(self, plan: StepPlan) -> list[Tensor]:
        """Empty hidden states ``[tokens, 1, h]`` for what the stage before hands on, in fp32 with an fp32 residual
        stream.
        """
        dtype = self._context.dtype
        if self._config.fp32_residual_connection:
            dtype = torch.promote_types(dtype, torch.float32)
        return [torch.empty(plan.num_tokens, 1, self._config.hidden_size, dtype=dtype, device=self.device)]

    @torch.inference_mode()
    def run(self, plan: StepPlan, received: Sequence[Tensor]) -> list[Tensor]:
        """Compute a plan: hidden states for the next stage, or on the last one the logits."""
        hidden = received[0] if received else None
        self._cache.states.copy(plan.state_copies)
        replaced = None if received else self._image_features(plan.rows)  # weights of the encoder have one form
        with self._context.products.by(self._multiply, self._multiply.experts):
            if any(row.encoder for row in plan.rows):
                return [self._with_encoder(plan, hidden)]
            return [self._run(plan.rows, hidden, replaced)]

    def _image_features(self, rows: Sequence[PlanRow]) -> tuple[Tensor, Tensor] | None:
        """Which places of the rows' tokens are those of images, and what stands there. A tile is encoded alone, so that
        no other text has a part in its bits.
        """
        if all(row.images is None for row in rows) or not isinstance(self._model, ImageReader):
            return None
        masks, vectors = list[Tensor](), list[Tensor]()
        for row in rows:
            empty = torch.zeros(len(row.tokens), self._config.hidden_size, dtype=self._context.dtype)
            masks.append(torch.zeros(len(row.tokens), dtype=torch.bool))
            vectors.append(empty.to(self.device))
            if row.images is None:
                continue
            tiles = torch.from_numpy(np.array(row.images.tiles)).to(self.device)
            features = [self._model.image_features(tile.unsqueeze(0))[:, 0] for tile in tiles]
            table = self._model.with_row_end(torch.cat([vectors[-1][:0], *features]))
            places = torch.from_numpy(np.array(row.images.places))
            masks[-1] = places != -1
            vectors[-1] = table[torch.where(places >= 0, places, len(table) - 1).to(self.device)]
        return torch.cat(masks).unsqueeze(0).to(self.device), torch.cat(vectors).unsqueeze(1)

    def _with_encoder(self, plan: StepPlan, hidden: Tensor | None) -> Tensor:
        """Compute a plan with encoder prompts; stages hand on the encoder's hidden states beside those of texts, in the
        order of rows.
        """
        parts: list[Tensor] | list[None] = [None] * len(plan.rows)
        if hidden is not None:
            parts = list(hidden.split_with_sizes([len(row.tokens) for row in plan.rows]))
        encoder_hidden_states = [self._encode(row, part) for row, part in zip(plan.rows, parts) if row.encoder]
        rows = [row for row in plan.rows if not row.encoder]
        going_on = [part for row, part in zip(plan.rows, parts) if part is not None and not row.encoder]
        output = self._run(rows, torch.cat(going_on) if going_on else None) if rows else self._nothing()
        if self._context.mesh.rank("pp") == self._context.mesh.size("pp") - 1:
            return output
        texts = iter(output.split_with_sizes([len(row.tokens) for row in rows]) if rows else ())
        reads = iter(encoder_hidden_states)
        (buffer,) = self.buffers(plan)
        return torch.cat([next(reads if row.encoder else texts).to(buffer.dtype) for row in plan.rows], out=buffer)

    def _encode(self, row: PlanRow, hidden: Tensor | None) -> Tensor:
        """An encoder prompt through the stage; stages of the decoder keep the encoder's output."""
        assert isinstance(self._model, EncoderDecoder), "only models with an encoder get encoder prompts"
        encoder_hidden_states = self._model.encode(torch.tensor([row.tokens], device=self.device), hidden)
        if self._has_cache:
            self._cache.encoder_outputs[row.slot] = (encoder_hidden_states.to(self._context.dtype), {})
        return encoder_hidden_states

    def _run(
        self, rows: Sequence[PlanRow], hidden: Tensor | None, replaced: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """One pass through the model: logits ``[wanted, vocabulary]``, or hidden states for the next stage."""
        ids = [token for row in rows for token in row.tokens]
        places = [place for row in rows for place in range(row.start, row.start + len(row.tokens))]
        both = torch.tensor([ids, places], device=self.device)
        backend = self._config.attention_backend
        cache = CachedStep(self._cache, StepPlan(tuple(rows)), backend, in_tiles=self._is_batch_invariant)
        tensors = [both] if hidden is None else [both, hidden]
        adapted = self._choose_adapters(rows)
        if (
            self._records
            and not adapted
            and replaced is None
            and all(len(row.tokens) == 1 and row.num_logits == 1 for row in rows)
        ):
            return self._recorded(cache, tensors)
        output = self._continued(cache, tensors, replaced)
        return self._logits(output, rows) if isinstance(output, VocabularyOutput) else output

    def _choose_adapters(self, rows: Sequence[PlanRow]) -> bool:
        """Tell the layers which tokens have which adapter. Whether any has one."""
        if self._adapters is None:
            return False
        places, first = dict[int, list[int]](), 0
        for row in rows:
            if row.adapter:
                places.setdefault(row.adapter, []).extend(range(first, first + len(row.tokens)))
            first += len(row.tokens)
        self._adapters.tokens = {
            number: torch.tensor(tokens, device=self.device) for number, tokens in sorted(places.items())
        }
        return bool(places)

    def _continued(
        self, cache: TextCache, tensors: Sequence[Tensor], replaced: tuple[Tensor, Tensor] | None = None
    ) -> VocabularyOutput | Tensor:
        """What the model makes of tokens and positions ``[2, t]``, and after the first stage of hidden states."""
        both, *hidden = tensors
        more = {} if replaced is None else {"replaced": replaced}
        return self._model.continue_texts(both[:1], both[1:], cache=cache, hidden=hidden[0] if hidden else None, **more)

    def _of_single_tokens(self, cache: TextCache, tensors: Sequence[Tensor]) -> Tensor:
        output = self._continued(cache, tensors)
        return self._all_logits(output) if isinstance(output, VocabularyOutput) else output

    def _logits(self, output: VocabularyOutput, rows: Sequence[PlanRow]) -> Tensor:
        wanted, first = list[int](), 0
        for row in rows:
            wanted += range(first + row.logits_from, first + len(row.tokens))
            first += len(row.tokens)
        if not wanted:
            return self._nothing()
        hidden = output.hidden.index_select(0, torch.tensor(wanted, device=self.device))
        return self._all_logits(replace(output, hidden=hidden))

    def _all_logits(self, output: VocabularyOutput) -> Tensor:
        return output.logits()[0].to(self.logits_dtype)

    def _nothing(self) -> Tensor:
        return torch.empty(0, self.limits.vocabulary, dtype=self.logits_dtype, device=self.device)

    def close(self) -> None:
        """Does nothing: no rank waits for plans."""
