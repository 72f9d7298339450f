"""Names of models on a hub, as people type them: ``ORG/REPO[:TAG][@REVISION]``, with or without the hub's address (pure)."""

import re
from typing import NamedTuple

_WORD = r"[A-Za-z0-9_](?:[\w.-]*[\w])?"
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_NAME = re.compile(rf"({_WORD}/{_WORD})(?::([\w.-]+))?(?:@([\w.-]+(?:/[\w.-]+)*))?", re.ASCII)
_PAGE = re.compile(rf"({_WORD}/{_WORD})/(tree|blob|resolve)/([\w.-]+)(?:/([\w./-]+))?", re.ASCII)
_LATEST = "latest"  # Ollama's tag for none
_MAX_LENGTH = 96  # of ORG/REPO, the hub's limit


class HubName(NamedTuple):
    """``tag``: a quantization, or a file, of a repository of GGUF files. Both it and ``revision`` may be empty."""

    repo: str
    tag: str = ""
    revision: str = ""

    @property
    def served(self) -> str:
        """What clients call the model."""
        return f"{self.repo}:{self.tag}" if self.tag else self.repo

    def __str__(self) -> str:
        return f"{self.served}@{self.revision}" if self.revision else self.served


def parse_name(text: str) -> HubName | None:
    """Return the name that a text is; None for what can be a path alone."""
    address = _ADDRESS.match(text)
    rest = text[address.end() :].partition("?")[0].rstrip("/") if address else text
    if address and (page := _PAGE.fullmatch(rest)):
        found = HubName(page[1], (page[4] or "").rpartition("/")[2], page[3])
    elif name := _NAME.fullmatch(rest):
        found = HubName(name[1], "" if name[2] == _LATEST else name[2] or "", name[3] or "")
    else:
        return None
    is_odd = len(found.repo) > _MAX_LENGTH or "--" in found.repo or ".." in found.repo or ".." in found.revision
    return None if is_odd else found
