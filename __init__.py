"""mmrt: a multimodal inference runtime of independent processes."""

__version__ = "0.1.0"
