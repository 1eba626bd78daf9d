"""What ends a text, and what data of conversations and the models that learn them keep of it."""

from __future__ import annotations

from megatron.core.tokenizers.chat_settings import ChatSettings, common_settings, learned_after
from megatron.core.tokenizers.end_tokens import described, end_ids
from megatron.core.tokenizers.null import NullTokenizer
from megatron.errors import ConfigError
from tests.harness.sentences import check_sentence, expect_error
from tests.harness.serving import byte_tokenizer

CHAT = ChatSettings(template="a", end_tokens=(5, 7))


def test_end_tokens_replace_those_that_are_stored() -> None:
    """Lists of end tokens were read by nothing. The tokenizer's own end always counts; a flag replaces the rest."""
    tokenizer = NullTokenizer(50)
    assert end_ids(tokenizer, None) == {50}
    assert end_ids(tokenizer, CHAT) == {50, 5, 7}
    assert end_ids(tokenizer, CHAT, ["9"]) == {50, 9}
    assert end_ids(tokenizer, CHAT, ["50"]) == {50}
    beyond = ChatSettings(template=None, end_tokens=(5, 51))  # of a model with more rows than the tokenizer has ids
    assert end_ids(tokenizer, beyond) == {50, 5}


def test_end_tokens_are_named_by_text_or_id() -> None:
    """A word of several tokens, or an id that isn't there, is one sentence."""
    tokenizer = byte_tokenizer()
    assert end_ids(tokenizer, None, ["a", "65"]) == {tokenizer.eod, *tokenizer.tokenize("a"), 65}
    with expect_error(ConfigError, "--end-tokens zq", "2 tokens"):
        end_ids(tokenizer, None, ["zq"])
    for word in ("999999", "9" * 5000):
        with expect_error(ConfigError, f"--end-tokens {word[:20]}"):
            end_ids(tokenizer, None, [word])
    with expect_error(ConfigError, "--end-tokens 'x'"):
        end_ids(NullTokenizer(50), None, ["x"])
    newline, letter = tokenizer.tokenize("\n")[0], tokenizer.tokenize("a")[0]
    assert described([newline, tokenizer.eod, letter], tokenizer) == (
        f'a ({letter}), "\\n" ({newline}), <|endoftext|> ({tokenizer.eod})'
    )
    assert described([50], NullTokenizer(50)) == "50"


def test_a_model_writes_as_it_learned_last_and_ends_as_it_ever_did() -> None:
    """Training on other conversations forgot the end tokens of the published model, or the format of turns."""
    now = ChatSettings(template="b", end_tokens=(3, 7))
    assert learned_after(CHAT, now) == ChatSettings(template="b", end_tokens=(3, 5, 7))
    assert learned_after(CHAT, ChatSettings(template=None, end_tokens=())) == CHAT
    assert learned_after(CHAT, None) == learned_after(None, CHAT) == CHAT
    assert learned_after(None, None) is None


def test_data_that_are_written_differently_are_named() -> None:
    """Which template a checkpoint keeps was left to chance where the data of a blend have several."""
    same = ChatSettings(template="a", end_tokens=(5, 7))
    pairs = ChatSettings(template=None, end_tokens=(5, 7))  # prompts and completions alone
    assert common_settings({"x": None}) == (None, "")
    assert common_settings({"w": None, "x": pairs, "y": CHAT, "z": same}) == (CHAT, "")
    settings, remark = common_settings({"x": CHAT, "y": ChatSettings(template="b", end_tokens=(3,)), "z": same})
    assert settings == ChatSettings(template="a", end_tokens=(3, 5, 7))
    check_sentence(remark, "3", "5", "7")
