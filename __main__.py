"""``python -m mmrt``: the program."""

from .cli.main import main

main()
