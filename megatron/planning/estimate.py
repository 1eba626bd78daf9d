"""Parameters and memory of one rank, by arithmetic alone.

Weights, gradients and optimizer state are exact up to the padding of buckets. Activations are what each operation keeps
for its backward pass: ``[tokens, width]`` tensors, counted one by one and checked against what torch saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.pipeline import EncoderDecoderLayers, StageShape, stage_shapes
from megatron.config.run import RunConfig
from megatron.config.train_spec import Outline
from megatron.planning.schedule import schedule_facts

_LOSS_CHUNK = 1 << 24  # logits of the vocabulary loss that exist at a time
_STATES = {"adam": 2, "sgd": 1}  # fp32 numbers per weight


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part; ``output_layer`` is 0 when it shares the word embeddings. ``heads``: parameters of
    the output heads, the output's bias included. ``position_embeddings``: also token types and relative positions.
    """

    word_embeddings: int
    position_embeddings: int
    layers: int
    final_norm: int
    output_layer: int
    heads: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        ends = self.word_embeddings + self.position_embeddings + self.final_norm + self.output_layer + self.heads
        return ends + self.layers


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step.

    ``kept``: activations from the end of the forward pass. ``working``: the larger of what the loss and what the
    backward pass of one layer (or one recomputed run of layers) needs besides.
    """

    weights: int
    gradients: int
    main_params: int
    moments: int
    kept: int
    working: int

    @property
    def states(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.main_params + self.moments

    @property
    def total(self) -> int:
        """The peak."""
        return self.states + self.kept + self.working


def model_parameters(run: RunConfig) -> ParameterCounts:
    """Of the whole model, without vocabulary padding."""
    assert run.model.vocab_size is not None, "the vocabulary size must be known"
    whole = [StageShape(0, range(run.num_layers), is_first=True, is_last=True)]
    return _parameters(run, whole, ranks=1, vocabulary=run.model.vocab_size)


def rank_parameters(run: RunConfig, *, pipeline_rank: int = 0) -> ParameterCounts:
    """Of a rank of this place in the pipeline, with vocabulary padding."""
    ranks = run.parallel.tensor_model_parallel_size
    return _parameters(run, stages_of(run, pipeline_rank), ranks=ranks, vocabulary=run.padded_vocab_size // ranks)


def stages_of(run: RunConfig, pipeline_rank: int) -> list[StageShape]:
    """The stages that a pipeline rank holds."""
    return [stage for stage in stage_shapes(run) if stage.rank == pipeline_rank]


def _parameters(run: RunConfig, stages: Sequence[StageShape], *, ranks: int, vocabulary: int) -> ParameterCounts:
    model, outline = run.model, run.outline
    hidden, tied = model.hidden_size, not model.untie_embeddings_and_output_weights
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    learned = model.position_embedding_type == "learned_absolute"
    # Without a decoder all layers are the encoder's.
    held = [EncoderDecoderLayers.of(stage.layers, model.num_layers) for stage in stages]
    last = any(stage.is_last for stage in stages)
    embeds = any(stage.is_first for stage in stages) or any(each.opens_decoder for each in held)
    attention = _attention_parameters(model, ranks)
    layer, cross = attention + _mlp_parameters(model, ranks) + 2 * norm, attention + norm
    positions = (model.max_position_embeddings if learned else 0) + outline.token_types
    return ParameterCounts(
        word_embeddings=vocabulary * hidden * embeds,
        position_embeddings=positions * hidden * embeds + _position_tables(run, held, ranks),
        layers=sum(len(stage.layers) * layer for stage in stages) + sum(len(each.decoder) * cross for each in held),
        final_norm=norm * (last + (outline.decoder_layers > 0 and any(each.closes_encoder for each in held))),
        output_layer=vocabulary * hidden * (last and outline.predicts_words and not (tied and embeds)),
        heads=_head_parameters(outline, hidden=hidden, norm=norm, vocabulary=vocabulary) if last else 0,
    )


def _head_parameters(outline: Outline, *, hidden: int, norm: int, vocabulary: int) -> int:
    """Parameters of the output heads."""
    dense = hidden * hidden + hidden
    words = dense + norm if outline.has_word_head else 0
    biases = vocabulary if outline.has_word_head or outline.has_output_bias else 0
    pooled = dense + outline.pooled_outputs * (hidden + 1) if outline.pooled_outputs else 0
    return words + biases + pooled


def _position_tables(run: RunConfig, held: Sequence[EncoderDecoderLayers], ranks: int) -> int:
    """Of relative positions: one for each stack that has layers here."""
    stacks = any(each.encoder for each in held) + any(each.decoder for each in held)
    return stacks * run.outline.position_buckets * run.model.num_attention_heads // ranks


def _attention_parameters(model: ModelConfig, ranks: int) -> int:
    hidden, width = model.hidden_size, model.num_attention_heads * model.kv_channels
    fused = width + 2 * max(model.num_query_groups, ranks) * model.kv_channels  # ranks may have to share heads
    split = fused * hidden + width * hidden + (fused if model.add_bias_linear or model.add_qkv_bias else 0)
    head_norms = 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
    return split // ranks + (hidden if model.add_bias_linear else 0) + head_norms


def _mlp_parameters(model: ModelConfig, ranks: int) -> int:
    hidden, inner = model.hidden_size, model.ffn_hidden_size * (2 if model.gated else 1)
    split = inner * hidden + model.ffn_hidden_size * hidden + (inner if model.add_bias_linear else 0)
    return split // ranks + (hidden if model.add_bias_linear else 0)


def memory_estimate(run: RunConfig) -> MemoryEstimate:
    """Of the rank that needs most; the vocabulary size must be known."""
    peaks = schedule_facts(run, kept_activations(run)).peaks
    return max((rank_memory(run, rank, kept=int(peak)) for rank, peak in enumerate(peaks)), key=lambda each: each.total)


def rank_memory(run: RunConfig, pipeline_rank: int, *, kept: int = 0) -> MemoryEstimate:
    """Of one rank, which keeps ``kept`` bytes of activations; the vocabulary size must be known."""
    parameters, width = rank_parameters(run, pipeline_rank=pipeline_rank).total, _width(run)
    shards = run.data_parallel_size * run.parallel.context_parallel_size
    owned = -(-parameters // shards) if run.parallel.use_distributed_optimizer else parameters
    trained = 0 if run.train_spec.only_reads else 1
    stacks, has_loss = _stacks(run), any(stage.is_last for stage in stages_of(run, pipeline_rank))
    return MemoryEstimate(
        weights=parameters * width,
        gradients=trained * parameters * (2 if run.precision.grad_reduce_in_bf16 else 4),
        main_params=trained * (owned * 4 if width < 4 else 0),
        moments=trained * owned * 4 * _states(run),
        kept=trained * kept,
        working=max(stacks[-1].of_loss() if has_loss else 0, *(stack.of_backward() for stack in stacks)),
    )


def kept_activations(run: RunConfig) -> list[int]:
    """Bytes that a rank keeps of each stage from the forward pass of a micro batch to its backward pass."""
    stacks, found = _stacks(run), list[int]()
    for stage in stage_shapes(run):
        if len(stacks) == 1:
            found.append(stacks[0].kept(len(stage.layers), opens=stage.is_first, closes=stage.is_last))
            continue
        held = EncoderDecoderLayers.of(stage.layers, run.model.num_layers)
        kept = stacks[0].kept(len(held.encoder), opens=stage.is_first, closes=held.closes_encoder)
        kept += stacks[1].kept(len(held.decoder), opens=held.opens_decoder, closes=stage.is_last)
        found.append(kept + (stacks[0].encoder_output() if held.decoder else 0))
    return found


def _stacks(run: RunConfig) -> list[_Activations]:
    """The encoder, and the decoder where there is one; a stack by itself is as an encoder here."""
    length, outline = run.data.seq_length, run.outline
    encoder = _Activations(run, length)
    if not outline.decoder_layers:
        return [encoder]
    return [encoder, _Activations(run, outline.decoder_length, attends_to=length)]


def _states(run: RunConfig) -> int:
    plain_descent = run.optimizer.optimizer == "sgd" and run.optimizer.sgd_momentum == 0
    return 0 if plain_descent else _STATES[run.optimizer.optimizer]


def _width(run: RunConfig) -> int:
    """Bytes of a weight."""
    return 4 if run.precision.params_dtype == "fp32" else 2


class _Activations:
    """Bytes of activations of a stack of layers on one rank, for one micro batch of ``length`` tokens.

    ``attends_to``: length of the encoder that its layers attend to as well.

    ``_tokens`` pass through the tensor-parallel regions; of them ``_rows`` are held outside, fewer with sequence
    parallelism. ``_queries``, ``_keys`` and ``_inner`` are widths on this rank. With context parallelism, attention has
    ``_exchanged_keys`` of them besides those of its tokens while ranks exchange theirs.
    """

    def __init__(self, run: RunConfig, length: int, *, attends_to: int = 0) -> None:
        model, training, ranks = run.model, run.training, run.parallel.tensor_model_parallel_size
        self._run, self._model, self._training = run, model, training
        self._length, self._attends_to = length, attends_to
        share = training.micro_batch_size * run.outline.sequences_per_sample / run.parallel.context_parallel_size
        self._tokens, self._encoded_tokens = int(length * share), int(attends_to * share)
        self._rows = self._tokens // (ranks if run.parallel.sequence_parallel else 1)
        self._hidden = model.hidden_size
        self._relative = model.position_embedding_type == "relative"
        self._is_padded = run.outline.has_padding and not attends_to
        self._queries = model.num_attention_heads * model.kv_channels // ranks
        self._keys = max(model.num_query_groups // ranks, 1) * model.kv_channels
        self._heads = model.num_attention_heads // ranks
        self._inner = model.ffn_hidden_size // ranks
        self._width = _width(run)
        self._stream = self._rows * self._hidden * (4 if model.fp32_residual_connection else self._width)
        self._dropped = self._rows * self._hidden if model.hidden_dropout > 0 else 0  # one byte each
        self._score_width = 4 if model.attention_softmax_in_fp32 else self._width
        # With dropout only blocks of scores are replayed, and those are not widened.
        widened_and_drawn = self._score_width != self._width and model.attention_dropout > 0
        self._keeps_scores = model.attention_backend == "eager" or widened_and_drawn
        kinds, parallel = run.parallel.cp_comm_types, run.parallel
        self._heads_exchanged = any(parallel.head_exchange_size(kind) > 1 for kind in kinds)
        self._whole_sequences = not kinds or "a2a" in kinds
        if not self._whole_sequences:
            self._keeps_scores = False  # attention to one rank's keys after the other computes them again
        cp = parallel.context_parallel_size
        self._exchanged_keys = 2 * cp * ("all_gather" in kinds) or 4 * (not self._whole_sequences)

    def kept(self, layers: int, *, opens: bool, closes: bool) -> int:
        """From the end of the forward pass on: embedding, layers, relative positions, last norm, first head."""
        embedding = (self._dropped + self._tokens * 9) * opens  # with ids and where they are looked up
        pairs = self._length**2 // self._run.parallel.context_parallel_size
        positions = pairs * (8 + self._heads * self._width) * (layers > 0 and self._relative)  # with the buckets
        return embedding + positions + sum(self._layers_kept(layers)) + (self._stream + self._head()) * closes

    def encoder_output(self) -> int:
        """Bytes of the encoder's output, which every stage of the decoder keeps."""
        return self._rows * self._hidden * self._width

    def of_loss(self) -> int:
        """Hidden states and their gradient, the output weight's gradient, one chunk of logits."""
        if not self._run.outline.predicts_words:  # of the first token alone
            return 2 * self._rows * self._hidden * self._width
        ranks = self._run.parallel.tensor_model_parallel_size
        vocabulary = self._run.padded_vocab_size // ranks
        chunk = min(_LOSS_CHUNK, vocabulary * self._tokens) * (4 if self._width == 4 else 6)
        return 2 * self._tokens * self._hidden * self._width + vocabulary * self._hidden * self._width + chunk

    def _head(self) -> int:
        """A head for masked words: inputs of dense layer, GELU and norm; the loss has what the output keeps."""
        return 3 * self._rows * self._hidden * self._width * self._run.outline.has_word_head

    def of_backward(self) -> int:
        """Gradients inside one layer, and what is recomputed for it."""
        gated = 2 if self._model.gated else 1
        attention = 2 * (self._queries + 2 * self._keys) + 2 * self._exchanged_keys * self._keys
        inside = self._tokens * max((1 + gated) * self._inner, attention) * self._width
        weight = self._hidden * max(gated * self._inner, self._queries + 2 * self._keys) * self._width
        return 2 * self._stream + inside + weight + self._recomputed_at_once()

    def _layers_kept(self, layers: int) -> Iterator[int]:
        """Bytes per run of layers: all that they compute, or only their input where they are recomputed."""
        training = self._training
        if training.recompute_granularity != "full":
            yield layers * self._layer(selective=training.recompute_granularity == "selective")
            return
        chosen = training.recompute_num_layers or 1
        if training.recompute_method == "block":
            yield min(chosen, layers) * self._stream + max(layers - chosen, 0) * self._layer()
        else:
            yield -(-layers // chosen) * self._stream

    def _recomputed_at_once(self) -> int:
        if self._training.recompute_granularity == "full":
            run = self._training.recompute_num_layers or 1
            return self._layer() * (run if self._training.recompute_method == "uniform" else 1)
        if self._training.recompute_granularity == "selective" and self._whole_sequences:
            return self._scores() + self._score_inputs()
        return 0

    def _layer(self, *, selective: bool = False) -> int:
        """Both residual streams, the inputs of four matmuls and of the activation, attention, dropout masks."""
        gated = 2 if self._model.gated else 1
        matmul_inputs = self._tokens * (2 * self._hidden + self._queries + self._inner) * self._width
        plain_relu = self._model.activation == "relu" and not self._model.gated  # which keeps what it makes
        activation_input = self._tokens * gated * self._inner * self._width * (not plain_relu)
        cross = self._cross(selective) if self._attends_to else 0
        return (
            2 * self._stream + matmul_inputs + activation_input + self._attention(selective) + 2 * self._dropped + cross
        )

    def _cross(self, selective: bool) -> int:
        """The third residual stream, the inputs of the matmuls around cross-attention, queries, keys and values."""
        inputs = self._tokens * (self._hidden + self._queries) * self._width
        projected = (self._tokens * self._queries + self._encoded_tokens * 2 * self._keys) * self._width
        found = self._stream + inputs + projected + self._dropped
        if self._model.qk_layernorm:
            found += (self._tokens * self._queries + self._encoded_tokens * self._keys) * self._width
        if selective:
            return found
        return found + (self._pairs(self._attends_to) if self._keeps_scores else self._fused(is_padded=True))

    def _attention(self, selective: bool) -> int:
        """What lies between the two matmuls of attention."""
        if not self._keeps_scores and not selective:
            return self._projected() + self._fused(is_padded=self._is_padded and not self._relative)
        return self._projected() if selective else self._score_inputs() + self._scores() + self._normed()

    def _fused(self, *, is_padded: bool) -> int:
        """What fused attention keeps beside its inputs: one fp32 number per query; with padding its result, too."""
        keeps_result = is_padded and self._model.attention_dropout == 0 and self._whole_sequences
        return self._tokens * (self._heads * 4 + self._queries * self._width * keeps_result)

    def _projected(self) -> int:
        """Query, key and value: the fused projection, and those that rotation, norm or grouping make anew."""
        model = self._model
        moved = model.position_embedding_type == "rope" or model.qk_layernorm
        grouped = model.num_query_groups != model.num_attention_heads
        one_group = self._keys == model.kv_channels  # its queries lie side by side
        anew = (self._queries if moved or grouped else 0) + (self._keys if moved else 0)
        again = self._queries if grouped and not one_group and model.qk_layernorm else 0
        if self._heads_exchanged:  # what arrives, and the result that is sent back; norms keep what they were given
            given = self._queries + 2 * self._keys + again if model.qk_layernorm else 0
            return self._tokens * (2 * self._queries + 2 * self._keys + given) * self._width
        return self._tokens * (self._queries + 2 * self._keys + anew + again) * self._width

    def _normed(self) -> int:
        """What the norms of query and key keep."""
        if not self._model.qk_layernorm:
            return 0
        return self._tokens * (self._queries + 2 * self._keys) * self._width

    def _score_inputs(self) -> int:
        """Query, key and value as the products with explicit scores take them, keys repeated for each query head."""
        return self._tokens * self._queries * (2 * self._score_width + self._width)

    def _scores(self) -> int:
        """Those of self-attention, and which pairs are causal."""
        return self._pairs(self._length) + self._length**2

    def _pairs(self, keys: int) -> int:
        """Probabilities of every pair with one of ``keys``; with dropout also the mask and what it leaves.

        Of all keys: slices for heads makes as many pairs as slices for keys.
        """
        pairs = self._tokens * keys * self._heads
        wide = self._score_width
        rounded = self._width if wide != self._width else 0
        after_softmax = 1 + self._width if self._model.attention_dropout > 0 else rounded
        return pairs * (wide + after_softmax)
