"""``mmrt version``: show the installed versions."""

import platform
from importlib import metadata

import typer

from .. import __version__


def register(app: typer.Typer) -> None:
    @app.command()
    def version() -> None:
        """Print the version of mmrt and of what it computes with."""
        print_versions()


def print_versions() -> None:
    print(f"mmrt {__version__}")
    print(f"python {platform.python_version()}")
    for package in ("torch", "tokenizers"):
        print(f"{package} {metadata.version(package)}")
