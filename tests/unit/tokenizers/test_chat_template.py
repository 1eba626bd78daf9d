"""Chat templates: the tokens and the mask of transformers, and answers told apart where nothing marks them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron.core.tokenizers.conversations import ChatTemplate, Written, load_template, own_template
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.records import Conversation, read_sample
from megatron.core.tokenizers.targets import SampleEncoder
from megatron.errors import ConfigError, DataError, MegatronError
from tests.harness.sentences import expect_error

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %} [INST] {{ message['content'] | trim }} [/INST]
{%- elif message['role'] == 'assistant' %}{% generation %} {{ message['content'] }} {{ eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
TOOLS = """{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}{% for message in messages %}
{% if message.content is none %}{% continue %}{% endif %}
{{ message.role }}: {% if loop.last %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}...
{% endif %}{% endfor %}"""
MESSAGES = [
    {"role": "user", "content": "quick  fox? é "},
    {"role": "assistant", "content": "brown, \U0001f98a lazy\nover"},
    {"role": "user", "content": '<dog> & "fox"'},
    {"role": "assistant", "content": "jumps"},
]


def unmarked(template: str) -> str:
    return template.replace("endgeneration", "endif").replace("generation %}", "if true %}")


@pytest.fixture
def folder(bpe_folder: Path, tmp_path: Path) -> Path:
    """A tokenizer with the special tokens of chats."""
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def encoded(folder: Path, template: str, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    (folder / "chat_template.jinja").write_text(template)
    chosen = load_template("tokenizer", str(folder), learned="assistant")
    sample = SampleEncoder(load(str(folder), extra_ids=0), chosen).encode(read_sample(record))
    return sample.ids, sample.learned


def written(template: ChatTemplate, messages: list[dict[str, Any]]) -> Written:
    conversation = read_sample({"messages": messages})
    assert isinstance(conversation, Conversation)
    return template.write(conversation)


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
def test_tokens_and_mask_of_transformers(folder: Path, template: str) -> None:
    """What is trained on must be what the model is asked with, token for token."""
    transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}] if template == TOOLS else None
    ids, learned = encoded(folder, template, {"messages": MESSAGES, "tools": tools})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(
        MESSAGES, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == expected["input_ids"]
    assert learned == [bool(each) for each in expected["assistant_masks"]]
    assert any(learned) and not all(learned)


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_answers_without_marks(folder: Path, template: str) -> None:
    """What an answer adds to the conversation before it and its generation prompt; with ChatML, the line end, too."""
    marked, learned = encoded(folder, template, {"messages": MESSAGES})
    plain, found = encoded(folder, unmarked(template), {"messages": MESSAGES})
    assert plain == marked
    tokenizer = load(str(folder), extra_ids=0)
    masks = {"marked": learned, "plain": found}
    texts = {
        name: tokenizer.detokenize([each for each, is_learned in zip(plain, mask) if is_learned])
        for name, mask in masks.items()
    }
    end = "<|im_end|>\n" if template == CHATML else "<|im_end|>"
    assert texts["plain"] == texts["marked"].replace("<|im_end|>", end)


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    """Some drop the thoughts of earlier turns: comparing would mark the wrong characters."""
    rewriting = "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content[:2] }}|{% endfor %}"
    template = ChatTemplate(rewriting, tokens={})
    with expect_error(DataError, "messages[1]"):
        written(template, MESSAGES)
    assert written(template, MESSAGES[1:2]).answers == [(0, len("assistant:" + MESSAGES[1]["content"] + "|"))]


def test_what_a_template_refuses_is_a_bad_line(folder: Path) -> None:
    with expect_error(DataError):
        encoded(folder, LLAMA, {"messages": [{"role": "system", "content": "x"}]})
    with expect_error(DataError):
        encoded(folder, CHATML, {"messages": MESSAGES[:1]})
    with expect_error(DataError, "messages[0]", '"hello"'):
        encoded(folder, CHATML, {"messages": ["hello"]})
    with expect_error(DataError, "\\ud800"):
        encoded(folder, CHATML, {"messages": [{"role": "assistant", "content": "\ud800"}]})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_are_not_trusted(attack: str) -> None:
    """A template is a program by whoever published the tokenizer."""
    with expect_error(DataError):
        written(ChatTemplate(attack, tokens={}), [{"role": "assistant", "content": "x"}])


def test_where_the_template_comes_from(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, the file beside the tokenizer, or its settings; else a sentence that says what to do."""
    with expect_error(ConfigError, "chat_template.jinja", "tokenizer_config.json"):
        load_template("tokenizer", str(folder), learned="assistant")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for found in (LLAMA, [{"name": "rag", "template": "no"}, {"name": "default", "template": LLAMA}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": found}))
        template = load_template("tokenizer", str(folder / "tokenizer.json"), learned="assistant")
        assert template.prompt(MESSAGES[:1], begin_answer=False, variables={}).startswith("<s> [INST] quick")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    content = MESSAGES[0]["content"]
    own = written(load_template(str(tmp_path / "mine.jinja"), None, learned="user"), MESSAGES[:1])
    assert (own.text, own.answers) == (content, [(0, len(content))])
    with expect_error(ConfigError, "--learned-role user"):
        load_template("tokenizer", str(folder), learned="user")
    with expect_error(ConfigError, "nothing.jinja"):
        load_template("nothing.jinja", None, learned="assistant")
    with expect_error(DataError, "--chat-template"):
        ChatTemplate("{% if %}", tokens={})
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with expect_error(ConfigError, "jinja2"):
        ChatTemplate("x", tokens={})


def test_templates_of_other_types(tmp_path: Path) -> None:
    """A list of templates without names was a KeyError, and a list in place of the settings an AttributeError."""
    for text in (
        '{"chat_template": [{"template": "x"}]}',
        '{"chat_template": [1, {"name": []}]}',
        "[1]",
        "{",
        '{"a":' * 9999,
    ):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with expect_error(MegatronError, "tokenizer_config.json", exit_code=2):
            load_template("tokenizer", str(tmp_path), learned="assistant")


def test_the_current_folder_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vocab.json and merges.txt, whatever template and special tokens lay in the current folder were taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("other")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert own_template(None) is None
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}x")
    assert not load_template("mine.jinja", None, learned="assistant").tokens
    with expect_error(ConfigError, "--chat-template tokenizer", "chat_template.jinja"):
        load_template("tokenizer", None, learned="assistant")


PARTS = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text | trim }}{% endif %}{% endfor %}
{%- endif %};{% endfor %}"""


@pytest.mark.parametrize(
    ("mark", "written"),
    [
        ("<image>", "<image>"),
        ("<IMG_CONTEXT>\n", "<image>\n"),
        ("<start_of_image>", "<image>"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><image><|vision_end|>"),
    ],
)
def test_what_a_template_writes_for_an_image_is_found(mark: str, written: str) -> None:
    """Gemma 3's template writes <start_of_image>: its chats about pictures had no place for them."""
    source = PARTS.replace("MARK", mark)
    asked = [{"role": "user", "content": "<image>\nWhat?"}]
    found = ChatTemplate(source, tokens={}).prompt(asked, begin_answer=False, variables={})
    assert found == f"user:{written}What?;"
    chat = read_sample({"messages": [*asked, {"role": "assistant", "content": "A dog."}]})
    assert isinstance(chat, Conversation)
    words = ChatTemplate(source, tokens={}, image="(<image>)").write(chat)
    assert words.text == f"user:{written.replace('<image>', '(<image>)')}What?;assistant:A dog.;"
    assert [words.text[each.start : each.stop] for each in words.answers] == ["assistant:A dog.;"]
    of_text = [{"role": "user", "content": f"What is {mark}?"}]
    assert mark == "<image>" or mark in ChatTemplate(source, tokens={}).prompt(
        of_text, begin_answer=False, variables={}
    )
