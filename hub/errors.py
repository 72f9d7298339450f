"""Errors of models by name. Messages name the model, and what to do."""

from ..runtime.errors import UserError


class HubError(UserError):
    """A hub that cannot be asked, or whose answer cannot be used; a disk without room."""

    exit_code = 1


class ModelNotFoundError(HubError):
    """A name that leads to no model, or to several."""

    exit_code = 2
