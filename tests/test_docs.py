"""The documents: links lead somewhere, every page is in the site, and the site is built without a warning."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LAB = ROOT / "lab" / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *LAB.glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "demo_model/README.md")),
    ]
)
COPIED = {f"repository/{page.relative_to(ROOT)}" for page in [*LAB.glob("*.md"), ROOT / "CHANGELOG.md"]}
MADE = {"index.md", "reference/commands.md", "reference/endpoints.md", "reference/defaults.md"} | COPIED


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).strip().replace(" ", "-")
        anchors.add(name if not found[name] else f"{name}-{found[name]}")
        found[name] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors_of(file), f"{target}: there is no such heading"


def test_every_path_of_the_map_exists() -> None:
    """A path is one of the tree, or stands beside the first one of its line, in its folder or the one above."""
    section = (DOCS / "architecture.md").read_text().split("\n## Map\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"[a-z]\w*/|\| .*`", line)]
    assert len(lines) > 30
    for line in lines:
        first, *others = re.findall(r"\w[\w/]*(?:\.py|/)(?=[\s,.:;)`]|$)", line)
        place = ROOT / first
        assert place.exists(), line
        for other in others:
            assert any((base / other).exists() for base in (ROOT, place.parent, place.parent.parent)), f"{other}: {line}"


def test_pages_for_users_are_short() -> None:
    """README.md, CHANGELOG.md and docs/ together, without blocks of code and without the tables that are made from the code."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    texts = [re.sub(r"<!-- the table .*?<!-- its end -->", "", text_of(page), flags=re.DOTALL) for page in pages]
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= 35_000


def test_every_page_is_in_the_site() -> None:
    def names(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        assert isinstance(entry, dict | list)
        return [name for inner in (entry.values() if isinstance(entry, dict) else entry) for name in names(inner)]

    listed = names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | MADE


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    endpoints = (tmp_path / "reference" / "endpoints.html").read_text()
    assert "/v1/chat/completions" in endpoints and "guidance_scale" in endpoints
    assert "mmrt up" in (tmp_path / "reference" / "commands.html").read_text()
    assert (tmp_path / "repository" / "examples" / "shortest_first.py").is_file(), "what pages link to is copied"
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"?(https?:[^\" >]*)", page.read_text())
        assert [url for url in loaded if "rel=canonical" not in url] == [], f"{page.name} loads from elsewhere"
