"""Pages of the site that are made when it is built: the front page of README.md, the references of commands, endpoints and defaults,
and copies of the files outside docs/ that pages link to. A hook of mkdocs (``mkdocs.yml``).
"""

import contextlib
import io
import json
import math
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mmrt.actors.gateway.openapi.document import make_document
from mmrt.actors.gateway.reading.validation import Limits
from mmrt.actors.host.media_rules import for_run
from mmrt.cli.main import COMMANDS, build_app, run
from mmrt.models.config import load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig, to_toml
from mmrt.runtime.config.sections import MediaSection
from mmrt.runtime.process.run import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
COPIES = "repository"  # the folder of the site that has files from outside docs/
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
os.environ["COLUMNS"] = "80"  # the width of the help, whatever the terminal


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {
        "index.md": (ROOT / "README.md").read_text(),
        "reference/commands.md": commands_page(),
        "reference/endpoints.md": endpoints_page(_document()),
        "reference/defaults.md": defaults_page(),
        "reference/openapi.json": json.dumps(_document(), indent=1),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for name in sorted(_copies(pages)):
        files.append(File.generated(config, f"{COPIES}/{name}", abs_src_path=str(ROOT / name)))
    return files


def _copies(pages: dict[str, str]) -> set[str]:
    """Return the files outside docs/ that these pages link to, and those that pages among them link to."""
    copied: set[str] = set()
    unread = list(pages.items())
    while unread:
        page, markdown = unread.pop()
        for _, copy in _links_outside(markdown, page):
            if copy and copy not in copied:
                copied.add(copy)
                if copy.endswith(".md"):
                    unread.append((f"{COPIES}/{copy}", (ROOT / copy).read_text()))
    return copied


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files outside docs/ to their copies, and those of README.md to the pages."""
    here = posixpath.dirname(page.file.src_uri)
    for target, copy in set(_links_outside(markdown, page.file.src_uri)):
        place = f"{COPIES}/{copy}" if copy else _of_readme(target)
        markdown = re.sub(rf"(?<=\]\(){re.escape(target)}(?=[)#])", posixpath.relpath(place, here or "."), markdown)
    return markdown


def _links_outside(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield the links that leave docs/, each with the path of the file from the root; "" for those of README.md into docs/."""
    origin = "" if page == "index.md" else posixpath.dirname(page.removeprefix(f"{COPIES}/"))
    base = "" if page == "index.md" or page.startswith(f"{COPIES}/") else "docs"
    for target in _LINK.findall(markdown):
        path = posixpath.normpath(posixpath.join(base, origin, target))
        if base and path.startswith("docs/"):
            continue
        if path.startswith("docs/"):
            yield target, ""
        elif (ROOT / path).is_file():
            yield target, path


def _of_readme(target: str) -> str:
    return target[target.index("docs/") + len("docs/") :]


# ---------------------------------------------------------------------------------------------------------------- commands


def commands_page() -> str:
    """Return the help of all commands."""
    program: Any = typer.main.get_command(build_app(COMMANDS))
    sections = [f"## mmrt {' '.join(words)}".rstrip() + f"\n\n```text\n{_help(words)}\n```" for words in _commands(program, [])]
    return "\n\n".join(["# Commands", "The help of the program, as `mmrt COMMAND --help` prints it.", *sections])


def _commands(command: Any, words: list[str]) -> Iterator[list[str]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(inner, [*words, name])


def _help(words: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        run([*words, "--help"])
    return output.getvalue().strip()


# --------------------------------------------------------------------------------------------------------------- endpoints


def _document() -> dict[str, Any]:
    """Return the description of a server with the demo model and the default configuration."""
    model = load_model_config(DEFAULT_MODEL)
    rules = for_run(model, MediaSection()).vision_rules
    limits = Limits(model_name="demo", family=model.family, kinds=model.media_kinds, max_context=model.max_context, vision_rules=rules)
    return make_document(limits, False)


def endpoints_page(document: dict[str, Any]) -> str:
    """Return tables of all routes and of the fields of their requests."""
    parts = [
        "# Routes and fields",
        "This page is made from the description that a server gives as `GET /openapi.json` ([OpenAPI](https://www.openapis.org/) 3.1); "
        "the readers that validate requests make that description. The limits are those of the demo model; "
        "[this file](openapi.json) has its description whole. [The endpoint](../api.md) says what the fields mean. "
        "A field that is not listed is refused; null means the same as a missing field.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += [f"## {method.upper()} {path}", f"{operation['summary']}. Errors: {', '.join(list(operation['responses'])[1:])}."]
            if "requestBody" in operation:
                for kind, body in operation["requestBody"]["content"].items():
                    shown = "```json\n" + json.dumps(body["example"], indent=2) + "\n```" if "example" in body else f"`{kind}`:"
                    parts += [shown, _fields_table(body["schema"])]
    return "\n\n".join(parts)


def _fields_table(schema: dict[str, Any]) -> str:
    variants = schema.get("anyOf", [schema])
    fields: dict[str, list[str]] = {}
    for variant in variants:
        for name, values in variant["properties"].items():
            words = _words(values) + (" (required)" if name in variant.get("required", ()) else "")
            if words not in fields.setdefault(name, []):
                fields[name].append(words)
    rows = [f"| `{name}` | {'; '.join(words)} |" for name, words in sorted(fields.items())]
    return "\n".join(["| field | values |", "|---|---|", *rows])


def _words(schema: dict[str, Any]) -> str:
    """Return a schema in a few words."""
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_words(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None)
    kinds = schema.get("type", "any value")
    words = "/".join(kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null")
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None and high is not None:
        words += f", {'above ' if 'exclusiveMinimum' in schema else ''}{_number(low)} to {_number(high)}"
    if "maxLength" in schema:
        words += f", up to {schema['maxLength']:,} characters"
    if "maxItems" in schema:
        words += f", up to {schema['maxItems']:,}"
    return words


def _number(value: float) -> str:
    if abs(value) >= 1 << 53:
        return f"{'−' if value < 0 else ''}2^{round(math.log2(abs(value)))}"
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def defaults_page() -> str:
    """Return the default configuration."""
    text = to_toml(RuntimeConfig())
    return (
        f"# Defaults\n\nThe [configuration](../configuration.md) without a file, as `mmrt config show` prints it.\n\n```toml\n{text}```"
    )
