"""What is built: the transformer's sizes and choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from typing_extensions import override

from megatron.config.activation import ActivationConfig
from megatron.config.attention import AttentionConfig
from megatron.config.attention_backends import OTHER_NAMES, AttentionBackend
from megatron.config.flags import architecture_flag, architecture_switch, derive, flag, switch
from megatron.config.latent_attention import LatentAttentionConfig
from megatron.config.layer_patterns import canonical, marked_layers, shortened, window_layers
from megatron.config.multi_token import MultiTokenConfig
from megatron.config.mup import MupConfig
from megatron.config.positions import ROTARY_TYPES, PositionConfig

NormPlacement = Literal["before", "after", "both"]

LAYER_BIASES = ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")
"""Biases that ``add_bias_linear`` adds together."""

PATTERNS = ("window_attn_skip_freq", "no_rope_freq")
"""Fields that say which layers have something."""


class ModelConfig(
    ActivationConfig, PositionConfig, AttentionConfig, LatentAttentionConfig, MultiTokenConfig, MupConfig
):
    """The transformer. Sizes that are not given follow from the others."""

    num_layers: int = architecture_flag("Transformer layers.", at_least=1, at_most=10_000)
    hidden_size: int = architecture_flag("Width of the hidden states.", at_least=1)
    ffn_hidden_size: int = architecture_flag(
        "Inner width of the MLP.",
        derived="4 x hidden size; gated: 8/3 x hidden size, rounded down to a multiple of 64",
        follows=("hidden_size", "activation"),
        at_least=1,
    )
    num_attention_heads: int = architecture_flag("Query heads of each attention layer.", at_least=1)
    kv_channels: int = architecture_flag(
        "Width of one attention head.",
        derived="hidden size / heads; with --multi-latent-attention --qk-head-dim + --qk-pos-emb-head-dim",
        follows=(
            *("hidden_size", "num_attention_heads"),
            *("multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim"),
        ),
        at_least=1,
    )
    group_query_attention: bool = architecture_switch("Let several query heads share one key/value head.")
    num_query_groups: int = architecture_flag(
        "Key/value heads with --group-query-attention.",
        derived="1 with --group-query-attention, else one per query head",
        follows=("group_query_attention", "num_attention_heads"),
        at_least=1,
    )
    max_position_embeddings: int = flag(
        "Longest sequence the model may see; positions of the learned table.",
        derived="--seq-length",
        follows=("seq_length", "decoder_seq_length"),
        at_least=1,
        from_checkpoint=True,
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = architecture_flag(
        "Kind of norm.",
        default="LayerNorm",
        renamed_values={"layernorm": ("LayerNorm", ""), "rmsnorm": ("RMSNorm", "")},
    )
    norm_epsilon: float = architecture_flag("Epsilon of the norms.", default=1e-5, above=0)
    apply_layernorm_1p: bool = architecture_switch(
        "Store norm weights minus one, so that a weight of zero scales by one."
    )
    norm_parameters: Literal["weight_and_bias", "weight", "none"] = architecture_flag(
        "Learned parameters of the norms. RMSNorm has no bias.", default="weight_and_bias"
    )
    norm_placement: NormPlacement = architecture_flag(
        "Where a layer has its norms: before each sublayer; after it, on what is added to the residual (OLMo 2); or "
        "both (Gemma 2).",
        default="before",
    )
    apply_residual_connection_post_layernorm: bool = architecture_switch(
        "Post-LN: the residual branches off after the norm."
    )
    embedding_norm: bool = architecture_switch(
        "Apply a norm to the embedding, before its dropout (BLOOM).", aliases=("--embed-layernorm",)
    )
    first_attention_norm: bool = architecture_switch(
        "No norm before the attention of the first layer, for models whose embedding has one.",
        off="--no-first-attention-norm",
    )
    parallel_attention: bool = architecture_switch(
        "Compute attention and MLP from the same hidden states and add both: x + attention(norm(x)) + mlp(norm(x)).",
        aliases=("--parallel-attn",),
    )
    parallel_layernorm: bool = architecture_switch(
        "Give the MLP a norm of its own with --parallel-attention (Pythia); else both read one norm (Falcon 7B)."
    )
    add_bias_linear: bool = architecture_switch("No biases in linear layers.", off="--disable-bias-linear")
    add_qkv_bias: bool = architecture_switch(
        "Add biases to the query/key/value layer; always on without --disable-bias-linear."
    )
    add_attention_output_bias: bool = architecture_switch(
        "Add biases to the output layer of attention; always on without --disable-bias-linear.",
        aliases=("--add-dense-bias",),
    )
    add_mlp_bias: bool = architecture_switch(
        "Add biases to both layers of the MLP; always on without --disable-bias-linear."
    )
    add_output_layer_bias: bool = architecture_switch("Add a bias to the logits.")
    untie_embeddings_and_output_weights: bool = architecture_switch(
        "Use separate weights for the output layer, not those of the word embeddings."
    )
    word_embedding_size: int | None = architecture_flag(
        "Width of the word embeddings, if not --hidden-size: one matrix projects them to the hidden size, another "
        "projects hidden states back before the output layer (OPT 350M).",
        default=None,
        at_least=1,
    )
    embedding_multiplier: float = architecture_flag(
        "Multiply word embeddings by this. The factor is rounded to the type of the weights, as in Gemma.",
        default=1.0,
        above=0,
    )
    position_embedding_multiplier: float = architecture_flag(
        "Multiply learned vectors of positions and of token types by this.", default=1.0, above=0
    )
    residual_multiplier: float = architecture_flag(
        "Multiply what each sublayer adds to the residual by this (Granite).", default=1.0, above=0
    )
    logits_multiplier: float = architecture_flag(
        "Multiply logits by this (Cohere; 1 / Granite's logits_scaling).", default=1.0, above=0
    )
    final_logit_softcapping: float | None = architecture_flag(
        "Cap logits softly: cap x tanh(logits / cap) (Gemma 2).", default=None, above=0
    )
    z_loss_coeff: float = flag(
        "Add this times the square of log Z, the logarithm of what the softmax over the vocabulary divides by, to the "
        "loss of each token in training (PaLM: 1e-4). The losses in the log are without it.",
        default=0.0,
        at_least=0,
        from_checkpoint=True,
    )
    attention_dropout: float = flag(
        "Dropout on attention probabilities.", default=0.1, at_least=0, below=1, from_checkpoint=True
    )
    hidden_dropout: float = flag(
        "Dropout on embeddings and on the output of each sublayer.",
        default=0.1,
        at_least=0,
        below=1,
        from_checkpoint=True,
    )
    init_method_std: float = flag(
        "Standard deviation of the initial weights.", default=0.02, above=0, from_checkpoint=True
    )
    vocab_size: int | None = architecture_flag(
        "Words of the vocabulary, before padding: --vocab-size or the tokenizer's.", default=None, internal=True
    )
    make_vocab_size_divisible_by: int = flag(
        "Pad the vocabulary to a multiple of this times the tensor-parallel size. Padding gets no probability; "
        "Megatron-LM's softmax includes it.",
        default=128,
        at_least=1,
    )
    attention_backend: AttentionBackend = flag(
        "Attention kernel; auto takes the fastest that supports the call (see docs/attention.md).",
        default="auto",
        renamed_values=OTHER_NAMES,
    )
    attention_softmax_in_fp32: bool = switch("Compute the attention softmax in fp32, whatever the model's precision.")
    fp32_residual_connection: bool = switch("Keep the residual stream in fp32.")

    @override
    def __post_init__(self) -> None:
        heads = max(self.num_attention_heads, 1)
        if self.multi_latent_attention:
            object.__setattr__(self, "kv_channels", self.qk_head_dim + self.qk_pos_emb_head_dim)
        derive(self, "kv_channels", self.hidden_size // heads)
        derive(self, "num_query_groups", 1 if self.group_query_attention else self.num_attention_heads)
        gated_width = self.hidden_size * 8 // 3 // 64 * 64
        derive(self, "ffn_hidden_size", (gated_width or 64) if self.gated else 4 * self.hidden_size)
        for pattern in PATTERNS:  # two spellings become equal; a rule says what is wrong with one
            if getattr(self, pattern) is not None:
                object.__setattr__(self, pattern, canonical(pattern, getattr(self, pattern), self.num_layers))
        if self.use_rope_scaling:
            derive(self, "original_max_position_embeddings", 8192)
        if self.add_bias_linear:
            for each in LAYER_BIASES:
                object.__setattr__(self, each, True)
        if self.use_mup:
            for name, value in self.scale_by_width(self.hidden_size, self.kv_channels).items():
                if getattr(self, name) == (None if name == "softmax_scale" else 1.0):
                    object.__setattr__(self, name, value)

    @property
    def width_multiplier(self) -> float:
        """How many times wider the model is than the one whose learning rate it is given; 1 without muP."""
        return self.hidden_size / self.mup_base_hidden_size if self.use_mup and self.mup_base_hidden_size else 1.0

    def window_of(self, layer: int) -> tuple[int, int] | None:
        """Keys before and after its own that a query sees in ``layer``, counted from 0; None for all. Layers of
        multi-token prediction come after the last, and are like it.

        Raises ConfigError for a pattern of layers that isn't one.
        """
        if self.window_size is None:
            return None
        layers = window_layers(self.window_attn_skip_freq, self.num_layers)
        return self.window_size if layers[min(layer, self.num_layers - 1)] else None

    def of_depth(self, num_layers: int) -> ModelConfig:
        """The first ``num_layers`` layers of this model."""
        patterns: Any = {each: shortened(getattr(self, each), self.num_layers, num_layers) for each in PATTERNS}
        return replace(self, num_layers=num_layers, **patterns)

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are turned by their positions."""
        return self.position_embedding_type in ROTARY_TYPES

    def has_rotary(self, layer: int) -> bool:
        """Whether queries and keys are turned in ``layer``, counted from 0; see ``window_of``.

        Raises ConfigError for a pattern of layers that isn't one.
        """
        if self.no_rope_freq is None:
            return self.is_rotary
        marked = marked_layers(self.no_rope_freq, self.num_layers, flag="--no-rope-freq")
        return self.is_rotary and not marked[min(layer, self.num_layers - 1)]

    @property
    def rotary_width(self) -> int:
        """Channels of each head that are turned."""
        return int(self.positional_width * self.rotary_percent)

    @property
    def positional_width(self) -> int:
        """Channels of each head, of which ``rotary_percent`` are turned."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def word_width(self) -> int:
        """Columns of the word embeddings, and of the output layer."""
        return self.word_embedding_size or self.hidden_size

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the word embeddings over all ranks; ``vocab_size`` must be known."""
        assert self.vocab_size is not None, "the vocabulary size comes from the tokenizer: RunConfig.with_vocab_size"
        unit = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // unit) * unit
