"""The server's page in a real browser, against a real server whose model is a table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.serving.app import PAGE
from megatron.serving.templates import Templates
from tests.harness.browser import EXECUTABLE, Tab, browser
from tests.harness.sentences import check_line, check_sentence
from tests.harness.serving import Running, ask, served, slow_table
from tests.unit.serving.test_pictures import serves_pictures

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed (Debian's package chromium)")

TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
NOTES = "[...document.querySelectorAll('article footer span')].map((each) => each.textContent)"
TEXTS = "[...document.querySelectorAll('article .text')].map((each) => each.textContent)"
PICTURES = os.environ.get("PAGE_PICTURES")  # a folder that gets pictures of what the tests see


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as found:
        yield found


@pytest.fixture
def templates() -> Templates:
    return Templates(TEMPLATE, {})


@pytest.fixture
def server(templates: Templates) -> Iterator[Running]:
    """It generates 100 tokens a second."""
    with served(slow_table(seconds=0.01), templates=templates) as running:
        yield running


def visit(tab: Tab, server: Running, *, width: int = 1280, height: int = 800, is_dark: bool = False) -> None:
    """The page as somebody sees it who has never been there."""
    tab.problems.clear()
    tab.resize(width, height, is_phone=width < 600, is_dark=is_dark)
    tab.open(server.url)
    tab.run("localStorage.clear(); sessionStorage.clear()")
    tab.call("Page.reload")
    tab.wait("document.readyState === 'complete' && document.title !== 'Text generation'")


def picture(tab: Tab, name: str) -> None:
    if PICTURES is not None:
        tab.picture(Path(PICTURES, f"{name}.png"))


def set_field(tab: Tab, name: str, value: str) -> None:
    """As a user changes a setting."""
    tab.run(
        f"element('{name}').value = {value!r}; element('{name}').dispatchEvent(new Event('change', {{bubbles: true}}))"
    )


def says(tab: Tab, sentence: str) -> None:
    tab.wait(f"!error.hidden && error.firstChild.textContent.includes({sentence!r})")


def test_chats_by_keyboard(tab: Tab, server: Running) -> None:
    """Enter sends and Shift+Enter doesn't; the answer is that of the API, and its seed is shown."""
    visit(tab, server)
    for name, value in (("max_tokens", "24"), ("seed", "7"), ("temperature", "0.5")):
        set_field(tab, name, value)
    tab.run("prompt.focus()")
    tab.type("Hello,")
    tab.press("Enter", shift=True)
    tab.type("<b>you</b>!")
    tab.press("Enter")
    tab.wait(f"{TEXTS}[0]")
    picture(tab, "streaming")
    tab.wait("running === null")
    messages = [{"role": "user", "content": "Hello,\n<b>you</b>!"}]
    asked = {"messages": messages, "max_tokens": 24, "seed": 7, "temperature": 0.5}
    answer = ask(server.url, "/v1/chat/completions", asked).json["choices"][0]["message"]["content"]
    assert tab.run(TEXTS) == [answer]
    assert tab.run("document.querySelector('article .prompt').textContent") == messages[0]["content"]
    assert tab.run("document.querySelector('article b')") is None
    [note] = tab.run(NOTES)
    assert re.fullmatch(r"\d+ tokens · \d+\.\d tokens/s · seed 7( · ended at max tokens)?", note)
    assert tab.run("element('announcement').textContent").startswith("Complete: ")
    assert tab.run("document.activeElement.id") == "prompt"

    tab.type("And?")
    tab.press("Enter")
    tab.wait(f"{TEXTS}.length === 2 && running === null")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    second = ask(server.url, "/v1/chat/completions", {**asked, "messages": messages}).json
    assert tab.run(TEXTS)[1] == second["choices"][0]["message"]["content"]
    tab.call("Page.reload")
    tab.wait(f"document.readyState === 'complete' && {TEXTS}.length === 2")  # a reload loses nothing
    assert not tab.problems


@pytest.mark.parametrize("by", ["Escape", "the button"])
def test_stops(tab: Tab, server: Running, by: str) -> None:
    """The server stops too, and what came stays."""
    visit(tab, server)
    for name, value in (("max_tokens", "400"), ("seed", "7")):  # another seed's text may end after a few tokens
        set_field(tab, name, value)
    tab.run("prompt.focus()")
    tab.type("Tell me more.")
    tab.press("Enter")
    tab.wait(f"{TEXTS}[0].length > 5")
    assert tab.run("send.textContent") == "Stop"
    tab.press("Escape") if by == "Escape" else tab.run("send.click()")
    tab.wait("running === null")
    server.wait_until_idle()
    assert tab.run(NOTES)[0].endswith(" · stopped") and len(tab.run(TEXTS)[0]) > 5
    assert tab.run("send.textContent") == "Send" and tab.run("error.hidden")


def test_shows_what_an_encoder_reads_apart_from_the_text(tab: Tab) -> None:
    """The text is another than the prompt: it is not shown as its continuation, and nothing continues it."""
    with served(slow_table(has_encoder=True)) as running:
        visit(tab, running)
        assert tab.run("[prompt.placeholder, element('prompt-label').textContent]") == ["Input text"] * 2
        check_sentence(tab.run("element('empty').textContent"), "no chat template")
        for name, value in (("max_tokens", "12"), ("temperature", "0")):
            set_field(tab, name, value)
        tab.run("prompt.focus()")
        tab.type("One, two,")
        tab.press("Enter")
        tab.wait("running === null && document.querySelector('article button') !== null")
        asked = {"prompt": "One, two,", "max_tokens": 12, "temperature": 0}
        answer = ask(running.url, "/v1/completions", asked).json["choices"][0]["text"]
        assert answer and tab.run(TEXTS) == [answer]
        parts = "[...document.querySelectorAll('article p')].map((each) => each.textContent)"
        assert tab.run(parts) == ["One, two,", answer]
        buttons = "[...document.querySelectorAll('article button')].map((each) => each.textContent)"
        assert tab.run(buttons) == ["Again", "Edit", "Copy"]
        picture(tab, "encoder")
        tab.run("document.querySelector('article button').click()")  # Again: the prompt alone is sent
        tab.wait(f"running === null && {NOTES}[0].startsWith('12 tokens')")
        assert tab.run(TEXTS) == [answer]
        assert not tab.problems


def test_continues_a_text(tab: Tab, server: Running) -> None:
    visit(tab, server)
    tab.run("document.querySelector('[value=chat]').focus()")
    tab.press("ArrowRight")
    set_field(tab, "max_tokens", "8")
    set_field(tab, "temperature", "0")
    tab.run("prompt.focus()")
    tab.type("One, two,")
    tab.press("Enter")
    tab.wait("running === null && document.querySelector('article button') !== null")
    tab.run("document.querySelector('article button').click()")  # Continue
    tab.wait(f"running === null && {NOTES}[0].startsWith('8 tokens')")
    prompt, texts = "One, two,", ""
    for _ in range(2):
        asked = {"prompt": prompt + texts, "max_tokens": 8, "temperature": 0}
        texts += ask(server.url, "/v1/completions", asked).json["choices"][0]["text"]
    assert tab.run(TEXTS) == [texts]
    picture(tab, "completion")


def test_without_a_chat_template(tab: Tab) -> None:
    with served() as server:
        visit(tab, server)
        assert tab.run("document.querySelector('[value=chat]').disabled")
        check_line(tab.run("element('empty').textContent"), "template")
        assert tab.run("document.querySelector('[value=completion]').checked")
        picture(tab, "no-template")


def test_asks_for_a_key(tab: Tab, templates: Templates) -> None:
    with served(templates=templates, keys=["secret"]) as server:
        tab.resize(1280, 800)
        tab.open(server.url)
        says(tab, "This server asks for an API key")
        picture(tab, "key")
        assert tab.run("document.activeElement.id") == "key"
        tab.type("wrong")
        tab.press("Enter")
        says(tab, "does not accept this API key")
        tab.run("keyField.select()")
        tab.type("secret")
        tab.press("Enter")
        tab.wait("error.hidden && document.title !== 'Text generation'")
        tab.run("prompt.focus()")
        tab.type("Hello")
        tab.press("Enter")
        tab.wait("running === null && document.querySelectorAll('article button').length")


def test_errors_are_sentences(tab: Tab, templates: Templates) -> None:
    """What was written is not lost, and the setting at fault is marked."""
    with served(slow_table(seconds=0.01), templates=templates) as server:
        visit(tab, server)
        set_field(tab, "seed", "1e30")
        tab.run("prompt.focus()")
        tab.type("Hello")
        tab.press("Enter")
        says(tab, "seed")
        assert tab.run("prompt.value") == "Hello" and tab.run(TEXTS) == []
        assert tab.run("element('seed').getAttribute('aria-invalid')") == "true"
        picture(tab, "error")
        set_field(tab, "seed", "7")
        set_field(tab, "top_p", "7")
        tab.run("submit()")
        says(tab, "Top p: ")
        set_field(tab, "top_p", "1")
        set_field(tab, "max_tokens", "300")
        tab.run("submit()")
        tab.wait(f"{TEXTS}[0].length > 3")
        server.table.failure = RuntimeError("out of memory")
        tab.wait("running === null")
        assert not tab.run("error.hidden") and tab.run("error.firstChild.textContent").count(" ") > 3
        assert tab.run(NOTES)[0].endswith("ended by an error") and len(tab.run(TEXTS)[0]) > 3
    tab.run("prompt.value = 'Still there?'; submit()")
    says(tab, "The server cannot be reached. Is it still running?")
    assert tab.run("prompt.value") == "Still there?"


@pytest.mark.parametrize("is_dark", [False, True])
def test_on_a_phone(tab: Tab, server: Running, is_dark: bool) -> None:
    """Nothing is wider than 375 pixels, and texts stand out from what is behind them."""
    visit(tab, server, width=375, height=667, is_dark=is_dark)
    assert tab.run("settings.hidden")
    tab.run("prompt.value = 'A ' + 'long'.repeat(60); submit()")
    tab.wait("running === null")
    picture(tab, f"phone-{'dark' if is_dark else 'light'}")
    tab.run("element('open-settings').click()")
    picture(tab, f"phone-settings-{'dark' if is_dark else 'light'}")
    for _ in range(2):
        assert tab.run("document.documentElement.scrollWidth") <= 375
        boxes = tab.run(
            "[...document.querySelectorAll('button, input:not(.unseen), textarea')].filter((each) => each.offsetParent)"
            ".map((each) => [each.getBoundingClientRect().left, each.getBoundingClientRect().right])"
        )
        assert all(left >= 0 and right <= 375 for left, right in boxes), boxes
        tab.run("element('open-settings').click()")
    for selector in ("h1", "article .prompt", "article footer span", "#modes label", "#send", "#fresh"):
        assert contrast(tab, selector) >= 4.5, selector


def contrast(tab: Tab, selector: str) -> float:
    """Of a text and what is behind it, as WCAG 2 defines it."""
    colours = tab.run(
        f"(() => {{ let each = document.querySelector({selector!r}); const front = getComputedStyle(each).color;"
        "while (getComputedStyle(each).backgroundColor === 'rgba(0, 0, 0, 0)') each = each.parentElement;"
        "return [front, getComputedStyle(each).backgroundColor]; })()"
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def test_by_keyboard_and_screen_reader(tab: Tab, server: Running) -> None:
    """Tab reaches every control, the focus is visible, and each control has a name."""
    visit(tab, server)
    reached: list[str] = []
    tab.run("document.querySelector('[name=mode]:checked').focus()")
    for _ in range(20):
        name = tab.run("document.activeElement.id || document.activeElement.name")
        if not name or name in reached:
            break
        reached.append(name)
        shown = "[document.activeElement, document.activeElement.parentElement]"
        outlined = f"{shown}.some((each) => getComputedStyle(each).outlineStyle !== 'none')"
        assert tab.run(outlined), name
        tab.press("Tab")
    assert {
        "mode",
        "fresh",
        "open-settings",
        "log",
        "prompt",
        "send",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
    } <= {*reached}
    assert {"seed", "stop", "system", "defaults"} <= {*reached}
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "spinbutton", "radio", "region", "form")
    unnamed = [node for node in nodes if node["role"]["value"] in roles and not node.get("name", {}).get("value")]
    assert not [node for node in unnamed if node["role"]["value"] != "form"], unnamed


def test_nothing_comes_from_elsewhere(tab: Tab, server: Running) -> None:
    visit(tab, server)
    loaded = tab.run("performance.getEntriesByType('resource').map((each) => each.name)")
    assert loaded and all(each.startswith(server.url) for each in loaded)
    assert not re.search(r"(src|href)=\"(?!data:)", PAGE.read_text(encoding="utf-8"))
    check_line(PAGE.read_text(encoding="utf-8"), "default-src")


def test_a_picture_goes_with_a_message(tab: Tab, templates: Templates) -> None:
    """A user attaches a picture, takes one away again, and asks about it; a model of texts has no such button."""
    with served(slow_table(seconds=0.01), templates=templates) as texts:
        visit(tab, texts)
        assert tab.run("document.getElementById('attach').hidden")
    with serves_pictures() as server:
        visit(tab, server)
        drawn = "new Promise((done) => { const canvas = document.createElement('canvas'); canvas.width = 160; "
        drawn += "canvas.height = 96; const pen = canvas.getContext('2d'); pen.fillStyle = 'teal'; "
        drawn += "pen.fillRect(0, 0, 160, 96); pen.fillStyle = 'orange'; pen.fillRect(40, 20, 60, 60); "
        drawn += "canvas.toBlob((blob) => { const files = new DataTransfer(); "
        drawn += "files.items.add(new File([blob], 'a.png', { type: 'image/png' })); "
        drawn += "const field = document.getElementById('files'); field.files = files.files; "
        drawn += "field.dispatchEvent(new Event('change')); done(true); }); })"
        for _ in range(2):
            tab.run(drawn)
        tab.wait("document.querySelectorAll('#pictures img').length === 2")
        tab.run("document.querySelector('#pictures button').click()")
        tab.wait("document.querySelectorAll('#pictures img').length === 1")
        picture(tab, "picture-attached")
        tab.run("document.getElementById('prompt').focus()")
        tab.type("What is it?")
        tab.press("Enter")
        tab.wait("document.querySelectorAll('article .shown img').length === 1 && !document.querySelector('.running')")
        assert tab.run("document.getElementById('pictures').hidden")
        tab.wait(f"{TEXTS}[0].length > 0")
        picture(tab, "picture-asked")
        plan = next(plan for plan in server.table.plans if any(row.images is not None for row in plan.rows))
        assert next(row.images for row in plan.rows if row.images is not None).tiles.shape == (2, 3, 8, 8)
        assert not tab.problems
