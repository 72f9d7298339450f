"""``mmrt ask``: send one question to a running endpoint and stream the answer to the terminal."""

import base64
import http.client
import json
import mimetypes
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from ..runtime.process.run import read_run_info
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, run_path

_TIMEOUT_S = 600.0
_AUDIO_FORMATS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".opus": "opus", ".m4a": "m4a"}


def register(app: typer.Typer) -> None:
    @app.command()
    def ask(
        question: Annotated[
            str | None, typer.Argument(metavar="QUESTION", help='What to ask; "-", or none in a pipe, reads standard input.')
        ] = None,
        image: Annotated[list[str] | None, typer.Option(metavar="FILE", help='An image file, or "-"; may be repeated.')] = None,
        video: Annotated[list[str] | None, typer.Option(metavar="FILE", help='A video file, or "-"; may be repeated.')] = None,
        audio: Annotated[list[str] | None, typer.Option(metavar="FILE", help='An audio file, or "-"; may be repeated.')] = None,
        url: Annotated[str | None, typer.Option(metavar="URL", help="Endpoint; default: the running server's.")] = None,
        api_key: Annotated[
            str | None, typer.Option(metavar="KEY", help="Default: the running server's; with --url $OPENAI_API_KEY.")
        ] = None,
        model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first that the server lists.")] = None,
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.")] = None,
        max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Length of the answer at most.")] = None,
        temperature: Annotated[float | None, typer.Option(metavar="T", help="0 is greedy.")] = None,
        seed: Annotated[int | None, typer.Option(metavar="N", help="Of the random draws.")] = None,
        guidance_scale: Annotated[float | None, typer.Option(metavar="S", help="Classifier-free guidance; 1 is off.")] = None,
        negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to steer away from, with guidance.")] = None,
        run: RunName = None,
    ) -> None:
        """Ask the model about text, images, videos and sounds.

        The answer is streamed. The demo model, which is served where no other is named, knows simple shapes, numbers, motion and beeps,
        nothing else.
        """
        files = {"image_url": image or [], "video_url": video or [], "input_audio": audio or []}
        question = _question(question, [file for some in files.values() for file in some].count("-"))
        media = [_part(kind, file) for kind, some in files.items() for file in some]
        server = _Server(*_find(url, api_key, run))
        content: Any = [*media, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}] if system is not None else []
        body: dict[str, Any] = {
            "model": model or server.first_model(),
            "messages": [*messages, {"role": "user", "content": content if media else content[0]["text"]}],
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "guidance_scale": guidance_scale,
            "negative_prompt": negative_prompt,
        }
        text = None
        try:
            for text in server.stream({key: value for key, value in body.items() if value is not None}):
                print(text, end="", flush=True)
        finally:
            if text is not None:  # what broke off ends its line, too
                print(flush=True)
        if server.finish_reason == "length":
            print("(cut off at the limit of its length: --max-tokens, or the model's context)", file=sys.stderr)


def _find(url: str | None, api_key: str | None, run: str | None) -> tuple[str, str]:
    """Return endpoint and key: as given, or those of the running server."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url {url!r} is not an http:// or https:// address")
        return url.rstrip("/").removesuffix("/v1"), api_key or read_environment().api_key
    path = run_path(run)
    try:
        if not RunDirectory.is_alive(path):
            raise MissingError("nobody is there")
        with RunDirectory.attach(path) as directory:
            info = read_run_info(directory)
    except MissingError:
        raise RunError(f"no run is up in {path}: start one with `mmrt up`, or name a server with --url") from None
    return info.endpoint, api_key or info.config.server.api_key


def _question(given: str | None, num_piped_media: int) -> str:
    """The question as given, or from standard input. Raises BadParameter if that is asked for twice, is a terminal, or is empty."""
    is_piped = given == "-" or (given is None and not num_piped_media)
    if num_piped_media + (given == "-") > 1:
        raise typer.BadParameter("standard input (-) can be read once")
    if not is_piped and given is None:
        raise typer.BadParameter("it is missing, and standard input is for the medium", param_hint="QUESTION")
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter('it is missing: mmrt ask "Hello", or echo "Hello" | mmrt ask', param_hint="QUESTION")
    text = sys.stdin.buffer.read().decode(errors="replace") if is_piped else given or ""
    if is_piped and not text.strip():
        raise typer.BadParameter("standard input holds no question", param_hint="QUESTION")
    return text


def _part(kind: str, file: str) -> dict[str, Any]:
    """A content part with the file's bytes in it. Raises UserError for a file that cannot be read."""
    path = Path(file)
    if file.startswith(("http://", "https://")):
        option = f"--{kind.removesuffix('_url').removeprefix('input_')}"
        raise UserError(
            f"{option} {file}: URLs are not supported; download it first (curl -LO), or pipe it: curl -sL URL | mmrt ask {option} - …"
        )
    try:
        data = base64.b64encode(sys.stdin.buffer.read() if file == "-" else path.read_bytes()).decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not data:
        raise UserError(f"{'standard input' if file == '-' else path} is empty")
    if kind == "input_audio":
        return {"type": kind, kind: {"data": data, "format": _AUDIO_FORMATS.get(path.suffix.lower(), "wav")}}
    guessed = mimetypes.guess_type(path.name)[0] or ""  # by the name alone, to which .ts is a translation
    mime = guessed if guessed.startswith(("image/", "video/")) else f"{kind.removesuffix('_url')}/*"
    return {"type": kind, kind: {"url": f"data:{mime};base64,{data}"}}


class _Server:
    """An OpenAI-compatible endpoint, spoken to with the standard library alone."""

    def __init__(self, url: str, api_key: str) -> None:
        self.finish_reason = ""  # of the last stream
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        with self._open("/v1/models", None) as response:
            try:
                models = json.load(response)["data"]
                name = str(models[0]["id"]) if models else ""
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                raise RunError(f"{self._url}/v1/models is no list of models: {type(error).__name__}: {error}") from None
        if not name:
            raise RunError(f"{self._url} serves no model")
        return name

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it comes. Raises RunError for an error frame, and for a stream that just ends or is none."""
        try:
            yield from self._events(body)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"the connection broke before the answer was complete: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{self._url} does not speak OpenAI's protocol: {type(error).__name__}: {error}") from None

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RunError(_reason(event))
                for choice in event.get("choices", ()):
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if text := choice["delta"].get("content"):
                        yield text
        raise RunError("the server closed the stream before the answer was complete")

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            response: http.client.HTTPResponse = opener.open(request, timeout=_TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            with error:
                raise RunError(f"{error.code}: {_reason(error.read())}") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise RunError(f"cannot reach {self._url}: {getattr(error, 'reason', error)}") from None


def _reason(answer: bytes | dict[str, Any]) -> str:
    """The message of an OpenAI error object, or the text found in its place."""
    try:
        data = json.loads(answer) if isinstance(answer, bytes) else answer
        return str(data["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500] if isinstance(answer, bytes) else str(answer)
