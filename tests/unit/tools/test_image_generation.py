"""``--image`` of the command line: pictures stand where prompts say, and what is none is told in a sentence."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the model is made by the dev extra's transformers")

from PIL import Image

from megatron.core.conversion.convert import Conversion, convert
from megatron.errors import ConfigError, DataError, MegatronError
from tests.harness.sentences import expect_error
from tests.unit.conversion.test_llava import random_llava
from tools.text_generation_cli import main

pytestmark = pytest.mark.slow(reason="tests/unit/inference/test_images.py has the engine, and test_pictures.py prompts")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a small LLaVA, whose tokens are numbers."""
    folder = tmp_path_factory.mktemp("llava")
    random_llava().save_pretrained(folder / "theirs")
    convert(Conversion("hf", folder / "theirs", "megatron", folder / "ours"), list[str]().append)
    return str(folder / "ours")


def answered(load: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed behind the prompt."""
    main(["--load", load, "--tokens-to-generate", "12", "--seed", "7", *arguments])
    return capsys.readouterr().out.strip()


def test_answers_are_about_the_picture(load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another picture, or the same at another place, is another prompt; without a mark it comes first."""
    red, blue = (str(tmp_path / f"{color}.png") for color in ("red", "blue"))
    for path in (red, blue):
        Image.new("RGB", (30, 20), Path(path).stem).save(path)
    prompts = (["--prompt", "5 6"], ["--prompt", "<image>\n5 6"], ["--prompt", "5 <image> 6"])
    first, marked, inside = (answered(load, capsys, "--image", red, *each) for each in prompts)
    assert first.removeprefix("5 6").split() == marked.removeprefix("<image>\n5 6").split()
    others = [inside, answered(load, capsys, "--image", blue, *prompts[0]), answered(load, capsys, *prompts[0])]
    assert all(first.split()[-12:] != each.split()[-12:] for each in others)
    both = answered(load, capsys, "--image", red, blue, "--prompt", "<image> 7 <image>")
    assert len(both.split()) == 15


def test_lines_of_a_file_have_images_of_their_own(load: str, tmp_path: Path) -> None:
    """Beside the file or in a data URL, each is read for its own line, and an answer to another is not kept."""
    for color in ("red", "blue"):
        Image.new("RGB", (30, 20), color).save(tmp_path / f"{color}.png")
    template, asked, answers = tmp_path / "template", tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    inline = f"data:image/png;base64,{base64.b64encode((tmp_path / 'red.png').read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": inline}}
    lines = [
        {"prompt": "5 6", "image": "red.png"},
        {"prompt": "<image>\n5 6", "images": [inline]},
        {"prompt": "5 6", "image": "blue.png"},
        {"prompt": "5 6"},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": " 5 6"}]}]},
        {"messages": [{"role": "user", "content": "5 6"}], "image": "red.png"},
    ]
    asked.write_text("".join(json.dumps(each) + "\n" for each in lines))
    words = ["--load", load, "--tokens-to-generate", "12", "--temperature", "0", "--chat-template", str(template)]
    words += ["--input-jsonl", str(asked), "--output-jsonl", str(answers)]
    main(words)
    red, *others = (json.loads(line)["text"] for line in answers.read_text().splitlines())
    assert [each == red for each in others] == [True, False, False, True, True]
    Image.new("RGB", (30, 20), "blue").save(tmp_path / "red.png")
    with expect_error(ConfigError, f"{answers}: line 1", exit_code=2):
        main(words)
    for number, name in enumerate(("none.png", "../red.png", "data:image/png;base64,!", "data:text/plain,a")):
        asked.write_text(json.dumps({"prompt": "5", "image": name}) + "\n")
        with expect_error(DataError, f"{asked}:1", exit_code=2):
            main([*words[:-1], f"{answers}{number}"])


def test_what_is_no_image_is_told(load: str, tmp_path: Path) -> None:
    """A path that is mistyped, a text, and marks for other pictures than there are."""
    (tmp_path / "words.png").write_text("words")
    with (tmp_path / "huge.png").open("wb") as file:  # sparse: nothing of it is read
        file.truncate(1 << 40)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    cases: list[tuple[type[MegatronError], list[str]]] = [
        (DataError, ["--image", str(tmp_path / "none.png"), "--prompt", "5"]),
        (DataError, ["--image", str(tmp_path / "words.png"), "--prompt", "5"]),
        (DataError, ["--image", str(tmp_path / "huge.png"), "--prompt", "5"]),
        (DataError, ["--image", str(tmp_path / "a.png"), "--prompt", "<image> <image> 5"]),
        (ConfigError, ["--image", str(tmp_path / "a.png"), "--input-jsonl", "a", "--output-jsonl", "b"]),
    ]
    for kind, arguments in cases:
        with expect_error(kind):
            main(["--load", load, *arguments])
