"""GLM's families that see."""
