"""Making checkpoints with random weights."""
