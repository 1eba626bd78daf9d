"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """A tab of a browser: it loads pages, runs scripts in them, types, and takes pictures."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._numbers, self._rest = reader, writer, itertools.count(1), b""
        self._session: str | None = None
        self.problems: list[str] = []
        """Exceptions and errors that the page's console was told."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; commands are those of the DevTools protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, condition: str, *, seconds: float = 30.0) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {condition}; {self.problems}"
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def resize(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the colours that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key on the keyboard."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        known: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **known)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def picture(self, file: Path) -> None:
        """What the window shows, as a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._reader, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a new browser with a profile of its own."""
    assert EXECUTABLE is not None, "no Chromium is installed"
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        # The protocol's pipe is file 3 for commands and 4 for answers. Root needs --no-sandbox.
        shell = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]
        process = subprocess.Popen(
            ["bash", "-c", shell, EXECUTABLE, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            pass_fds=(commands[0], answers[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            tab = Tab(answers[0], commands[1])
            yield tab
            tab.call("Browser.close")
            process.wait(timeout=20)
        finally:
            process.kill()
            process.wait()
            os.close(answers[0])
            os.close(commands[1])
