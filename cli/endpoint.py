"""The endpoint that ``mmrt ask``, ``chat`` and ``examples`` are about: the running server's, or another OpenAI-compatible one."""

import base64
import http.client
import json
import mimetypes
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from ..runtime.environment import read_environment
from ..runtime.errors import RunError, UserError
from ..runtime.process.run import running
from ..runtime.supervisor.ask_key import server_key
from .options import run_path

Url = Annotated[str | None, typer.Option(metavar="URL", help="Endpoint; default: the running server's.")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Default: the running server's server.api_key, else $OPENAI_API_KEY.")]
ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first that the server lists.")]

_Found = TypeVar("_Found")
_TIMEOUT_S = 600.0
_AUDIO_FORMATS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".opus": "opus", ".m4a": "m4a"}


def find_endpoint(url: str | None, api_key: str | None, run: str | None) -> "Endpoint":
    """Return the endpoint with its key: as given, or the running server's.

    Raises: UserError for a URL that is none; RunError if no run is up.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url {url!r} is not an http:// or https:// address")
        return Endpoint(url.rstrip("/").removesuffix("/v1"), api_key or read_environment().api_key)
    path = run_path(run)
    info = running(path, ", or name a server with --url")
    key = api_key or server_key(path, info) or read_environment().api_key
    return Endpoint(info.endpoint, key, info.config.server.tls_cert)


def media_part(kind: str, file: str) -> dict[str, Any]:
    """Return a content part with the file's bytes in it. Raises UserError for a file that cannot be read."""
    path = Path(file)
    if file.startswith(("http://", "https://")):
        option = kind.removesuffix("_url").removeprefix("input_")
        raise UserError(
            f"{file}: URLs are not supported; download it first (curl -LO), or pipe it: curl -sL URL | mmrt ask --{option} - …"
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


class Spent(NamedTuple):
    """What an answer took: seconds until its first text, and from there to its end; tokens, None where the server does not say."""

    first_s: float
    rest_s: float
    prompt_tokens: int | None
    answer_tokens: int | None


class Endpoint:
    """An OpenAI-compatible endpoint, spoken to with the standard library alone. With a file of certificates it must have one of them,
    whatever its name; else one that the system trusts."""

    def __init__(self, url: str, api_key: str, certificate: str = "") -> None:
        """Raises: RunError if the file has no certificate."""
        self.url = url
        self.finish_reason = ""  # of the last stream
        self.spent: Spent | None = None  # likewise, if it came to its end
        self._fields: frozenset[str] | None = None  # not asked for yet
        self._headers = {"Content-Type": "application/json"}
        self._tls = _trusting(certificate) if url.startswith("https:") else None
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Return the name of the first model that it lists. Raises RunError."""
        with self._open("/v1/models", None) as response:
            try:
                models = json.load(response)["data"]
                name = str(models[0]["id"]) if models else ""
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                raise RunError(f"{self.url}/v1/models is no list of models: {type(error).__name__}: {error}") from None
        if not name:
            raise RunError(f"{self.url} serves no model")
        return name

    def context_of(self, model: str) -> int | None:
        """Return how many tokens the context of a model has; None if the server does not say."""
        found = self._look(
            "/v1/models", lambda listed: [entry.get("max_model_len") for entry in listed["data"] if entry["id"] == model]
        )
        return next(iter(found or ()), None)

    def chat_fields(self) -> frozenset[str]:
        """Return the fields that a request for a chat may have; none if the server does not say."""
        if self._fields is None:
            self._fields = frozenset(self._look("/openapi.json", _fields_of_chats) or ())
        return self._fields

    def _look(self, path: str, find: Callable[[Any], _Found]) -> _Found | None:
        """Return something of an answer; None if it is not there."""
        try:
            with self._open(path, None) as response:
                return find(json.load(response))
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
            return None

    def stream(self, body: dict[str, Any], think: Callable[[str], object]) -> Generator[str, None, None]:
        """Yield the answer's text as it comes, and call ``think`` with the model's thoughts before it.

        Raises RunError for an error frame, and for a stream that just ends or is none."""
        self.finish_reason, self.spent = "", None
        try:
            yield from self._events(body, think)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"the connection broke before the answer was complete: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{self.url} does not speak OpenAI's protocol: {type(error).__name__}: {error}") from None

    def _events(self, body: dict[str, Any], think: Callable[[str], object]) -> Iterator[str]:
        began_s, first_s = time.monotonic(), None
        usage: dict[str, Any] = {}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    now_s = time.monotonic()
                    first_s = now_s if first_s is None else first_s
                    tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
                    self.spent = Spent(first_s - began_s, now_s - first_s, *tokens)
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RunError(_reason(event))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if thoughts := choice["delta"].get("reasoning_content"):
                        first_s = time.monotonic() if first_s is None else first_s
                        think(thoughts)
                    if text := choice["delta"].get("content"):
                        first_s = time.monotonic() if first_s is None else first_s
                        yield text
        raise RunError("the server closed the stream before the answer was complete")

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls))
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            response: http.client.HTTPResponse = opener.open(request, timeout=_TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            with error:
                raise RunError(f"{error.code}: {_reason(error.read())}") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise RunError(f"cannot reach {self.url}: {getattr(error, 'reason', error)}") from None


def _fields_of_chats(description: Any) -> list[str]:
    """Return the fields of a chat's body in an OpenAPI description."""
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in body:
        at = description
        for name in body["$ref"].removeprefix("#/").split("/"):
            at = at[name]
        body = at
    return list(body["properties"])


def _trusting(certificate: str) -> ssl.SSLContext:
    """Return a client's context that trusts the certificates of a file alone; "": those of the system, or of $SSL_CERT_FILE."""
    try:
        context = ssl.create_default_context(cafile=certificate or None)
    except OSError as error:
        raise RunError(f"server.tls_cert = {certificate!r} cannot be used: {error.strerror or error}") from None
    if certificate:
        context.check_hostname = False  # it is asked by its address, which few certificates name
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return context


def _reason(answer: bytes | dict[str, Any]) -> str:
    """Return the message of an OpenAI error object, or the text found in its place."""
    try:
        data = json.loads(answer) if isinstance(answer, bytes) else answer
        return str(data["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500] if isinstance(answer, bytes) else str(answer)
