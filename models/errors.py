"""Errors of checkpoint directories, and of media that a model cannot take."""


class CheckpointError(ValueError):
    """A model directory that cannot be loaded: missing, truncated or mis-shaped. The message names file, value and limit."""


class UnsupportedMediaError(ValueError):
    """A medium that the model cannot take: its kind, its aspect ratio or its length. The message names value and limit."""
