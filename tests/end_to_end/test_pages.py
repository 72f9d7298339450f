"""Pages of text, as a model for OCR gets them: several of one request, and the example that reads them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

import mmrt
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_tools import ask, plans, trace_of

EXAMPLE = Path(mmrt.__file__).parent / "examples" / "read_pages.py"
QUESTION = "Text Recognition:"
SIZE = 588, 420  # 42 x 30 patches, 315 tokens


@pytest.fixture(scope="module")
def server(launch: Callable[..., Server]) -> Iterator[Server]:
    yield launch("glm_ocr", "[scheduling]\nencode_budget_tokens = 1024\n")  # each page is a plan of its own


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    for number in range(3):
        Image.fromarray(picture(number, *SIZE)).save(folder / f"page-{number}.png")
    return sorted(folder.iterdir())


def read(server: Server, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, str(EXAMPLE), "--max-tokens", "12", *arguments]
    return subprocess.run(command, env=server.environment, capture_output=True, timeout=120)


def answer(server: Server, *pages: int) -> str:
    return server.chat([*(image_part(picture(page, *SIZE)) for page in pages), text(QUESTION)], max_tokens=12)[0]


def test_a_page_is_encoded_while_the_one_before_it_is_prefilled(server: Server) -> None:
    for _ in range(5):  # on a loaded machine prefill may have no core until all is encoded
        request = ask(server, [*(image_part(picture(seed, *SIZE)) for seed in range(4)), text(QUESTION)], max_tokens=1)
        server.wait_until_empty()
        events = trace_of(server)[1]
        encoded, prefilled = (sorted(plans(events, name, request)) for name in ("encode", "prefill"))
        assert len(encoded) == 4
        if prefilled[0][0] < encoded[1][1]:
            break
    assert prefilled[0][0] < encoded[1][1], "the first page is prefilled before the second one is encoded"
    assert prefilled[-1][0] > encoded[-1][1], "the last one when it is"


def test_the_example_prints_page_after_page(server: Server, pages: list[Path]) -> None:
    done = read(server, *map(str, pages))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "".join(f"{answer(server, page)}\n\n" for page in range(3))
    assert [line.partition(":")[0] for line in sorted(done.stderr.decode().splitlines())] == [page.name for page in pages]


def test_the_example_asks_about_all_pages_together(server: Server, pages: list[Path]) -> None:
    done = read(server, "--together", *map(str, pages))
    assert done.stdout.decode() == f"{answer(server, 0, 1, 2)}\n\n" and b"page-0.png, page-1.png, page-2.png: first text" in done.stderr


def test_the_example_names_the_page_that_is_refused(server: Server, pages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(pages[0].read_bytes()[:100])
    done = read(server, str(pages[0]), str(tmp_path / "broken.png"))
    assert done.returncode == 1 and done.stderr.decode().splitlines()[-1].startswith("broken.png: ")
