"""Chat templates, tokens and stop strings."""
