"""Which tokenizer turns text into token ids."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, flag

TokenizerType = Literal[
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
]
RENAMED_TOKENIZERS = dict.fromkeys(
    (
        *("HFTokenizer", "PretrainedFromHF", "TokenizerFromFile", "TokenizerFromFileWithFIM", "Llama3Tokenizer"),
        *("FalconTokenizer", "AbejaJapaneseGPT2Tokenizer"),
    ),
    ("HuggingFaceTokenizer", ""),
)
REFUSED_TOKENIZERS = {
    "MultimodalTokenizer": "use the language model's own, such as HuggingFaceTokenizer; images need no token of it",
    "SFTTokenizer": "use HuggingFaceTokenizer with --tokenizer-model FOLDER, which holds the model's tokenizer.json",
    "BertWordPieceTokenizer": "use BertWordPieceLowerCase or BertWordPieceCase with --vocab-file",
}


class TokenizerConfig(Settings):
    """The tokenizer and its files."""

    tokenizer_type: TokenizerType = flag(
        "Kind of tokenizer.",
        renamed_values=RENAMED_TOKENIZERS,
        refused_values=REFUSED_TOKENIZERS,
        derived="NullTokenizer with --mock-data and --vocab-size and no tokenizer files, else GPT2BPETokenizer, or "
        "BertWordPieceLowerCase for data with masked words",
        follows=("mock_data", "vocab_size", "vocab_file", "merge_file", "tokenizer_model"),
        from_checkpoint=True,
    )
    vocab_file: str | None = flag(
        "vocab.json of GPT2BPETokenizer, vocab.txt (or tokenizer.json) of BertWordPiece.",
        default=None,
        from_checkpoint=True,
    )
    merge_file: str | None = flag("merges.txt of GPT2BPETokenizer.", default=None, from_checkpoint=True)
    tokenizer_model: str | None = flag(
        "Model file of SentencePiece or tiktoken; folder or tokenizer.json of a Hugging Face tokenizer.",
        default=None,
        from_checkpoint=True,
    )
    tokenizer_hf_no_include_special_tokens: bool = flag(
        "HuggingFaceTokenizer: leave out the tokens that it puts around each text, such as BOS.",
        default=False,
        from_checkpoint=True,
    )
    vocab_size: int | None = flag(
        "Size of the vocabulary before padding, if larger than the tokenizer's. NullTokenizer: number of ids, to "
        "which it adds one for the end of document. BertWordPiece: the number of entries of the file leaves out "
        "[BOS] and [EOS].",
        default=None,
        at_least=1,
        from_checkpoint=True,
    )
    extra_vocab_size: int = flag(
        "Rows of the vocabulary besides those of the tokenizer, before padding.", default=0, at_least=0
    )
    padded_vocab_size: int | None = flag(
        "Size of the padded vocabulary; follows from --make-vocab-size-divisible-by unless given.",
        default=None,
        at_least=1,
    )
    vocab_extra_ids: int = flag(
        "Sentinel tokens added to the vocabulary.", default=0, at_least=0, at_most=1_000_000, from_checkpoint=True
    )
    tiktoken_pattern: Literal["v1", "v2"] | None = flag(
        "Version of TikTokenizer's split pattern; v2 unless given.", default=None, from_checkpoint=True
    )
    tiktoken_num_special_tokens: int = flag(
        "Number of special tokens of TikTokenizer.", default=1000, at_least=0, from_checkpoint=True
    )
    tiktoken_special_tokens: tuple[str, ...] = flag(
        "Names of the first special tokens of TikTokenizer.", default=(), from_checkpoint=True
    )
