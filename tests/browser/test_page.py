"""The page in a real Chromium, with a real run of the demo model behind it."""

import base64
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from mmrt.tests.end_to_end.conftest import Server

if TYPE_CHECKING:
    from .conftest import Page

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "What colour is the circle?"


def upload(page: "Page", name: str = "shapes.png") -> None:
    page.find("#files").send_keys(str(EXAMPLES / name))
    page.until(lambda: page.all("#attachments .medium"), "the file is attached")


# ---------------------------------------------------------------------------------------------------------- playground


def test_a_picture_and_an_answer(page: "Page") -> None:
    upload(page)
    page.ask(QUESTION)
    assert page.wait_for_answer() == "Red."
    assert re.search(r"first text \d.* · 3 tokens · .*stop", page.meta)
    assert page.js("return document.querySelector('.turn.user img').naturalWidth") > 0
    page.ask("And how big is it?")  # a conversation: the picture is still there
    page.until(lambda: len(page.all(".answer")) == 2, "the second answer begins")
    assert page.wait_for_answer() and not page.all("#turns .error")


@pytest.mark.parametrize("name, question", [("moving.mp4", "What moves?"), ("beeps.wav", "Is it a tone or noise?")])
def test_a_video_and_a_sound(page: "Page", name: str, question: str) -> None:
    upload(page, name)
    page.ask(question)
    assert page.wait_for_answer() and not page.all("#turns .error")


def test_without_streaming(page: "Page") -> None:
    page.click("#settings-open")
    page.js("document.querySelector('[name=stream]').checked = false")
    page.fill("[name=system]", "Be brief.")
    page.ask("What can you do?")
    assert page.wait_for_answer().startswith("I ")


def test_stop(page: "Page", server: Server) -> None:
    page.ask_for_long(4000)
    page.until(lambda: len(page.answer) > 50, "text has come")
    page.click("#stop")
    text = page.wait_for_answer()
    assert page.meta.endswith("stopped waterfall") and page.find("#send").is_displayed()
    server.wait_until_empty()
    assert page.answer == text


def test_an_error_and_another_try(page: "Page") -> None:
    page.click("#settings-open")
    page.fill("[name=max_tokens]", "999999999")
    page.ask("What can you do?")
    page.until(lambda: page.all(".answer [role=alert]"), "the error is shown")
    assert "max_tokens" in page.text(".answer [role=alert]") and "999999999" in page.text(".answer [role=alert]")
    (entry,) = page.driver.get_log("browser")
    assert "400 (Bad Request)" in entry["message"]  # the browser's own note of it
    page.fill("[name=max_tokens]", "20")
    page.click(".answer .row button")
    page.until(lambda: not page.all("[role=alert]:not([hidden])"), "the error is gone")
    assert page.wait_for_answer()


def code_of(page: "Page", prompt: str) -> str:
    """The next request as code."""
    page.fill("#prompt", prompt)
    page.click("#code-open")
    page.until(lambda: page.text("#code"), "the code is shown")
    code = page.text("#code")
    page.click("#code-dialog [data-close]")
    return code


def test_a_question_without_an_answer_is_forgotten(page: "Page") -> None:
    page.click("#settings-open")
    page.fill("[name=max_tokens]", "999999999")
    page.ask("What is wrong?")
    page.until(lambda: page.all(".answer [role=alert]"), "the error is shown")
    page.driver.get_log("browser")
    page.fill("[name=max_tokens]", "20")
    assert "What is wrong?" not in code_of(page, "Hello!")
    page.click("#send")
    page.until(lambda: not page.all(".answer [role=alert]"), "another answer begins")
    assert page.wait_for_answer() and not page.all(".answer .row button")
    code = code_of(page, "And now?")
    assert "What is wrong?" not in code and "Hello!" in code
    page.click("[aria-label='Earlier branch']")  # nothing is lost
    page.until(lambda: "What is wrong?" in page.text(".turn.user"), "the earlier question is shown")
    assert "There is no answer." in page.text(".answer [role=alert]") or "max_tokens" in page.text(".answer [role=alert]")


def test_a_new_chat_knows_nothing_of_an_answer_that_it_stopped(page: "Page") -> None:
    page.ask_for_long(4000)
    page.until(lambda: len(page.answer) > 50, "text has come")
    page.click("#clear")
    page.until(lambda: page.find("#send").is_displayed(), "the answer is stopped")
    assert "assistant" not in code_of(page, "Hello!")


def test_a_page_that_is_opened_before_the_server_answers(page: "Page") -> None:
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/models"]})
    page.driver.get(f"{page.url}/")
    page.ask("What can you do?")
    assert page.wait_for_answer() and not page.all("#turns .error") and not page.text("#model")
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.until(lambda: page.text("#model"), "the page asks again")
    page.driver.get_log("browser")


def test_a_field_out_of_its_range_is_not_sent(page: "Page") -> None:
    page.click("#settings-open")
    page.fill("[name=temperature]", "7")
    page.click("#settings-open")
    page.ask("Hello")
    assert not page.all(".turn") and page.js("return !document.querySelector('[name=temperature]').validity.valid")
    assert page.find("[name=temperature]").is_displayed()


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"enum": [1, 2]}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form, text, is_right",
    [
        ("json_object", "", lambda said: said.startswith("{")),  # this model may not end it
        ("json_schema", json.dumps(SCHEMA), lambda said: {*json.loads(said)} == {"colour", "n"}),
        ("regex", "(yes|no)[.!]", lambda said: re.fullmatch("(yes|no)[.!]", said)),
        ("choice", "maybe\nnever", lambda said: said in ("maybe", "never")),
        ("grammar", 'start: "a" "b"', lambda said: said == "ab"),
        ("json_schema", "", lambda said: {*json.loads(said)} == {"colour", "several"}),  # the example
    ],
)
def test_the_form_of_an_answer(page: "Page", form: str, text: str, is_right: Callable[[str], Any]) -> None:
    page.click("#settings-open")
    page.fill("[name=max_tokens]", "200")
    page.choose("[name=form]", form)
    if text:
        page.fill("[name=form_text]", text)
    page.ask(QUESTION)
    said = page.wait_for_answer()
    assert is_right(said), said


def test_a_schema_that_is_no_json_is_not_sent(page: "Page") -> None:
    page.click("#settings-open")
    page.choose("[name=form]", "json_schema")
    page.find("[name=form_text]").send_keys("{")
    page.ask("Hello")
    assert not page.all(".turn")
    assert "not valid JSON" in page.js("return document.querySelector('[name=form_text]').validationMessage")


def test_drop_and_paste(page: "Page") -> None:
    data = base64.b64encode((EXAMPLES / "shapes.png").read_bytes()).decode()
    for event, target in (("drop", "#turns"), ("paste", "#prompt")):
        script = """const bytes = Uint8Array.from(atob(arguments[0]), (char) => char.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], `${arguments[1]}.png`, { type: 'image/png' }));
            const made = { bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer };
            const event = arguments[1] === 'drop' ? new DragEvent('drop', made) : new ClipboardEvent('paste', made);
            document.querySelector(arguments[2]).dispatchEvent(event);"""
        page.js(script, data, event, target)
    assert [medium.text.strip("×\n") for medium in page.all("#attachments .medium")] == ["drop.png", "paste.png"]
    page.click("[aria-label='Remove drop.png']")
    page.ask(QUESTION)
    assert page.wait_for_answer() == "Red."


def test_a_file_that_is_no_medium(page: "Page", tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    page.find("#files").send_keys(str(tmp_path / "notes.txt"))
    page.until(lambda: "notes.txt: neither a picture, a video nor a sound" in page.text("#notices"), "the page complains")
    assert not page.all("#attachments .medium")


def test_a_microphone_that_cannot_be_recorded_is_let_go(page: "Page") -> None:
    page.js("""const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wanted) => (window.opened = await open(wanted));
        window.MediaRecorder = class { constructor() { throw new Error('no such format'); } }""")
    page.click("#microphone")
    page.until(lambda: "No microphone: no such format" in page.text("#notices"), "the page says why")
    assert page.js("return window.opened.getTracks().map((track) => track.readyState)") == ["ended"]


def test_camera_and_microphone(page: "Page") -> None:
    page.click("#camera")
    page.until(lambda: page.js("return document.querySelector('#viewfinder').videoWidth > 0"), "the camera shows a picture")
    page.click("#shoot")
    page.until(lambda: page.all("#attachments [data-kind=image]"), "a picture was taken")
    page.click("#camera")
    page.until(lambda: page.js("return document.querySelector('#viewfinder').videoWidth > 0"), "the camera shows a picture")
    page.click("#film")
    page.pause_ms(1200)
    page.click("#film")
    page.until(lambda: page.all("#attachments [data-kind=video]"), "a clip was recorded")
    page.click("#microphone")
    page.until(lambda: page.all("#microphone[aria-pressed=true]"), "the microphone records")
    page.pause_ms(1200)
    page.click("#microphone")
    page.until(lambda: page.all("#attachments [data-kind=audio]"), "a sound was recorded")
    page.ask("Is it a tone or noise?")
    assert page.wait_for_answer() and not page.all("#turns .error")


def test_a_camera_dialog_that_is_closed_leaves_no_camera_on(page: "Page") -> None:
    """Closed while the browser asks for permission, or while a clip is recorded."""
    page.js(
        """const real = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wanted) => {
            await new Promise((allow) => { window.allow = allow; });
            return (window.opened = await real(wanted));
        }"""
    )
    is_off = "return window.opened?.getTracks().every((track) => track.readyState === 'ended')"
    page.click("#camera")
    page.click("#camera-dialog [data-close]")
    page.js("window.allow()")
    page.until(lambda: page.js(is_off), "the camera is off")
    page.click("#camera")
    page.js("window.allow()")
    page.until(lambda: page.js("return document.querySelector('#viewfinder').videoWidth > 0"), "the camera shows a picture")
    page.click("#film")
    page.pause_ms(300)
    page.click("#camera-dialog [data-close]")
    page.until(lambda: page.js(is_off), "the camera is off")
    page.until(lambda: page.text("#film") == "Record clip", "the recording has ended")
    assert not page.all("#attachments .medium")


@pytest.mark.parametrize("language", ["curl", "python"])
@pytest.mark.parametrize("prompt", [QUESTION, 'What\'s the colour of the "circle"? $HOME `ls` \\ 😀'])
def test_copied_code_runs(page: "Page", tmp_path: Path, language: str, prompt: str) -> None:
    name = "it's a picture.png"
    (tmp_path / name).write_bytes((EXAMPLES / "shapes.png").read_bytes())
    page.find("#files").send_keys(str(tmp_path / name))
    page.click("#settings-open")
    page.fill("[name=temperature]", "0")
    page.fill("[name=guidance_scale]", "1.5")
    page.fill("[name=stop]", "xyzzy")
    page.fill("#prompt", prompt)
    page.click("#code-open")
    page.click(f"[data-language={language}]")
    code = page.text("#code")
    page.click("#code-dialog [data-close]")
    assert name in page.text("#code-note")
    command = ["bash", "-ec", code] if language == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, code + done.stderr
    said = done.stdout
    if language == "curl":
        chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    page.click("#send")
    assert said.strip() == page.wait_for_answer() != ""


def test_text_is_never_html(page: "Page", tmp_path: Path) -> None:
    from selenium.common.exceptions import WebDriverException

    hostile = '<img src=x onerror="document.title=1"><b>bold</b><script>document.title=2</script>'
    (tmp_path / "<b>x<b>.png").write_bytes((EXAMPLES / "shapes.png").read_bytes())
    page.find("#files").send_keys(str(tmp_path / "<b>x<b>.png"))
    title = page.driver.title
    page.ask(hostile)
    page.wait_for_answer()
    assert hostile in page.text(".turn.user") and not page.all(".turn b, .turn script, .turn img[src=x]")
    assert page.driver.title == title
    with pytest.raises(WebDriverException, match="Trusted"):
        page.js("document.body.innerHTML = '<p>x</p>'")
    page.js("const one = document.createElement('style'); one.textContent = 'body { opacity: 0.5 }'; document.head.append(one)")
    assert page.js("return getComputedStyle(document.body).opacity") == "1"
    assert len(page.driver.get_log("browser")) == 2  # the browser tells of both


# ------------------------------------------------------------------------------------------------------------ pipeline


def test_a_stream_survives_a_kill_of_decode(page: "Page", server: Server) -> None:
    """The same text with the kill in its middle as without."""
    page.wait_for_pipeline()
    page.ask_for_long(1200)
    whole = page.wait_for_answer()
    page.click("#clear")
    pid, generation = page.actor("decode", "pid"), int(page.actor("decode", "gen"))
    page.js(
        """const kill = document.querySelector("[aria-label='Kill decode']");
        new MutationObserver((_, observer) => {
            const text = document.querySelector('.answer .text')?.textContent ?? '';
            if (text.length < 60) return;
            observer.disconnect();
            window.killedAt = text.length;
            kill.click();
        }).observe(document.querySelector('#turns'), { subtree: true, childList: true, characterData: true })"""
    )  # a driver's click would come late where tokens come fast
    page.ask("What can you do?")
    assert page.wait_for_answer() == whole
    assert 60 <= page.js("return window.killedAt") < len(whole)
    page.until(lambda: int(page.actor("decode", "gen")) == generation + 1, "the next generation is shown")
    assert page.actor("decode", "pid") == str(server.pid("decode")) != pid
    assert page.actor("decode", "restarts") == str(generation)
    page.until(lambda: "ended: SIGKILL" in page.text("#events"), "the death is told")
    assert re.search(r"longest pause [\d.]+ m?s", page.meta)


def test_restart(page: "Page") -> None:
    page.wait_for_pipeline()
    generation = int(page.actor("prefill", "gen"))
    page.click("[aria-label='Restart prefill']")
    page.until(lambda: int(page.actor("prefill", "gen")) == generation + 1, "the next generation is shown")
    page.until(lambda: page.find("[data-actor=prefill]").get_attribute("data-state") == "active", "it serves")


def test_pools_of_windows_and_states_are_shown(page: "Page") -> None:
    """As a run has them whose model needs them, here on two devices: only the pools of the server's reply are made up."""
    assert [key.text for key in page.all("#pool-legend .key") if key.is_displayed()] == ["kv", "embedding", "patch", "media"]
    assert not page.find("[data-actor=prefill] [data-color=pool-window]").is_displayed()
    page.js("""const json = Response.prototype.json;
        Response.prototype.json = async function () {
            const found = await json.call(this);
            const pool = (pages, used, evictable) => ({ pages, used, evictable, cached: evictable });
            if (found.pools) Object.assign(found.pools, { window: pool(30, 20, 5), 'window.1': pool(30, 10, 0), state: pool(6, 0, 2) });
            return found;
        }""")
    page.until(lambda: "30 / 60" in page.text("[data-actor=prefill] .bars"), "the pages of windows of both devices")
    keys = [key.text for key in page.all("#pool-legend .key") if key.is_displayed()]
    assert keys == ["kv", "window", "state", "embedding", "patch", "media"]
    meters = {meter.get_attribute("data-color"): meter for meter in page.all("[data-actor=prefill] .meter") if meter.is_displayed()}
    assert set(meters) == {"accent", "pool-kv", "pool-window", "pool-state"}
    assert meters["pool-window"].get_attribute("aria-valuenow") == "50"


def test_the_page_outlives_its_gateway(page: "Page") -> None:
    page.wait_for_pipeline()
    generation = int(page.actor("gateway", "gen"))
    page.ask_for_long(4000)
    page.until(lambda: len(page.answer) > 50, "text has come")
    page.click("[aria-label='Kill gateway']")
    page.until(lambda: int(page.actor("gateway", "gen")) == generation + 1, "another gateway answers")
    begun = page.answer
    page.until(lambda: page.text("#state") == "serving", "the page knows it")
    page.until(lambda: len(page.answer) > len(begun) + 200, "the answer goes on")
    assert page.answer.startswith(begun) and len(page.all(".answer")) == 1
    page.driver.get_log("browser")  # what failed in between, if anything


def test_a_gateway_that_hangs_is_told(page: "Page", server: Server) -> None:
    page.wait_for_pipeline()
    server.kill("gateway", signal.SIGSTOP)
    try:
        page.until(lambda: page.text("#state") == "unreachable", "the page tells")
        assert page.find("[data-actor=decode]").get_attribute("data-state") == "unknown"
    finally:
        server.kill("gateway", signal.SIGCONT)
    page.until(lambda: page.text("#state") == "serving", "the page knows that it goes on")
    page.driver.get_log("browser")


def test_the_waterfall_and_its_trace(page: "Page", tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.wait_for_pipeline()
    earlier = page.text("#detail-title")
    colour = tuple(secrets.token_bytes(3))  # a picture that no cache knows
    Image.new("RGB", (224, 224), colour).save(tmp_path / "new.png")
    page.find("#files").send_keys(str(tmp_path / "new.png"))
    page.ask(QUESTION)
    page.wait_for_answer()
    page.click(".meta .link")
    page.until(lambda: page.text("#detail-title") not in ("", earlier), "the request is shown")
    name = page.text("#detail-title")
    page.until(lambda: "done · first text after" in page.text("#detail-facts"), "it has ended")
    pieces = page.js("return [...document.querySelectorAll('#detail-rows tr')].map((row) => Number(row.children[1].textContent))")
    assert len(pieces) == 5 and min(pieces) >= 1  # fetch, decoding of media, encoding, prefill, decode
    colours = page.js(
        """const canvas = document.querySelector('#detail-canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Set();
        for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] === 255) found.add(pixels.slice(at, at + 3).join());
        return [...found]"""
    )
    lanes = page.js(
        """return ['media', 'encode', 'prefill', 'decode'].map((name) => {
            const [, ...hex] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim().match(/#(..)(..)(..)/);
            return hex.map((two) => parseInt(two, 16)).join();
        })"""
    )
    assert set(lanes) <= set(colours)
    page.click("#download")
    file = tmp_path / f"mmrt-{name}.json"
    page.until(file.exists, "the trace is downloaded")
    events = page.until(lambda: json.loads(file.read_text() or "{}"), "it is whole")["traceEvents"]
    assert {name, "preprocess", "encode", "prefill", "step"} <= {event["name"] for event in events}


# --------------------------------------------------------------------------------------------------- looks and access

CONTRAST = """
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
const light = (rgb) => {
  const [r, g, b] = rgb.map((value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const bad = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest('.hidden, .skip, button:disabled')) continue;
  let under = element;
  while (under.parentElement && parse(getComputedStyle(under).backgroundColor).a === 0) under = under.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(under).backgroundColor].map((text) => light(parse(text).rgb));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className}: ${walker.currentNode.data.slice(0, 40)}`);
}
return [...new Set(bad)];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page: "Page", scheme: str) -> None:
    page.open(scheme=scheme)
    page.wait_for_pipeline()
    page.click("#settings-open")
    page.ask("What can you do?")
    page.wait_for_answer()
    page.until(lambda: page.text("#detail-title"), "the request is shown")
    found = page.js(CONTRAST)
    assert found == []
    brightness = page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert brightness < 60 if scheme == "dark" else brightness > 200


def test_charts_follow_the_scheme(page: "Page") -> None:
    page.wait_for_pipeline()
    canvas = page.find("#rate-chart canvas")
    page.prefer("dark")
    page.until(lambda: page.find("#rate-chart canvas") != canvas, "the chart is drawn anew")


def test_360_pixels_wide(page: "Page", server: Server) -> None:
    page.open(width=360, height=740)
    fits = "return [document.documentElement.scrollWidth <= 360, document.querySelector('main').scrollWidth <= 360]"
    page.click("[data-example=picture]")
    page.until(lambda: page.all("#attachments .medium"), "the picture is attached")
    page.click("#settings-open")
    assert page.js(fits) == [True, True]
    page.click("#send")
    page.wait_for_answer()
    looks = "return performance.getEntriesByType('resource').filter(({ name }) => name.includes('/page/state')).length"
    before = page.js(looks)
    page.pause_ms(2500)
    assert page.js(looks) == before == 0, "nobody looks at the pipeline"
    page.click("nav [data-view=pipeline]")
    page.wait_for_pipeline()
    assert page.find("[aria-label='Kill decode']").is_displayed() and not page.find("#prompt").is_displayed()
    assert page.js(fits) == [True, True]
    page.click("nav [data-view=requests]")
    page.until(lambda: page.text("#detail-title"), "a request is shown")
    assert page.js(fits) == [True, True]
    small = page.js(
        """const isSmall = ({ width, height }) => Math.min(width, height) < 24;
        return [...document.querySelectorAll('button, input, select')]
            .filter((one) => one.checkVisibility() && isSmall(one.getBoundingClientRect()))
            .map((one) => one.outerHTML.slice(0, 60))"""
    )
    assert small == []


def test_the_keyboard_alone(page: "Page") -> None:
    from selenium.webdriver.common.keys import Keys as keys

    press = page.driver.switch_to.active_element.__class__.send_keys

    def active() -> Any:
        return page.driver.switch_to.active_element

    def focus_is_visible() -> bool:
        return bool(
            page.js(
                """const accent = getComputedStyle(document.querySelector('.primary')).backgroundColor;
                const around = document.activeElement.closest('form') ?? document.body;
                const hasOutline = getComputedStyle(document.activeElement).outlineStyle !== 'none';
                return hasOutline || getComputedStyle(around).borderColor === accent"""
            )
        )

    page.wait_for_pipeline()
    assert active().get_attribute("id") == "prompt"
    page.js("document.body.tabIndex = -1; document.body.focus()")  # from the top
    press(page.find("body"), keys.TAB)
    assert active().text == "Skip to the prompt" and active().is_displayed()
    press(active(), keys.ENTER)
    press(active(), keys.TAB)
    press(active(), keys.SHIFT + keys.TAB)
    page.find("#prompt").send_keys("What can you do?")
    assert focus_is_visible()
    active().send_keys(keys.ENTER)
    assert page.wait_for_answer()
    seen: list[str] = []
    page.js("document.querySelector('.skip').focus()")
    for _ in range(80):
        press(active(), keys.TAB)
        label = page.js(
            "return document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim().slice(0, 30)"
        )
        if active().tag_name == "body":
            break
        assert focus_is_visible(), label
        seen.append(label)
        if label == "Restart decode":
            generation = int(page.actor("decode", "gen"))
            press(active(), keys.ENTER)
    for wanted in (
        "Attach files",
        "Camera",
        "Record a sound",
        "Settings",
        "Kill decode",
        "Restart decode",
        "Download trace",
        "Copy as code",
    ):
        assert wanted in seen
    page.until(lambda: int(page.actor("decode", "gen")) == generation + 1, "decode is restarted")
    page.js("document.querySelector('#code-open').focus()")
    press(active(), keys.ENTER)
    assert page.find("#code-dialog").is_displayed()
    press(active(), keys.ESCAPE)
    assert not page.find("#code-dialog").is_displayed() and active().get_attribute("id") == "code-open"


def test_escape_stops_an_answer(page: "Page") -> None:
    from selenium.webdriver.common.keys import Keys as keys

    page.ask_for_long(4000)
    page.until(lambda: len(page.answer) > 50, "text has come")
    page.find("#prompt").send_keys(keys.ESCAPE)
    page.wait_for_answer()
    assert "stopped" in page.meta


def test_every_control_has_a_name(page: "Page") -> None:
    page.wait_for_pipeline()
    nameless = page.js(
        """const isNamed = (one) => one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.textContent.trim();
        return [...document.querySelectorAll('button, input, select, textarea, a, canvas[role], [role=meter]')]
            .filter((one) => !isNamed(one) && !one.labels?.length)
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    levels = page.js("return [...document.querySelectorAll('main h2, main h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 2 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


def test_the_layout_does_not_jump(page: "Page") -> None:
    script = """window.jumps = [];
        const nodes = (shift) => String(shift.sources.map(({ node }) => node?.outerHTML?.slice(0, 80)));
        const note = (list) => window.jumps.push(...list.getEntries().map((shift) => [shift.value, nodes(shift)]));
        new PerformanceObserver(note).observe({ type: 'layout-shift', buffered: true });"""
    page.js(script)
    page.wait_for_pipeline()
    page.pause_ms(3500)
    jumps = page.js("return window.jumps")
    assert sum(value for value, _ in jumps) < 0.05, jumps


def test_a_server_with_a_key(launch: Any, driver: Any) -> None:
    from .conftest import Page

    locked = launch(None, '[server]\napi_key = "s3cret"\n')
    page = Page(driver, locked.url)
    try:
        driver.get(f"{locked.url}/")
        page.until(lambda: page.find("#key-dialog").is_displayed(), "the page asks for the key")
        assert page.text("#state") == "needs a key"
        assert page.text("#key-problem") == "The server wants a key."
        page.find("#key").send_keys("wr0ng")
        page.click("#key-dialog .primary")
        page.until(lambda: page.text("#key-problem") == "The server does not accept this key.", "the page says so")
        page.find("#key").send_keys("s3cret")  # the wrong one is selected
        page.click("#key-dialog .primary")
        page.wait_for_pipeline()
        page.ask("What can you do?")
        assert page.wait_for_answer()
        assert driver.get_cookies() == [] and "s3cret" not in json.dumps(page.js("return {...localStorage}"))
        page.click("#code-open")
        assert "$MMRT_API_KEY" in page.text("#code") and "s3cret" not in page.text("#code")
        messages = [entry["message"] for entry in driver.get_log("browser")]
        assert messages and all("401 (Unauthorized)" in message for message in messages)
    finally:
        driver.get("about:blank")
        locked.down()
