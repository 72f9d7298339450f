"""``mmrt examples``: commands for the running server, ready to be copied, or piped into a shell."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..runtime.process.run import RunInfo, running
from .options import RunName, completed_from, run_path

_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


class Server(NamedTuple):
    """The running server, as commands name it. ``mmrt`` and ``python``: quoted for a shell."""

    url: str
    model: str
    has_key: bool
    policy: str
    mmrt: str
    python: str
    run_option: str = ""
    certificate: str = ""  # its file, with TLS

    def curl(self, path: str, body: str) -> str:
        """Return a request whose body is ``body``, as a shell's word."""
        key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if self.has_key else ""
        return f"curl -sSN -w '\\n' {shlex.quote(self.url + path)} -H 'Content-Type: application/json'{key} \\\n  -d {body}"

    def chat(self, content: str, **fields: Any) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        return self.curl("/v1/chat/completions", shlex.quote(json.dumps(body, ensure_ascii=False)))

    def command(self, words: str) -> str:
        """Return an mmrt command about this run."""
        return f"{self.mmrt} {words}{self.run_option}"


def register(app: typer.Typer) -> None:
    @app.command()
    def examples(
        topics: Annotated[
            list[str] | None,
            typer.Argument(metavar="TOPIC", help=f"Of {', '.join(TOPICS)}.", autocompletion=completed_from(list(TOPICS))),
        ] = None,
        run: RunName = None,
    ) -> None:
        """Print commands to try with the running server.

        They are a shell script: mmrt examples curl | sh runs one of them. Exits with 1 if no run is up.
        """
        for topic in topics or ():
            if topic not in TOPICS:
                raise typer.BadParameter(f"no topic {topic!r}; there are {', '.join(TOPICS)}", param_hint="TOPIC")
        print(script(_server(running(run_path(run)), run), topics or list(TOPICS)))


def script(server: Server, topics: Sequence[str]) -> str:
    """Return the commands of these topics as a shell script (pure)."""
    head = [f"# {server.model} at {server.url}/v1"]
    if server.has_key:
        head.append("# The server wants its key (server.api_key, or one of server.api_keys_file): export OPENAI_API_KEY=…")
    if server.certificate:
        head.append(f"# If the system does not trust its certificate: export SSL_CERT_FILE={shlex.quote(server.certificate)}")
    return "\n\n".join(["\n".join(head), *(TOPICS[topic](server) for topic in topics)])


def _server(info: RunInfo, run: str | None) -> Server:
    return Server(
        url=info.endpoint,
        model=info.model_name,
        has_key=info.has_api_key or info.config.server.needs_key,
        policy=info.config.scheduling.policy,
        mmrt=_this_program(),
        python=shlex.quote(sys.executable),
        certificate=info.config.server.tls_cert,
        run_option="" if run is None else f" --run {shlex.quote(run)}",
    )


def _this_program() -> str:
    """Return the words by which a shell would start this program."""
    program = Path(sys.argv[0])
    if program.name != "mmrt":
        return f"{shlex.quote(sys.executable)} -m {__package__.partition('.')[0]}"
    found = shutil.which("mmrt")
    is_on_path = found is not None and Path(found).resolve() == program.resolve()
    return "mmrt" if is_on_path else shlex.quote(str(program.absolute()))


def _curl(server: Server) -> str:
    return "# An answer while it is made, as server-sent events\n" + server.chat("Hello!", stream=True, max_tokens=64)


def _python(server: Server) -> str:
    key = 'os.environ["OPENAI_API_KEY"]' if server.has_key else '"none"'
    return f"""\
# OpenAI's client in Python (pip install openai)
{server.python} - <<'END'
{"import os" + chr(10) if server.has_key else ""}from openai import OpenAI

client = OpenAI(base_url="{server.url}/v1", api_key={key})
stream = client.chat.completions.create(
    model={json.dumps(server.model)}, messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=64, stream=True
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
END"""


def _media(server: Server) -> str:
    part = {"type": "image_url", "image_url": {"url": "@"}}
    content = [part, {"type": "text", "text": "What colour is the circle?"}]
    body = json.dumps({"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": 64})
    before, after = body.split("@")
    request = server.curl("/v1/chat/completions", "@-")
    return f"""\
# A picture, here one made on the spot. --video and --audio take clips and sounds.
picture=$(mktemp --suffix=.png)
{server.python} -c 'import sys
from PIL import Image, ImageDraw
image = Image.new("RGB", (224, 224), "white")
ImageDraw.Draw(image).ellipse((60, 60, 160, 160), fill="red")
image.save(sys.argv[1])' "$picture"
{server.command('ask "What colour is the circle?" --image "$picture"')}
# The same by curl: pictures, videos and sounds are data: URLs.
{{ printf %s {shlex.quote(before + "data:image/png;base64,")}; base64 -w 0 "$picture"; printf %s {shlex.quote(after)}; }} |
  {request}
rm "$picture\""""


def _schema(server: Server) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
    return "# An answer that follows a JSON schema\n" + server.chat("Name a colour.", response_format=form, max_tokens=64)


def _policy(server: Server) -> str:
    return f"""\
# Another scheduling policy while the server serves: the shortest prompt goes first.
policy=$(mktemp --suffix=.py)
cat > "$policy" <<'END'
from mmrt.runtime.controller.scheduling.unified import Unified


class ShortestFirst(Unified):
    def rank(self, request, facts):
        return (request.tokens_left + request.rows_left,)


policy = ShortestFirst()
END
{server.mmrt} policy check "$policy"
{server.command('policy set "$policy"')}
{server.command("policy show")}
{server.command(f"policy set {shlex.quote(server.policy)}")}
rm "$policy\""""


def _restart(server: Server) -> str:
    request = server.chat("What can you do?", stream=True, max_tokens=400, ignore_eos=True)
    return f"""\
# An answer goes on while the process that writes it is replaced. Its last line is "data: [DONE]".
answer=$(mktemp)
{request} > "$answer" &
{server.command("restart decode")}
wait
grep "^data: " "$answer" | tail -n 1
rm "$answer\""""


TOPICS: dict[str, Callable[[Server], str]] = {
    "curl": _curl,
    "python": _python,
    "media": _media,
    "schema": _schema,
    "policy": _policy,
    "restart": _restart,
}
