"""Borrows an actor's role as ``mmrt debug`` does, and is a toy actor then. Usage: toy_debugger.py RUN NAME [WORD…], see toy_actor.py.

Prints ``borrowed`` once it has the supervisor's word, and waits for a line of input before it goes on: the first prompt.
"""

import os
import sys
from pathlib import Path

from mmrt.cli.debug import become
from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.control import borrow_role


def main(run: str, name: str, *words: str) -> int:
    try:
        reply, listeners, connection = borrow_role(Path(run), name)
    except RunError as error:
        print(f"refused: {error}", flush=True)
        return 1
    print("borrowed", flush=True)
    if not sys.stdin.readline():
        return 0
    toys = Path(reply.environment["TOY_DIR"])
    (toys / name).write_text(" ".join(words))
    program = [sys.executable, "-S", "-E", str(Path(__file__).with_name("toy_actor.py")), name]
    become(program, reply.environment, connection, listeners)
    return 0


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    sys.exit(main(*sys.argv[1:]))
