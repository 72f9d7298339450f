"""Words of other programs for what mmrt does: the command that each leads to, and what to do instead where there is none (pure).

``main`` asks for them before it looks for a command, so that ``mmrt serve`` and ``mmrt stop`` do what they mean.
"""

import difflib
from collections.abc import Iterable

ALIASES = {
    "start": ("up",),
    "launch": ("up",),
    "stop": ("down",),
    "shutdown": ("down",),
    "ps": ("status",),
    "download": ("pull",),
    "install": ("pull",),
    "list": ("model", "list"),
    "ls": ("model", "list"),
    "models": ("model", "list"),
    "rm": ("model", "rm"),
    "remove": ("model", "rm"),
    "delete": ("model", "rm"),
    "show": ("model", "show"),
    "generate": ("ask",),
    "complete": ("ask",),
    "log": ("logs",),
    "check": ("doctor",),
    "benchmark": ("bench",),
}
"""The command's words, which take the alias's place."""

ADVICE = {
    "autoscale": "mmrt up --autoscale follows the load; mmrt advise says what a run should have, mmrt scale gives it that",
    "push": "mmrt publishes no models",
    "create": "mmrt makes no models of others: mmrt model make has random weights, and mmrt pull ORG/REPO fetches one",
    "kill": "mmrt down --drain 0 ends the run at once; mmrt restart ACTOR replaces one process",
}
"""Words without a command: what to do instead."""


def expand(arguments: list[str]) -> list[str]:
    """Return a command line with an alias replaced by the command that it means. ``help COMMAND`` is ``COMMAND --help``."""
    words = [*arguments[1:], "--help"] if arguments[:1] == ["help"] else list(arguments)
    if words[:1] == ["serve"] and not _is_of_several(words[1:]):
        words[0] = "up"
    return [*ALIASES[words[0]], *words[1:]] if words and words[0] in ALIASES else words


def _is_of_several(arguments: list[str]) -> bool:
    """Return whether ``mmrt serve`` is given a file of models, or asked for help; else it is what other programs call ``mmrt up``."""
    values_of_options = {after for before, after in zip(arguments, arguments[1:], strict=False) if before in ("--config", "-c")}
    return any(word.endswith(".toml") and word not in values_of_options or word in ("--help", "-h") for word in arguments)


def aliases_of(*command: str) -> list[str]:
    """Return the aliases of a command."""
    return [alias for alias, words in ALIASES.items() if words == command]


def refusal(word: str, commands: Iterable[str]) -> str:
    """Return what to say of a word that is no command."""
    if word.lower() in ADVICE:
        return f"mmrt {word}: {ADVICE[word.lower()]}"
    near = difflib.get_close_matches(word.lower(), [*commands, *ALIASES, *ADVICE], n=2)
    meant = " or ".join(f"mmrt {name}" + (f" (mmrt {' '.join(ALIASES[name])})" if name in ALIASES else "") for name in near)
    return f"No such command {word[:40]!r}: {f'did you mean {meant}? ' if near else ''}mmrt --help lists all"
