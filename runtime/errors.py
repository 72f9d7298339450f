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
    the medium that is refused."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
        medium: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.medium = medium
