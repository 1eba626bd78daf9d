"""Which tokens of conversations are trained on, what ends their answers, and the formats as templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.conversations import ChatFormat, ChatTemplate, Writer
from megatron.core.tokenizers.gpt2_bpe import load as load_gpt2
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.records import Conversation, read_sample
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.core.tokenizers.targets import SampleEncoder, leading_text
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>"]
CHATML = ChatFormat()
EMOJI = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "yes \U0001fae0"},
    ]
}
NO_END = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
END_OUTSIDE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
<|im_end|>
{% endfor %}"""


def tokenizer_with(folder: Path, special: Sequence[str], tmp_path: Path, post_processor: Any = None) -> RustTokenizer:
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.add_special_tokens(list(special))
    if post_processor is not None:
        pipeline.post_processor = post_processor
    pipeline.save(str(tmp_path / "tokenizer.json"))
    return load(str(tmp_path), extra_ids=0)


@pytest.fixture
def chat(bpe_folder: Path, tmp_path: Path) -> RustTokenizer:
    """A tokenizer with marks of turns."""
    return tokenizer_with(bpe_folder, SPECIAL, tmp_path)


def learned_texts(tokenizer: Tokenizer, ids: Sequence[int], learned: Sequence[bool]) -> list[str]:
    """Each stretch of tokens that is trained on."""
    found, before = list[list[int]](), False
    for number, is_learned in zip(ids, learned):
        if is_learned and not before:
            found.append([])
        if is_learned:
            found[-1].append(number)
        before = is_learned
    return [tokenizer.detokenize(each) for each in found]


def learned(record: dict[str, Any], tokenizer: Tokenizer, writer: Writer = CHATML) -> list[str]:
    sample = SampleEncoder(tokenizer, writer).encode(read_sample(record))
    return learned_texts(tokenizer, sample.ids, sample.learned)


def test_pieces_of_a_character_and_turns_without_weight(chat: RustTokenizer) -> None:
    """An emoji is four tokens of one character; a turn with weight 0 was trained on."""
    assert learned(EMOJI, chat) == ["yo<|im_end|>\n", "yes \U0001fae0<|im_end|>\n<|endoftext|>"]
    weighted = {"messages": [dict(each) for each in EMOJI["messages"]]}
    weighted["messages"][1]["weight"] = 0  # type: ignore[assignment]
    weighted["messages"][3]["weight"] = 1  # type: ignore[assignment]
    assert learned(weighted, chat) == ["yes \U0001fae0<|im_end|>\n<|endoftext|>"]
    weighted["messages"][3]["weight"] = 0  # type: ignore[assignment]
    with expect_error(DataError, "0"):
        learned(weighted, chat)


def test_weights_where_the_template_marks_answers(chat: RustTokenizer) -> None:
    """What is marked belongs to turns in their order; where it can't, that is an error."""
    marked = ChatTemplate(END_OUTSIDE, tokens={})
    messages = [{"role": "assistant", "content": "yo", "weight": 0}, {"role": "assistant", "content": "hi"}]
    assert learned({"messages": messages}, chat, marked) == ["hi"]
    first = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}", tokens={})
    with expect_error(DataError, "1 stretches", "2 turns", "0"):
        learned({"messages": messages}, chat, first)


def test_a_format_without_ends_ends_with_the_next_mark(chat: RustTokenizer) -> None:
    """A model trained on such a template's answers alone never stopped; nothing was said."""
    encoder = SampleEncoder(chat, ChatTemplate(NO_END, tokens={}))
    sample = encoder.encode(read_sample(EMOJI))
    assert learned_texts(chat, sample.ids, sample.learned) == ["yo<|user|>", "yes \U0001fae0<|endoftext|>"]
    user = chat.tokenize_parts(["<|user|>"])[0][0]
    assert encoder.end_tokens == tuple(sorted([user, chat.eod]))
    assert (encoder.endings.next_marks, encoder.endings.documents, encoder.endings.none) == (1, 1, 0)
    encoder = SampleEncoder(chat, ChatTemplate(NO_END.replace("<|", "[").replace("|>", "]"), tokens={}))
    sample = encoder.encode(read_sample(EMOJI))
    assert learned_texts(chat, sample.ids, sample.learned) == ["yo", "yes \U0001fae0<|endoftext|>"]
    assert (encoder.endings.next_marks, encoder.endings.documents, encoder.endings.none) == (0, 1, 1)


def test_an_end_that_the_template_does_not_mark(chat: RustTokenizer) -> None:
    """The template's author decides what is trained on; that nothing ends an answer is counted."""
    encoder = SampleEncoder(chat, ChatTemplate(END_OUTSIDE, tokens={}))
    sample = encoder.encode(read_sample(EMOJI))
    assert learned_texts(chat, sample.ids, sample.learned) == ["yo", "yes \U0001fae0"]
    assert (encoder.endings.unmarked, encoder.endings.answers, encoder.end_tokens) == (2, 2, ())


def test_end_tokens_are_those_that_answers_end_with(chat: RustTokenizer) -> None:
    """A mark that users wrote into one answer still ends the others; a line end that answers hold ends none."""
    [[end], [line]] = chat.tokenize_parts(["<|im_end|>", "\n"])
    for writer, answers, expected in [
        (ChatFormat(), ["yo", "a <|im_end|> b", "yo"], (end,)),
        (ChatFormat("{role}:", "\n"), ["yo", "hi"], (line,)),
        (ChatFormat("{role}:", "\n"), ["yo\nyo\nyo", "hi"], ()),
        (ChatFormat("{role}:", " and so on"), ["yo", "hi"], (chat.eod,)),
    ]:
        encoder = SampleEncoder(chat, writer)
        for answer in answers:
            messages = [{"role": "assistant", "content": answer}, {"role": "user", "content": "x"}]
            encoder.encode(read_sample({"messages": messages[: 2 if expected != (chat.eod,) else 1]}))
        assert encoder.end_tokens == expected


def test_marks_that_the_tokenizer_cuts(bpe_folder: Path, chat: RustTokenizer) -> None:
    """They are many tokens, which an answer shows before it ends, if it does; marks in contents don't count."""
    plain = load(str(bpe_folder), extra_ids=0)
    encoder = SampleEncoder(plain, ChatFormat())
    encoder.encode(read_sample({"messages": [{"role": "user", "content": "<|x|>"}, *EMOJI["messages"]]}))
    assert encoder.cut_marks == {mark: len(plain.tokenize(mark)) for mark in ("<|im_start|>", "<|im_end|>")}
    assert encoder.endings.none == encoder.endings.documents == 1
    encoder = SampleEncoder(chat, ChatFormat())
    encoder.encode(read_sample(EMOJI))
    assert not encoder.cut_marks


ODD = ChatFormat('{role} "\U0001f98a" {{ x }} {role}\\\t', "{% end %}'\r\n\u2028", learned="bot", begin="<s>{# no #}")


@pytest.mark.parametrize("chat_format", [ChatFormat(), ChatFormat("", ""), ChatFormat("{role}: ", "\n"), ODD])
def test_formats_as_templates(chat_format: ChatFormat) -> None:
    """The template is stored with data and checkpoints: what it writes must be what was trained on, byte for byte."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    messages = [
        {"role": "system", "content": " {{ messages }} "},
        {"role": "user", "content": "quick?\n"},
        {"role": chat_format.learned, "content": 'brown "\\" \U0001f98a'},
    ]
    conversation = read_sample({"messages": messages})
    assert isinstance(conversation, Conversation)
    text = chat_format.write(conversation).text
    prompt = text + chat_format.turn_start.replace("{role}", chat_format.learned)
    ours = ChatTemplate(chat_format.source, tokens={})
    for begin_answer, expected in ((False, text), (True, prompt)):
        assert ours.prompt(messages, begin_answer=begin_answer, variables={}) == expected
        [theirs], _ = reference.render_jinja_template(
            [messages], chat_template=chat_format.source, add_generation_prompt=begin_answer
        )
        assert theirs == expected
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    with expect_error(DataError):
        ours.prompt([{"role": "assistant", "tool_calls": calls}], begin_answer=True, variables={})


def test_a_format_without_tools_refuses_them(chat: RustTokenizer) -> None:
    """What a format can't write would be missing from the conversation, in silence."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    user, tool = {"role": "user", "content": "hi"}, {"type": "function", "function": {"name": "f"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user, {"role": "assistant", "tool_calls": [call]}]}, "messages[1] has tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x", "thinking": "y"}]}, "messages[0] has reasoning"),
        ({"messages": EMOJI["messages"], "tools": [tool]}, "tools"),
    ]
    for record, fact in cases:
        with expect_error(DataError, fact, "--turn-start", "--turn-end", "--chat-template"):
            learned(record, chat)
    # Data sets with one type for each column have an empty text where there are no thoughts.
    no_thoughts = {"role": "assistant", "content": "x", "reasoning_content": ""}
    assert learned({"messages": [user, no_thoughts]}, chat) == ["x<|im_end|>\n<|endoftext|>"]


@pytest.mark.parametrize("trimmed", [True, False])
def test_spaces_at_the_borders_of_answers(bpe_folder: Path, tmp_path: Path, trimmed: bool) -> None:
    """GPT-2's offsets leave out a token's space, so a space at the end of an answer had no characters and no loss."""
    chat = tokenizer_with(bpe_folder, SPECIAL, tmp_path, processors.ByteLevel(trim_offsets=trimmed))
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}", tokens={})
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": " fox "}]
    assert learned({"messages": messages}, chat, template) == ["assistant: fox <|endoftext|>"]
    marked = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}",
        tokens={},
    )
    assert learned({"messages": messages}, chat, marked) == ["the", " fox "]


def test_a_beginning_of_text_is_written_once(bpe_folder: Path, tmp_path: Path) -> None:
    """Each turn and each completion began with one, as if it were a text of its own."""
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 334)])
    llama = tokenizer_with(bpe_folder, SPECIAL, tmp_path, begin)
    [[begin_id]] = llama.tokenize_parts(["<s>"])
    assert begin_id == 334
    chat_format = ChatFormat(begin=leading_text(llama))
    sample = SampleEncoder(llama, chat_format).encode(read_sample(EMOJI))
    text = ChatTemplate(chat_format.source, tokens={}).prompt(EMOJI["messages"], begin_answer=False, variables={})
    assert sample.ids == [*llama.tokenize_parts([text])[0], llama.eod]
    assert [place for place, each in enumerate(sample.ids) if each == begin_id] == [0]
    pair = SampleEncoder(llama, chat_format).encode(read_sample({"prompt": "quick", "completion": " fox"}))
    assert pair.ids == [*llama.tokenize("quick"), *llama.tokenize_parts([" fox"])[0], llama.eod]
    assert leading_text(load(str(bpe_folder), extra_ids=0)) == ""


def test_ids_of_the_stored_template(chat: RustTokenizer, tmp_path: Path) -> None:
    """transformers, asked with the template that is stored, gives the tokens that were trained on."""
    transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for writer in (ChatFormat(), ChatFormat("{role}:\n", "<|im_end|>")):
        sample = SampleEncoder(chat, writer).encode(read_sample(EMOJI))
        expected = theirs.apply_chat_template(EMOJI["messages"], chat_template=writer.source, return_dict=False)
        assert sample.ids == [*expected, chat.eod]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "normalized"])
def test_masks_of_transformers_for_other_vocabularies(bpe_folder: Path, tmp_path: Path, kind: str) -> None:
    """Bytes as tokens of their own, spaces before words, and characters that a normalizer joins."""
    transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    if kind == "metaspace":
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
        vocabulary = {word: number for number, word in enumerate([*words, "<|endoftext|>"])}
        pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "normalized":
        pipeline.normalizer = normalizers.NFC()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_with(tmp_path, SPECIAL, tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    template = END_OUTSIDE.replace("{% endgeneration %}", "<|im_end|>{% endgeneration %}")
    contents = ["fox \U0001fae0", "e\u0301 \n\nthe", "  \u6f22\u5b57 ", "e\u0301\U0001f468\u200d\U0001f469!\t"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(contents)]
    expected = theirs.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = SampleEncoder(ours, ChatTemplate(template, tokens={})).encode(read_sample({"messages": messages}))
    assert sample.ids == expected["input_ids"]
    assert sample.learned == [bool(each) for each in expected["assistant_masks"]]
    assert any(sample.learned)


def test_prompts_of_conversations_have_the_tokens_they_are_asked_with(chat: RustTokenizer) -> None:
    """Encoded with the answer, the space at the prompt's end would be part of the answer's first token."""
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
    sample = SampleEncoder(chat, ChatFormat("{role}: ", "<|im_end|>")).encode(read_sample({"messages": messages}))
    prompt = chat.tokenize_parts(["user: the<|im_end|>assistant: "])[0]
    assert sample.ids == [*prompt, *chat.tokenize_parts(["fox<|im_end|>"])[0], chat.eod]
    assert sample.learned == [False] * len(prompt) + [True] * (len(sample.ids) - len(prompt))


def test_an_end_of_turns_that_ends_documents_is_written_once(chat: RustTokenizer) -> None:
    """Two ends in a row would train a model to begin an empty document."""
    assert learned(EMOJI, chat, ChatFormat("{role}:", "<|endoftext|>")) == [
        "yo<|endoftext|>",
        "yes \U0001fae0<|endoftext|>",
    ]
    assert learned({"prompt": "a", "completion": "b<|endoftext|>"}, chat) == ["b<|endoftext|>"]


def test_other_kinds_of_tokenizers(bpe_folder: Path) -> None:
    """GPT-2's files without special tokens, and a tokenizer that doesn't tell characters."""
    gpt2 = load_gpt2(str(bpe_folder / "vocab.json"), str(bpe_folder / "merges.txt"), extra_ids=0)
    assert learned(EMOJI, gpt2) == ["yo<|im_end|>\n", "yes \U0001fae0<|im_end|>\n<|endoftext|>"]
    numbers = NullTokenizer(9)
    messages = [{"role": "user", "content": "1 2 "}, {"role": "assistant", "content": "3 4 "}]
    sample = SampleEncoder(numbers, ChatFormat("5 ", "6 ")).encode(read_sample({"messages": messages}))
    assert (sample.ids, sum(sample.learned)) == ([5, 1, 2, 6, 5, 3, 4, 6, 9], 4)
    with expect_error(ConfigError):
        SampleEncoder(numbers, ChatTemplate("x", tokens={}))


def test_a_single_token_has_nothing_to_predict_it(chat: RustTokenizer) -> None:
    """Such a sample had a target, but no label with a loss."""
    template = ChatTemplate("{% generation %}<|im_end|>{% endgeneration %}{{ messages[0].content }}", tokens={})
    with expect_error(DataError):
        learned({"messages": [{"role": "assistant", "content": "x"}]}, chat, template)
