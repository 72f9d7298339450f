"""Every exception type that mmrt raises deliberately. Messages name the value and the limit.

``UserError`` is bad input from the user: the command line prints it without a traceback and exits with ``exit_code``.
``RequestError`` is bad input of one request: it becomes an HTTP error (or an SSE error frame) and affects no other request.
"""


class UserError(ValueError):
    """Bad configuration, command line or checkpoint. ``exit_code`` is the process's exit status."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file or value that cannot be used."""


class RunError(UserError):
    """The run directory is busy, missing, or too small; a port is in use; an actor failed."""

    exit_code = 1


class RequestError(ValueError):
    """A request was refused or failed. ``status`` is the HTTP code, ``param`` the invalid field; ``medium`` the kind of
    the medium that is refused; ``code`` OpenAI's word for the error, where clients look for one."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
        medium: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.medium = medium
        self.code = code


CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of a request that is too long for the context. Agents shorten their history and ask again when they see it, or the phrases
of the two functions below: OpenAI's and Anthropic's, which have to stay as they are."""


def prompt_too_long(field: str, num_tokens: int, max_context: int, more: str = "") -> RequestError:
    """Return the error about a prompt that leaves no room for one token of the answer. ``more``: what else there is to say of the
    limit."""
    message = f"{field}: prompt is too long: {num_tokens} tokens > {max_context - 1} maximum; it exceeds the context window"
    return RequestError(f"{message}. {_limit(max_context, more)}", param=field, code=CONTEXT_EXCEEDED)


def answer_too_long(field: str, wanted: int, num_prompt_tokens: int, max_context: int, more: str = "") -> RequestError:
    """Return the error about more new tokens than the context has room for after the prompt."""
    message = f"{field}: is {wanted}; with the prompt it exceeds the context window. {_limit(max_context, more)}"
    total = f"You requested {num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} in the answer)"
    return RequestError(f"{message}. {total}", param=field, code=CONTEXT_EXCEEDED)


def _limit(max_context: int, more: str) -> str:
    return f"This model's maximum context length is {max_context} tokens" + (f", {more}" if more else "")
