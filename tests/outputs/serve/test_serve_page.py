"""The chat page, clicked in headless Chromium (driven by chromedriver's own HTTP interface)."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Reciter, serving, wait_until
from tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("chromedriver") is None or shutil.which("chromium") is None,
        reason="no Chromium here (Debian: apt-get install chromium chromium-driver)",
    ),
]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name for a reference to an element
_ENTER = "\ue007"


class Browser:
    """One page in a browser."""

    def __init__(self, driver: str, folder: Path) -> None:
        self._driver = driver
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        chrome = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": chrome}})["sessionId"]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def do(self, method: str, path: str, body: Any = None) -> Any:
        return self._call(method, f"/session/{self._session}{path}", body)

    def find(self, css: str) -> list[str]:
        found = self.do("POST", "/elements", {"using": "css selector", "value": css})
        return [element[_ELEMENT] for element in found]

    def texts(self, css: str) -> list[str]:
        return [self.do("GET", f"/element/{element}/property/textContent") for element in self.find(css)]

    def click(self, css: str) -> None:
        self.do("POST", f"/element/{self.find(css)[0]}/click", {})

    def type(self, css: str, text: str) -> None:
        self.do("POST", f"/element/{self.find(css)[0]}/value", {"text": text})

    def complaints(self) -> list[str]:
        """What the browser's console says at level SEVERE, but for a missing icon."""
        entries = self.do("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] == "SEVERE" and "favicon" not in e["message"]]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:

        def ready() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_until(ready)
        browser = Browser(f"http://127.0.0.1:{port}", tmp_path / "profile")
        try:
            yield browser
        finally:
            browser.do("DELETE", "")
    finally:
        process.terminate()
        process.wait(10)


def test_a_chat_on_the_page(browser: Browser) -> None:
    with serving(Reciter("Yes <b>€</b>", seconds=0.01), name="parrot") as served:
        browser.do("POST", "/url", {"url": served.address})
        wait_until(lambda: browser.texts("#model") == ["parrot"])
        browser.type("#input", "Hello?")
        browser.click("#send")
        wait_until(lambda: browser.texts("#log .assistant") == ["Yes <b>€</b>"])  # as text, not as HTML
        browser.type("#input", "Again" + _ENTER)
        wait_until(lambda: browser.texts("#log .assistant") == ["Yes <b>€</b>"] * 2)
        assert browser.texts("#log .user") == ["Hello?", "Again"]
        browser.click("#clear")
        assert browser.find("#log div") == []
        assert browser.complaints() == []


def test_an_answer_is_stopped_and_the_row_is_free(browser: Browser) -> None:
    with serving(Reciter("word " * 400, seconds=0.05)) as served:
        browser.do("POST", "/url", {"url": served.address})
        browser.type("#input", "Hello?" + _ENTER)
        wait_until(lambda: "word" in "".join(browser.texts("#log .assistant")))
        assert browser.texts("#send") == ["Stop"]
        browser.click("#send")
        wait_until(lambda: served.service.engine.load.running == 0, seconds=20)
        wait_until(lambda: browser.texts("#send") == ["Send"])
        said = browser.texts("#log .assistant")
        time.sleep(0.3)
        assert browser.texts("#log .assistant") == said


def test_a_token_is_asked_for_on_the_page(browser: Browser) -> None:
    with serving(Reciter("Yes"), token="secret") as served:
        browser.do("POST", "/url", {"url": served.address})
        browser.type("#input", "Hello?" + _ENTER)
        wait_until(lambda: "Bearer" in "".join(browser.texts("#log .error")))
        browser.type("#token", "secret")
        browser.type("#input", "Hello?" + _ENTER)
        wait_until(lambda: browser.texts("#log .assistant")[-1:] == ["Yes"])


def test_a_model_without_template_continues_texts(browser: Browser) -> None:
    with serving(Reciter(" and so on"), tiny_tokenizer(template=None)) as served:
        browser.do("POST", "/url", {"url": served.address})
        wait_until(
            lambda: (
                "no chat template" in browser.do("GET", f"/element/{browser.find('#input')[0]}/attribute/placeholder")
            )
        )
        browser.type("#input", "Once" + _ENTER)
        wait_until(lambda: browser.texts("#log .assistant") == [" and so on"])
