"""Texts of single tokens."""

from __future__ import annotations

from megatron.core.inference.request import TokenLogprobs
from megatron.serving.token_texts import TokenTexts
from tests.harness.serving import byte_tokenizer


def test_of_tokens_with_one_text_the_likelier_counts() -> None:
    """lm-eval calls a token greedy if its log-probability is the largest; two halves of a character have one text."""
    tokenizer = byte_tokenizer()
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    first, second = by_bytes[b"\xc3"], by_bytes[b"\xb6"]
    letter = tokenizer.tokenize("a")[0]
    found = TokenTexts(tokenizer).ranked(TokenLogprobs(-3.0, ((first, -0.5), (letter, -1.0))), token=second, most=2)
    assert found == {"\ufffd": -0.5, "a": -1.0}
    named = TokenTexts(tokenizer, as_ids=True).ranked(TokenLogprobs(-3.0, ((first, -0.5),)), token=second, most=1)
    assert named == {f"token_id:{first}": -0.5, f"token_id:{second}": -3.0}
