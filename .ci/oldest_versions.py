"""Print pip constraints that pin every dependency of pyproject.toml to the oldest version that it allows."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    pinned = re.fullmatch(r"([\w.-]+)[>=]=([\d.]+)(?:,<[\d.]+)?", requirement)
    assert pinned, f"{requirement}: neither name==version nor name>=oldest,<bound"
    print(f"{pinned[1]}=={pinned[2]}")
