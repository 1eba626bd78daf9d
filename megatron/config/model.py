"""What is built: the transformer's sizes and choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from megatron.config.flags import check_flags, derive, flag, switch

Activation = Literal["gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu_tanh", "geglu"]
Nonlinearity = Literal["gelu_tanh", "gelu", "silu", "relu", "squared_relu"]

_GATES: dict[str, Nonlinearity] = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "geglu": "gelu"}

_FLASH = "auto takes sdpa, PyTorch's fused and flash kernels, wherever they support the request"


@check_flags
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. Sizes that are not given follow from the others."""

    num_layers: int = flag("Transformer layers.", at_least=1, at_most=10_000, architecture=True)
    hidden_size: int = flag("Width of the hidden states.", at_least=1, architecture=True)
    ffn_hidden_size: int = flag(
        "Inner width of the MLP.",
        derived="4 x hidden size; gated: 8/3 x hidden size, rounded down to a multiple of 64",
        follows=("hidden_size", "activation"),
        at_least=1,
        architecture=True,
    )
    num_attention_heads: int = flag("Query heads of each attention layer.", at_least=1, architecture=True)
    kv_channels: int = flag(
        "Width of one attention head.",
        derived="hidden size / heads",
        follows=("hidden_size", "num_attention_heads"),
        at_least=1,
        architecture=True,
    )
    group_query_attention: bool = switch("Let several query heads share one key/value head.", architecture=True)
    num_query_groups: int = flag(
        "Key/value heads with --group-query-attention.",
        derived="1 with --group-query-attention, else one per query head",
        follows=("group_query_attention", "num_attention_heads"),
        at_least=1,
        architecture=True,
    )
    max_position_embeddings: int = flag(
        "Longest sequence the model may see; rows of the learned position table.",
        derived="--seq-length",
        follows=("seq_length", "decoder_seq_length"),
        at_least=1,
        from_checkpoint=True,
    )
    position_embedding_type: Literal["learned_absolute", "rope", "relative", "none"] = flag(
        "Position embedding type; relative: a learned bias on attention scores, for encoder-decoder models.",
        default="learned_absolute",
        renamed_values={"rotary": ("rope", ""), "absolute": ("learned_absolute", "")},
        refused_values={
            "mrope": "positions of images are outside this project; use rope",
            "alibi": "ALiBi is not available yet; use rope",
            "yarn": "YaRN is not available yet; use rope, with --use-rope-scaling as Llama 3 does",
        },
        architecture=True,
    )
    rotary_percent: float = flag(
        "Fraction of each head's width that is rotated.", default=1.0, above=0, at_most=1, architecture=True
    )
    rotary_base: float = flag("Base of the rotary frequencies (theta).", default=10000.0, above=1, architecture=True)
    rotary_interleaved: bool = switch(
        "Rotate neighbouring pairs instead of the two halves of a head.", architecture=True
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        "Divide rotary positions by this factor (linear interpolation).", default=None, above=0, architecture=True
    )
    use_rope_scaling: bool = switch("Scale rotary frequencies as Llama 3 does.", architecture=True)
    rope_scaling_factor: float = flag("Factor of --use-rope-scaling.", default=8.0, at_least=1, architecture=True)
    normalization: Literal["LayerNorm", "RMSNorm"] = flag(
        "Kind of norm.",
        default="LayerNorm",
        renamed_values={"layernorm": ("LayerNorm", ""), "rmsnorm": ("RMSNorm", "")},
        architecture=True,
    )
    norm_epsilon: float = flag("Epsilon of the norms.", default=1e-5, above=0, architecture=True)
    apply_layernorm_1p: bool = switch(
        "Store norm weights minus one, so that a weight of zero scales by one.", architecture=True
    )
    apply_residual_connection_post_layernorm: bool = switch(
        "Post-LN: the residual branches off after the norm.", architecture=True
    )
    add_bias_linear: bool = switch("No biases in linear layers.", off="--disable-bias-linear", architecture=True)
    add_qkv_bias: bool = switch(
        "Add biases to the query/key/value layer; always on without --disable-bias-linear.", architecture=True
    )
    activation: Activation = flag(  # noqa: RUF009
        "Activation of the MLP. gelu uses the error function, gelu_tanh its tanh approximation; swiglu, geglu and "
        "geglu_tanh have a gate.",
        default="gelu_tanh",
        short_forms={
            "--swiglu": "swiglu",
            "--geglu": "geglu_tanh",
            "--relu": "relu",
            "--squared-relu": "squared_relu",
            "--exact-gelu": "gelu",
        },
        combined={frozenset({"geglu_tanh", "gelu"}): "geglu"},
        architecture=True,
    )
    softmax_scale: float | None = flag(
        "Scale of attention scores; 1 / sqrt(width of a head) unless given.",
        default=None,
        above=0,
        architecture=True,
    )
    qk_layernorm: bool = switch("Apply the norm to the queries and keys of each head.", architecture=True)
    untie_embeddings_and_output_weights: bool = switch(
        "Use separate weights for the output layer, not those of the word embeddings.", architecture=True
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
    init_method_std: float = flag("Standard deviation of the initial weights.", default=0.02, above=0)
    vocab_size: int | None = flag(
        "Words of the vocabulary, before padding: --vocab-size or the tokenizer's.",
        default=None,
        architecture=True,
        internal=True,
    )
    make_vocab_size_divisible_by: int = flag(
        "Pad the vocabulary to a multiple of this times the tensor-parallel size. Padding gets no probability; "
        "Megatron-LM's softmax includes it.",
        default=128,
        at_least=1,
    )
    attention_backend: Literal["auto", "sdpa", "chunked", "eager"] = flag(
        "Attention kernel; auto takes the first that supports the call.",
        default="auto",
        renamed_values={
            "flash": ("auto", _FLASH),
            "fused": ("auto", _FLASH),
            "unfused": ("eager", "the unfused attention is called eager here"),
            "local": ("eager", "the unfused attention is called eager here"),
            "reference": ("eager", "its former name"),
            "blocked": ("chunked", "its former name"),
        },
    )
    attention_softmax_in_fp32: bool = switch("Compute the attention softmax in fp32, whatever the model's precision.")
    fp32_residual_connection: bool = switch("Keep the residual stream in fp32.")

    def __post_init__(self) -> None:
        heads = max(self.num_attention_heads, 1)
        derive(self, "kv_channels", self.hidden_size // heads)
        derive(self, "num_query_groups", 1 if self.group_query_attention else self.num_attention_heads)
        gated_width = self.hidden_size * 8 // 3 // 64 * 64
        derive(self, "ffn_hidden_size", (gated_width or 64) if self.gated else 4 * self.hidden_size)
        if self.add_bias_linear:
            object.__setattr__(self, "add_qkv_bias", True)

    @property
    def nonlinearity(self) -> Nonlinearity:
        """What ``activation`` applies to each element; to the gate when ``gated``."""
        return _GATES.get(self.activation) or cast(Nonlinearity, self.activation)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: its first matmul is then twice as wide."""
        return self.activation in _GATES

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the word embeddings over all ranks; ``vocab_size`` must be known."""
        assert self.vocab_size is not None, "the vocabulary size comes from the tokenizer: RunConfig.with_vocab_size"
        unit = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // unit) * unit
