"""Read pages: ``mmrt up DIR`` with a model that reads text in pictures, as GLM-OCR, in one terminal, this in another.

    python examples/read_pages.py page-1.png page-2.png > document.md

Each picture is a page. Its text is printed as it comes, page after page; the next page is asked for already, and is encoded while the
one before it is answered. With ``--together`` all pages are one question with one answer: later ones are encoded while earlier ones are
prefilled. ``pdftoppm -r 150 -png FILE page`` makes pictures of a PDF's pages. Exits with 1 if a page is refused.
"""

import argparse
import base64
import json
import mimetypes
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

_QUESTION = "Text Recognition:"  # as GLM-OCR was taught
_AT_ONCE = 2  # questions: one is answered, the next one's page encoded


def endpoint() -> str:
    """Of the run that is up."""
    done = subprocess.run([sys.executable, "-m", "mmrt", "status", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip() or "mmrt status failed")
    found: str = json.loads(done.stdout)["endpoint"]
    return found


def picture(page: Path) -> dict[str, Any]:
    """A page as a part of a message."""
    kind = mimetypes.guess_type(page.name)[0] or "application/octet-stream"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(page.read_bytes()).decode()}"}}


def read(url: str, pages: Sequence[Path], question: str, max_tokens: int) -> Iterator[str]:
    """The pieces of the pages' text as they come. Raises: OSError; ValueError for what the server refuses."""
    content = [*map(picture, pages), {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "temperature": 0, "max_tokens": max_tokens}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    name, begun_s, is_first = ", ".join(page.name for page in pages), time.monotonic(), True
    try:
        with urllib.request.urlopen(request) as lines:
            for chunk in (json.loads(line[6:]) for line in lines if line.startswith(b"data: {")):
                if "error" in chunk:
                    raise ValueError(f"{name}: {chunk['error']['message']}")
                for text in (choice["delta"].get("content") for choice in chunk["choices"]):
                    if text and is_first:
                        print(f"{name}: first text after {time.monotonic() - begun_s:.1f} s", file=sys.stderr)
                        is_first = False
                    yield text or ""
    except urllib.error.HTTPError as error:
        raise ValueError(f"{name}: {json.load(error)['error']['message']}") from error
    yield "\n\n"


def ahead(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces, which another thread reads from now on."""
    found = SimpleQueue[str | Exception | None]()

    def take() -> None:
        try:
            for piece in pieces:
                found.put(piece)
            found.put(None)
        except (OSError, ValueError) as error:
            found.put(error)

    threading.Thread(target=take, daemon=True).start()
    return _taken(found)


def _taken(found: SimpleQueue[str | Exception | None]) -> Iterator[str]:
    while (piece := found.get()) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the text of pages, which are pictures.")
    parser.add_argument("pages", type=Path, nargs="+", metavar="PICTURE")
    parser.add_argument("--together", action="store_true", help="one question about all pages")
    parser.add_argument("--question", default=_QUESTION, help="behind the page (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of an answer (%(default)s)")
    options = parser.parse_args()
    questions = [options.pages] if options.together else [[page] for page in options.pages]
    url = endpoint()
    answers = (ahead(read(url, pages, options.question, options.max_tokens)) for pages in questions)
    waiting = deque(islice(answers, _AT_ONCE))
    try:
        while waiting:
            for piece in waiting.popleft():
                print(piece, end="", flush=True)
            waiting.extend(islice(answers, 1))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
