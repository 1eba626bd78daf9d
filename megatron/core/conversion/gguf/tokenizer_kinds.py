"""What llama.cpp calls kinds of tokenizers, in ``tokenizer.ggml.model``."""

BYTE_LEVEL, PIECES, UNIGRAMS = "gpt2", "llama", "t5"
CLASSES = {PIECES: "LlamaTokenizer", UNIGRAMS: "T5Tokenizer"}
"""Tokenizer classes of transformers that read such a SentencePiece model."""
