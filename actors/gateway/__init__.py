"""The gateway: the OpenAI-compatible endpoint."""
