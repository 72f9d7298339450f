"""A real run of the demo model and a real Chromium. Skipped where browser, driver or selenium (extra ``browser``) are missing."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server, checkpoints, launch

__all__ = ["checkpoints", "launch"]

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",  # /dev/shm belongs to the runs
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
WAIT_S = 60.0


class Page:
    """The page in a tab, and what a person does with it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.prefer(scheme)
        self.driver.get(f"{self.url}/")
        self.until(lambda: self.text("#model"), "the page has met the server")

    def forget(self) -> None:
        """Take what the browser keeps of this server: conversations, settings, the key."""
        self.driver.get(f"{self.url}/")
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": self.url, "storageTypes": "all"})
        self.js("sessionStorage.clear(); localStorage.clear()")

    def prefer(self, scheme: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        return str(self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def pause_ms(self, time_ms: int) -> None:
        """Let the page go on alone."""
        self.driver.execute_async_script("setTimeout(arguments[1], arguments[0])", time_ms)

    def fill(self, selector: str, value: str) -> None:
        self.js("document.querySelector(arguments[0]).value = arguments[1]", selector, value)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: did not come true; {self.driver.get_log('browser')}"
            time.sleep(0.05)
        return found

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', { bubbles: true }))"
        self.js(script, self.find(selector), value)

    def ask(self, text: str) -> None:
        self.find("#prompt").send_keys(text)
        self.click("#send")

    def ask_for_long(self, num_tokens: int, text: str = "What can you do?") -> None:
        """An answer of exactly so many tokens, the same at any time."""
        self.js("document.querySelector('#settings').hidden = false")
        for name, value in (("max_tokens", num_tokens), ("temperature", 0)):
            self.fill(f"[name={name}]", str(value))
        self.js("document.querySelector('[name=ignore_eos]').checked = true")
        self.ask(text)

    def ask_to_say(self, text: str) -> None:
        """An answer that says this, and nothing else."""
        if not self.find("#settings").is_displayed():
            self.click("#settings-open")
        self.fill("[name=max_tokens]", "4000")
        self.choose("[name=form]", "regex")
        self.fill("[name=form_text]", re.sub(r"([.^$*+?()\[\]{}|\\])", r"\\\1", text))
        self.ask("Say it.")

    def show(self, folder: Path, *answers: str) -> None:
        """Import a conversation with these answers, each to a question."""
        turns: list[dict[str, Any]] = []
        for at, text in enumerate(text for answer in answers for text in ("And now?", answer)):
            parent = turns[-1]["id"] if turns else None
            role = ("user", "assistant")[at % 2]
            turns.append({"id": str(at), "parent": parent, "role": role, "text": text, "at": at, "facts": "stop"})
        conversation = {"title": "Imported", "created": 1, "updated": 2, "leaf": turns[-1]["id"], "turns": turns, "media": []}
        file = folder / "imported.json"
        file.write_text(json.dumps({"format": "mmrt-conversations", "version": 1, "conversations": [conversation]}))
        self.find("#import-file").send_keys(str(file))
        self.until(lambda: len(self.all(".turn")) == len(turns), "the conversation is shown")

    @property
    def answer(self) -> str:
        """The text of the last answer so far."""
        return str(self.js("return [...document.querySelectorAll('.answer .text')].at(-1)?.textContent ?? ''"))

    @property
    def meta(self) -> str:
        return str(self.js("return [...document.querySelectorAll('.answer .meta')].at(-1)?.textContent ?? ''"))

    def wait_for_answer(self) -> str:
        self.until(lambda: self.all(".answer") and not self.all(".answer[aria-busy]"), "the answer is complete")
        return self.answer

    def actor(self, name: str, label: str) -> str:
        """A value on the card of an actor."""
        script = """const card = document.querySelector(`[data-actor="${arguments[0]}"]`);
            const found = [...card?.querySelectorAll('dt') ?? []].find((dt) => dt.textContent === arguments[1]);
            return found?.nextElementSibling.textContent ?? ''"""
        return str(self.js(script, name, label))

    def wait_for_pipeline(self) -> None:
        self.until(lambda: self.actor("decode", "pid").isdigit(), "the pipeline is shown")


@pytest.fixture(scope="module")
def server(launch: Callable[..., Server]) -> Server:
    return launch(None)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not (BROWSER and DRIVER):
        pytest.skip("no chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Any, server: Server) -> Iterator[Page]:
    """The page, opened wide and light. A test that leaves messages in the console fails; one that expects some takes them out."""
    driver.get_log("browser")
    page = Page(driver, server.url)
    page.forget()
    page.open()
    yield page
    console = driver.get_log("browser")
    driver.get("about:blank")
    assert console == []
