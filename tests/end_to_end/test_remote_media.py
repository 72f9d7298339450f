"""A picture by URL gives the same answer as in base64, through a whole run, also if the fetch process is killed meanwhile."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_bad_input import GOOD_PNG, data_of
from mmrt.tests.end_to_end.test_media import as_url, text, video

pytestmark = pytest.mark.slow  # what may be fetched, and the process, are tested in tests/actors/gateway/fetch

FILM = data_of(video(6, 64, 64, 2)[0])


class Pictures(BaseHTTPRequestHandler):
    """Serves a picture and a film; ``/slow`` sends half until ``go_on``."""

    opened, go_on = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        data = FILM if self.path == "/film" else GOOD_PNG
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:50])
        if self.path == "/slow":
            self.wfile.flush()
            self.opened.set()
            self.go_on.wait(60)
        self.wfile.write(data[50:])

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Host(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed process leaves a connection, which is no error here."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Host(("127.0.0.1", 0), Pictures) as host:
        thread = threading.Thread(target=host.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{host.server_address[1]}"
        host.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def fetching(launch: Callable[..., Server], url: str) -> Server:
    port = url.rpartition(":")[2]
    rules = f'allowed_hosts = ["127.0.0.1"]\nschemes = ["http"]\nports = [{port}]\nallowed_networks = ["127.0.0.1/32"]\n'
    return launch("qwen2_5_omni", f"[media.fetch]\n{rules}")


def ask(server: Server, url: str, kind: str = "image_url") -> list[int]:
    return server.chat([{"type": kind, kind: {"url": url}}, text("What is it?")])[1]


def fetch_processes(server: Server) -> list[int]:
    """The pids of the gateway's children that fetch."""
    gateway = next(actor["pid"] for actor in server.status()["actors"] if actor["name"] == "gateway")
    children = [int(pid) for task in Path(f"/proc/{gateway}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in children if b"gateway.fetch.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_media_by_url_and_in_base64(fetching: Server, url: str) -> None:
    assert ask(fetching, f"{url}/a.png") == ask(fetching, as_url("image/png", GOOD_PNG))
    assert ask(fetching, f"{url}/film", "video_url") == ask(fetching, as_url("video/mp4", FILM), "video_url")
    fetching.wait_until_empty()


def test_a_fetch_process_killed_in_the_middle(fetching: Server, url: str) -> None:
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(fetching, f"{url}/slow")))
    asking.start()
    assert Pictures.opened.wait(60)
    (first,) = fetch_processes(fetching)
    os.kill(first, signal.SIGKILL)
    Pictures.go_on.set()
    assert ask(fetching, as_url("image/png", GOOD_PNG)), "others are served"
    asking.join()
    assert answers == [ask(fetching, as_url("image/png", GOOD_PNG))]
    assert fetch_processes(fetching) != [first]


def test_what_may_not_be_fetched(fetching: Server, url: str) -> None:
    with socket.socket() as inside:
        inside.bind(("127.0.0.2", int(url.rpartition(":")[2])))
        inside.listen()
        inside.setblocking(False)
        for bad in (url.replace("127.0.0.1", "127.0.0.2"), url.replace("http:", "file:"), url.replace("127.0.0.1", "2130706433")):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(fetching, bad)
            assert caught.value.param == "messages[0].content[0].image_url.url"
        with pytest.raises(BlockingIOError):
            inside.accept()


def test_the_process_ends_with_its_gateway(fetching: Server, url: str) -> None:
    ask(fetching, f"{url}/a.png")
    (pid,) = fetch_processes(fetching)
    fetching.down()
    assert not Path(f"/proc/{pid}").exists()
