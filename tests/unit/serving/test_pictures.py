"""Images in conversations: data URLs alone, and no picture, however made, does more than fail its own request."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import MARKER
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.core.tokenizers.conversations import IMAGE, ChatTemplate
from megatron.serving.pictures import Pictures
from tests.harness.sentences import check_sentence
from tests.harness.serving import Reply, Running, ask, byte_tokenizer, served, slow_table

pytest.importorskip("jinja2", reason="chat templates are written in it")

VISION = VisionConfig(vision_model_type="siglip", img_h=8, img_w=8, patch_dim=4, use_tiling=True, max_num_tiles=2)
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
PATH = "/v1/chat/completions"


def encoded(picture: Image.Image, kind: str = "png", **options: Any) -> str:
    """A picture as a data URL."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return url_of(file.getvalue(), kind)


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def red(width: int = 8, height: int = 8, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), "red")


@contextlib.contextmanager
def serves_pictures() -> Iterator[Running]:
    """A server of a table that takes images of 4 features a tile."""
    from megatron.serving.templates import Templates

    vision = VISION.resolved(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1), (1,))
    table = slow_table(image_shape=(8, 8, vision.features_per_tile))
    pictures = Pictures(ImagePrompts(vision, byte_tokenizer()), most=3, most_pixels=1 << 16, seconds=60.0)
    with served(table, templates=Templates(TEMPLATE, {}, seconds=60.0), pictures=pictures) as server:
        yield server


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serves_pictures() as server:
        yield server


def said(running: Running, *parts: Any, **fields: Any) -> Reply:
    """The answer to one message of these parts; texts are URLs of images."""
    content = [{"type": "image_url", "image_url": {"url": each}} if isinstance(each, str) else each for each in parts]
    messages = [{"role": "user", "content": content}]
    return ask(running.url, PATH, {"messages": messages, "temperature": 0, "max_tokens": 4, **fields})


WORDS = {"type": "text", "text": "what is it, and what else is there to be seen?"}


def test_an_image_takes_its_places(running: Running) -> None:
    """A picture of two tiles takes eight places, and the words around it stay."""
    answer = said(running, encoded(red(16, 8)), WORDS, return_token_ids=True).json
    prompt = answer["choices"][0]["prompt_token_ids"]
    words = ask(running.url, "/tokenize", {"prompt": f"user: \n{WORDS['text']}\n", "add_special_tokens": False}).json
    eod = byte_tokenizer().eod
    assert len(prompt) == words["count"] + 8 and prompt.count(eod) == 8
    counted = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": encoded(red())}}]}]}
    assert ask(running.url, "/tokenize", counted).json["tokens"].count(eod) == 4
    assert ask(running.url, "/v1/models").json["data"][0]["reads_images"] is True


def test_the_cache_knows_pictures(running: Running) -> None:
    """The same question about another picture is another question."""
    long = {"type": "text", "text": "z" * 90}
    cached = [
        said(running, url, long).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for url in (encoded(red()), encoded(red()), encoded(Image.new("RGB", (8, 8), "blue")))
    ]
    assert cached[0] < cached[1] and cached[2] < cached[1]


GIF = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
HOSTILE: dict[str, Callable[[], list[Any]]] = {
    "an address": lambda: ["https://example.com/a.png"],
    "a file": lambda: ["file:///etc/passwd"],
    "a path": lambda: ["/etc/passwd"],
    "another type of data": lambda: ["data:text/html;base64,AAAA"],
    "no base64": lambda: ["data:image/png;base64,!!!"],
    "no bytes": lambda: ["data:image/png;base64,"],
    "text": lambda: [url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>")],
    "half a file": lambda: [url_of(base64.b64decode(encoded(red(64, 64), "jpeg").partition(",")[2])[:300])],
    "several pictures": lambda: [encoded(GIF[0], "gif", save_all=True, append_images=GIF[1:])],
    "too many pixels": lambda: [encoded(red(300, 300))],
    "a decompression bomb": lambda: [encoded(Image.new("L", (20000, 20000)))],
    "too many": lambda: [encoded(red())] * 4,
    "a mark among the words": lambda: [encoded(red()), {"type": "text", "text": f"and {MARKER}?"}],
    "no URL": lambda: [{"type": "image_url"}],
    "more than a URL": lambda: [{"type": "image_url", "image_url": {"url": encoded(red()), "path": "/etc/passwd"}}],
    "sound": lambda: [{"type": "input_audio", "text": "la"}],
}


def test_no_picture_does_more_than_fail(running: Running) -> None:
    """Each is a 400 with one sentence, and the next request is answered."""
    for name, parts in HOSTILE.items():
        reply = said(running, *parts(), WORDS)
        assert reply.status == 400, (name, reply.body)
        check_sentence(f"{name}: {reply.json['error']['message']}")
    assert said(running, encoded(red()), WORDS).status == 200


READ: dict[str, Callable[[], str]] = {
    "CMYK": lambda: encoded(red(mode="CMYK"), "jpeg"),
    "16 bits": lambda: encoded(Image.new("I;16", (8, 8), 60000)),
    "a palette": lambda: encoded(red().convert("P")),
    "half transparent": lambda: encoded(red(mode="RGBA")),
    "turned by EXIF": lambda: encoded(red(16, 8), "jpeg", exif=_turned()),
    "another type than it says": lambda: encoded(red(), "jpeg").replace("image/jpeg", "image/png"),
}


def _turned() -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = 6
    return found


def test_pictures_of_any_kind_are_read(running: Running) -> None:
    """What cameras and scanners write."""
    for name, url in READ.items():
        assert said(running, url(), WORDS).status == 200, name


def test_a_model_of_texts_says_so() -> None:
    """An image that is left out would be answered by a guess."""
    from megatron.serving.templates import Templates

    with served(templates=Templates(TEMPLATE, {}, seconds=60.0)) as server:
        reply = said(server, encoded(red()))
        assert reply.status == 400
        check_sentence(reply.json["error"]["message"])


PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}[IMG]"
    "{% else %}({{ part['text'] }}){% endif %}{% endfor %}{% endfor %}"
)
EITHER = "{% if messages[0]['content'] is string %}{{ messages[0]['content'] }}{% else %}" + PARTS + "{% endif %}"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PARTS, f"{MARKER}\nWhat?", "<image>(What?)"),
        (PARTS, "What?", "(What?)"),
        (EITHER, f"See {MARKER}, {MARKER}!", "(See )<image>(, )<image>(!)"),
        (EITHER, "What?", "What?"),
        ("{{ messages[0]['content'] }}", f"{MARKER}\nWhat?", f"{MARKER}\nWhat?"),
    ],
)
def test_templates_get_contents_in_their_way(template: str, content: str, text: str) -> None:
    """LLaVA's template writes nothing of a content that is a text."""
    assert IMAGE == MARKER
    written = ChatTemplate(template, tokens={}).prompt(
        [{"role": "user", "content": content}], begin_answer=False, variables={}
    )
    assert written == text
