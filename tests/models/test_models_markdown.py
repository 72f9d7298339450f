"""docs/models.md says what the registered families are."""

from pathlib import Path

import pytest

import mmrt
from mmrt.models.families.registry import FAMILIES, family_named

from .models_markdown import BEGIN, END, NOT_PUBLISHED, table


def test_the_page_has_the_table_of_the_registry() -> None:
    page = (Path(mmrt.__file__).parent / "docs/models.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0] == table(), "python -m mmrt.tests.models.models_markdown docs/models.md"


NOT_KNOWN = ("null", "minicpmv4_7")  # of the latter transformers says no size


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_KNOWN])
def test_every_family_has_published_sizes(family: str) -> None:
    sizes = family_named(family).recipes().keys()
    assert "tiny" in sizes and sizes - {*NOT_PUBLISHED}
