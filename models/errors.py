"""Errors of checkpoint directories, of media that a model cannot take, and of grammars."""


class CheckpointError(ValueError):
    """A model directory that cannot be loaded: missing, truncated or mis-shaped. The message names file, value and limit."""


class UnsupportedMediaError(ValueError):
    """A medium that the model cannot take: its kind, its aspect ratio or its length. The message names value and limit."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or followed. ``pointer``: the JSON pointer of the fault in a schema, empty where not known."""

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer
