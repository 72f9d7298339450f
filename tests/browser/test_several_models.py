"""The page of a front of several models: each is chosen, loaded by its first question, and its own run is shown."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.tests.end_to_end.test_several_models import Several

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.slow


@pytest.fixture
def several(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Iterator[Several]:
    """A front of the demo model and a text model."""
    front = Several(tmp_path, {"demo": DEFAULT_MODEL, "Org/text": checkpoints("qwen3")}, "6 GiB")
    front.begin()
    yield front
    front.mmrt("down", "--drain", "0")


def test_models_are_chosen_and_loaded_by_their_first_question(driver: Any, several: Several) -> None:
    from .conftest import Page

    page: Page = Page(driver, several.url)
    page.forget()
    page.open()
    assert [option.text for option in page.all("#models option")] == ["demo", "Org/text"]
    page.until(lambda: page.text("#state").startswith("not loaded: "), "the page says that nobody has asked")
    page.ask("What can you do?")
    assert page.wait_for_answer().startswith("I ")
    page.until(lambda: page.text("#state") == "serving", "the run of the first is shown")
    page.wait_for_pipeline()
    pid = page.actor("decode", "pid")

    page.choose("#models", "Org/text")
    page.until(lambda: page.text("#state").startswith("not loaded: "), "the other one is not loaded")
    assert driver.title == "Org/text – mmrt" and not page.all("[data-needs='image']:not([hidden])")
    page.ask("And you?")
    page.until(lambda: len(page.all(".answer")) == 2, "the second answer begins")
    assert page.wait_for_answer() and not page.all("#turns .error")
    page.until(lambda: page.text("#state") == "serving" and page.actor("decode", "pid") != pid, "the run of the second is shown")
    killed = page.actor("decode", "pid")
    page.click("[aria-label='Kill decode']")
    page.until(lambda: page.actor("decode", "pid").isdigit() and page.actor("decode", "pid") != killed, "another decode of the second")
    assert several.model("demo").state == several.model("Org/text").state == "ready"
    page.open()
    assert page.find("#models").get_attribute("value") == "Org/text", "the choice outlives a reload"
    assert not driver.get_log("browser")
