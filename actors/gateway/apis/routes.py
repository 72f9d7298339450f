"""Routes of the APIs beside OpenAI's, and the shape of their errors. Runs in the gateway's event loop; ``app`` adds them."""

from collections.abc import Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from ....runtime.errors import RequestError
from ..completions import Completions
from ..responses import error_body, json_response
from . import anthropic

_MESSAGES = "/v1/messages"
_ANTHROPIC = anthropic.MessageFormat()


def routes(completions: Completions) -> list[tuple[str, str, Handler]]:
    """Return method, path and handler of each."""

    async def count_tokens(http: web.Request) -> web.Response:
        return json_response({"input_tokens": await completions.count(http, anthropic.read_count)})

    return [
        ("POST", _MESSAGES, partial(completions.answer, read=anthropic.read_message, format=_ANTHROPIC)),
        ("POST", f"{_MESSAGES}/count_tokens", count_tokens),
    ]


def error_body_of(path: str) -> Callable[[RequestError], bytes]:
    """Return the function that shapes an error of this path as its API does."""
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return anthropic.error_body
    return error_body
