"""What can be wrong with a checkpoint directory."""


class CheckpointError(ValueError):
    """A model directory that cannot be loaded: missing, truncated or mis-shaped. The message names file, value and limit."""
