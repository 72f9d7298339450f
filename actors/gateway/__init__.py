"""The gateway: the OpenAI-compatible endpoint. One process; ``main`` is its entry."""

from .serve import main

__all__ = ["main"]
