"""``python -m mmrt``: the program."""

from .runtime.cli.main import main

main()
