"""A served chat model ends its answers at all of its end tokens, whoever asks, and says which they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.native import read_native, write_native
from megatron.core.parallel.environment import launch_environment
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import ConfigError
from megatron.serving.serve import served_model
from megatron.serving.settings import ServerConfig
from megatron.training.checkpoints.trained_model import trained_model
from megatron.training.evaluation.generating import generation_engine
from tests.harness.chat_model import END, LETTER, TURN_END, TURN_OVER, chat_folder
from tests.harness.sentences import expect_error
from tests.harness.serving import ask, listening
from tools.generation.families import GENERATIVE

pytest.importorskip("transformers", reason="it writes the published model")
pytest.importorskip("jinja2", reason="chat templates are written in it")

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A converted chat model that says one letter, and that two tokens besides its tokenizer's own end."""
    folder = tmp_path_factory.mktemp("chat")
    hf = chat_folder(folder / "hf", says=LETTER, eos_token_id=[TURN_OVER, END, TURN_END])
    convert(Conversion("hf", hf, "megatron", folder / "ours", skip_proof=True), say=lambda line: None)
    return str(folder / "ours")


@contextmanager
def serving(checkpoint: str, **settings: Any) -> Iterator[str]:
    """The address of a server of the checkpoint."""
    config = ServerConfig(port=0, no_access_log=True, **settings)
    with (
        trained_model(TrainedModelConfig(load=checkpoint), GENERATIVE, launch_environment({})) as trained,
        generation_engine(trained, InferenceConfig()) as engine,
    ):
        assert engine is not None
        model = served_model(trained, config, max_length=engine.limits.max_length)
        with listening(engine, model, config) as (_, address):
            yield address


@pytest.fixture(scope="module")
def url(checkpoint: str) -> Iterator[str]:
    """A server that is told nothing of end tokens."""
    with serving(checkpoint) as address:
        yield address


def said(url: str, path: str = CHAT, **fields: Any) -> tuple[str, int, str]:
    """Why an answer ended, its tokens, and its text."""
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    answer = ask(url, path, {**asked, "max_tokens": 6, "temperature": 0, **fields}).json
    choice = answer["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return choice["finish_reason"], answer["usage"]["completion_tokens"], text


@pytest.mark.parametrize("token", [END, TURN_END, TURN_OVER])
def test_every_end_token_ends_an_answer(url: str, token: int) -> None:
    """The second id of a list, forced, gave six tokens and ``length``; transformers and vLLM stop after one."""
    forced: dict[str, Any] = {"logit_bias": {str(token): 100}}
    for path in (CHAT, "/v1/completions"):
        assert said(url, path, **forced) == ("stop", 1, "")
        assert said(url, path, **forced, skip_special_tokens=False) == ("stop", 1, "")
    (last,) = ask(url, CHAT, {"messages": MESSAGES, "max_tokens": 6, "stream": True, **forced}).events[-1:]
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_request_can_ask_for_more_or_fewer_ends(url: str) -> None:
    """``ignore_eos`` and ``min_tokens`` were about the tokenizer's end alone."""
    forced: dict[str, Any] = {"logit_bias": {str(TURN_END): 100, str(TURN_OVER): 99}}
    assert said(url, **forced, ignore_eos=True)[:2] == ("length", 6)
    reason, count, text = said(url, **forced, min_tokens=3)
    assert (reason, count, len(text)) == ("stop", 4, 3), "no end before the third token"
    assert said(url, stop_token_ids=[LETTER]) == ("stop", 1, "")
    assert said(url)[:2] == ("length", 6)


def test_a_grammar_ends_with_any_of_them(url: str) -> None:
    """Where the answer is complete, each end token may follow, and none before."""
    pytest.importorskip("llguidance", reason="grammars need it")
    for token in (END, TURN_END, TURN_OVER):
        forced: dict[str, Any] = {"logit_bias": {str(token): 100}, "max_tokens": 9}
        assert said(url, **forced, structured_outputs={"regex": "[a-z]{3}"})[::2] == ("stop", "eee")
        assert said(url, **forced, structured_outputs={"regex": "[a-z]{2}[0-9]?"}) == ("stop", 3, "ee")


def test_beams_and_megatrons_clients_end_there(checkpoint: str, tmp_path: Path) -> None:
    """``PUT /api`` ends with the token that ended the text, and a search ends at each."""
    hf = chat_folder(tmp_path / "hf", says=TURN_END, eos_token_id=[END, TURN_END])
    convert(Conversion("hf", hf, "megatron", tmp_path / "ours", skip_proof=True), say=lambda line: None)
    with serving(str(tmp_path / "ours")) as url:
        body = {"prompts": ["hi"], "tokens_to_generate": 6, "top_k": 1}
        assert ask(url, "/api", body, method="PUT").json["text"] == ["hi<|im_end|>"]
        found = said(url, "/v1/completions", use_beam_search=True, best_of=2, n=1)
        assert found == ("stop", found[1], "")


def test_end_tokens_of_the_flag_replace_them(checkpoint: str) -> None:
    """Those that a model comes with can be wrong for it; the tokenizer's own end ends every text."""
    with serving(checkpoint, end_tokens=("e", str(TURN_OVER))) as url:
        ends = {token: said(url, logit_bias={str(token): 100})[0] for token in (END, TURN_END, TURN_OVER, LETTER)}
        assert ends == {END: "stop", TURN_END: "length", TURN_OVER: "stop", LETTER: "stop"}
    with expect_error(ConfigError, "--end-tokens quick brown", "3"), serving(checkpoint, end_tokens=("quick brown",)):
        pass


def test_the_first_line_names_them(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could tell at which tokens a server ends answers."""
    with serving(checkpoint) as url:
        pass
    said = f"serving ours at {url} (texts end with <|endoftext|> (0), <|im_end|> (2), <|eot|> (3))\n"
    assert said in capsys.readouterr().out


def test_the_learned_template_is_served(tmp_path: Path) -> None:
    """A model of conversations whose tokenizer has no template was refused chat, though its checkpoint knows one."""
    hf = chat_folder(tmp_path / "hf", says=TURN_END, template=None, eos_token_id=[END, TURN_END])
    convert(Conversion("hf", hf, "megatron", tmp_path / "ours", skip_proof=True), say=lambda line: None)
    learn(tmp_path / "ours", "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    with serving(str(tmp_path / "ours")) as url:
        assert said(url) == ("stop", 1, "")
        found = ask(url, "/tokenize", {"messages": MESSAGES}).json["tokens"]
        assert ask(url, "/detokenize", {"tokens": found}).json["prompt"] == "user: hi\n"
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    with serving(str(tmp_path / "ours"), chat_template=str(file)) as url:
        found = ask(url, "/tokenize", {"messages": MESSAGES}).json["tokens"]
        assert ask(url, "/detokenize", {"tokens": found}).json["prompt"] == "hi"


def learn(root: Path, template: str) -> None:
    """Give a checkpoint the template of fine-tuning data."""
    portable = read_native(root)
    assert portable.chat is not None
    learned = ChatSettings(template=template, end_tokens=portable.chat.end_tokens)
    aside = root.with_name("aside")
    write_native(replace(portable, chat=learned), aside, final=aside)
    root.rename(root.with_name("before"))
    aside.rename(root)
