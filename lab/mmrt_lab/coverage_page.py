"""The tables of lab/docs/coverage.md, made from coverage.toml beside it: ``python -m mmrt_lab.coverage_page`` writes them there."""

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs"
PAGE = FOLDER / "coverage.md"
BEGIN, END = "<!-- the tables of mechanisms -->\n", "<!-- their end -->\n"
SECTIONS = {
    "FlashCodec: decoding": ("FC",),
    "UnifiedServe: stages on shared memory": ("US",),
    "TriInfer: hybrid disaggregation": ("TI",),
    "RServe: overlap within a request": ("RS",),
    "ModServe: stages at scale": ("MS",),
    "E/P/D/G, weights, classes, guidance, KV": ("VL", "CW", "PC", "CF", "KQ", "KT", "SO"),
}
STATES = ("live", "part", "simulated", "missing", "not applicable")


def mechanisms() -> dict[str, dict[str, Any]]:
    """Return id → mechanism, module, test, state, remark, command, as coverage.toml has them."""
    return tomllib.loads((FOLDER / "coverage.toml").read_text())


def tables() -> str:
    """Return how many mechanisms are in each state, then a table for each text."""
    rows = mechanisms()
    count = {state: sum(row["state"] == state for row in rows.values()) for state in STATES}
    text = f"Of {len(rows)} mechanisms " + ", ".join(f"{number} are {state}" for state, number in count.items()) + ".\n"
    for title, prefixes in SECTIONS.items():
        text += f"\n## {title}\n\n| id | mechanism | module | test | state | shown by |\n|---|---|---|---|---|---|\n"
        text += "".join(_row(name, row) for name, row in rows.items() if name[:2] in prefixes)
    return text


def _row(name: str, row: dict[str, Any]) -> str:
    paths = [", ".join(row.get(key, ())) or "–" for key in ("module", "test")]
    state = f"{row['state']}: {row['remark']}" if "remark" in row else row["state"]
    command = f"`{row['command']}`" if "command" in row else "–"
    return f"| {' | '.join((name, row['mechanism'], *paths, state, command))} |\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}")
