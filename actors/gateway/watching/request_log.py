"""One line in the log for each request for work and for each refusal: method, path, status, seconds, id, the name of its API key, and
the fault. Answers that the run is not ready appear only at debug level.

It holds neither prompts nor answers, but a refusal quotes up to 60 characters of the refused value. Used by app and
completions.
"""

import logging

from aiohttp import web

from ..keys.api_keys import CLIENT

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)  # the client's id for it
PROBLEM = web.RequestKey("problem", str)  # why it was refused, or did not end well
_SHOWN_CHARS = 100


def log_answer(request: web.Request, status: int, seconds: float, level: int = logging.INFO) -> None:
    """Log a request. Call it once, when the last of the answer is out or the client no longer reads it."""
    problem = f": {one_line(request[PROBLEM])}" if PROBLEM in request else ""
    path = one_line(request.path[:_SHOWN_CHARS])
    id = request.get(REQUEST_ID, "without an id")
    key = f", key {request[CLIENT].key.name}" if CLIENT in request else ""
    log.log(level, "%s %s: %d after %.2f s, %s%s%s", request.method, path, status, seconds, id, key, problem)


def one_line(text: str) -> str:
    """Remove characters with which a client could write lines of its own or control a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
