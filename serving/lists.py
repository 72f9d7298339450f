"""The models of a front as each API lists them (pure). They tell every model of the file, whether it is loaded or not."""

import time
from collections.abc import Iterable
from typing import Any

from ..actors.gateway.apis.anthropic import answers as anthropic_answer
from ..actors.gateway.apis.ollama import answers as ollama_answer
from ..actors.gateway.apis.openai.answers import rfc3339
from ..actors.gateway.apis.openai.models import model_entry
from .card import Card
from .fleet import Member
from .residency import State

_STATUS = {State.ABSENT: "unloaded", State.LOADING: "loading", State.READY: "loaded", State.DRAINING: "unloading"}


def openai_entry(member: Member, created: int) -> dict[str, Any]:
    """Return the model as ``GET /v1/models`` lists it: as its run does, and ``status``, as llama.cpp says it. Of a model whose
    checkpoint nobody has looked at yet less is known."""
    found = {"value": _STATUS[member.residence.state], **({"failed": True, "message": member.problem} if member.problem else {})}
    known: dict[str, Any] = {"id": member.name, "object": "model", "created": created, "owned_by": "mmrt"}
    return {**(known if member.card is None else model_entry(member.card.limits(member.name), created)), "status": found}


def anthropic_page(members: Iterable[Member], created: int) -> dict[str, Any]:
    """Return the page of ``GET /v1/models`` for Anthropic's client."""
    data = [anthropic_entry(member, created) for member in members]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def anthropic_entry(member: Member, created: int) -> dict[str, Any]:
    return anthropic_answer.model_info((member.card or Card()).limits(member.name), created)


def ollama_entry(member: Member, created: int) -> dict[str, Any]:
    """Return the model as ``GET /api/tags`` lists it."""
    return ollama_answer.model_entry((member.card or Card()).limits(member.name), created)


def ollama_running(member: Member, created: int, idle_s: float, now_s: float) -> dict[str, Any]:
    """Return a loaded model as ``GET /api/ps`` lists it. ``idle_s``: after which runs end, 0: never; ``now_s``: of the clock of its
    residence."""
    entry = ollama_answer.running_model((member.card or Card()).limits(member.name), created)
    residence = member.residence
    idle_s = idle_s if residence.keep_s is None else residence.keep_s
    if not residence.pinned and 0 < idle_s < 1e9:
        left_s = idle_s if residence.num_running else residence.last_used_s + idle_s - now_s
        entry["expires_at"] = rfc3339(int(time.time() + left_s))
    return {**entry, "size_vram": 0}


def ollama_details(member: Member, created: int) -> dict[str, Any]:
    """Return the model as ``POST /api/show`` describes it."""
    return ollama_answer.model_details((member.card or Card()).limits(member.name), created)
