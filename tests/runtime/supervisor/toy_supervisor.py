"""A supervisor of toy actors, as a process of its own: it becomes a subreaper, which a test process must not.

Usage: toy_supervisor.py RUN TOYS LOGS SETTINGS ACTOR…; SETTINGS is the [supervisor] table as JSON. Prints what it reports as JSON
lines. $TOY_PROGRAM is what actors are started with instead of Python.
With $TOY_ENTRY there is a zygote (importing $TOY_MODULES) that calls it in each fork; with $TOY_DETACH it is a daemon. $TOY_NICE is the
niceness of all.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mmrt.cli.daemon import detach
from mmrt.runtime.config.runtime_config import convert_config
from mmrt.runtime.errors import RunError
from mmrt.runtime.process.run import run_info
from mmrt.runtime.supervisor.launcher import TORCH_STAGE
from mmrt.runtime.supervisor.managed_actor import ActorSpec
from mmrt.runtime.supervisor.specs import actor_specs, child_environment
from mmrt.runtime.supervisor.supervisor import Reporter, RunSetup, Supervisor


class Printer:
    def lines(self, actor: str, lines: Sequence[str]) -> None:
        self._print("lines", actor=actor, lines=list(lines))

    def progress(self, actor: str, state: str, status: str) -> None:
        self._print("progress", actor=actor, state=state, status=status)

    def message(self, text: str) -> None:
        self._print("message", text=text)

    def ready(self, endpoint: str, page: str, seconds: float) -> None:
        self._print("ready", endpoint=endpoint)

    def failed(self, reason: str, tail: Sequence[str]) -> None:
        self._print("failed", reason=reason, tail=list(tail))

    def _print(self, kind: str, **fields: object) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def main(reporter: Reporter, run: str, toys: str, logs: str, settings: str, *actors: str) -> int:
    config = convert_config({"supervisor": json.loads(settings)})
    program = str(Path(__file__).with_name("toy_actor.py"))
    python = os.environ.get("TOY_PROGRAM", sys.executable)
    commands = {name: (python, "-S", "-E", program, name) for name in actors}
    specs: list[ActorSpec] = actor_specs(config, commands)
    forking = "TOY_ENTRY" in os.environ
    if forking:
        entry = os.environ["TOY_ENTRY"]
        specs = [msgspec.structs.replace(spec, needs=TORCH_STAGE, entry=entry) for spec in specs]
    specs = [msgspec.structs.replace(spec, nice=int(os.environ.get("TOY_NICE", "0"))) for spec in specs]

    setup = RunSetup(
        path=Path(run),
        info=run_info(config, Path("toy-model"), 1234),
        specs=specs,
        environment=child_environment({**os.environ, "TOY_DIR": toys}),
        log_directory=Path(logs),
        hang_up_ends="TOY_DETACH" not in os.environ,
        zygote_stages={TORCH_STAGE: ("json", *os.environ.get("TOY_MODULES", "").split())} if forking else {},
    )

    async def serve() -> int:
        return await Supervisor(setup, reporter).serve()

    return asyncio.run(serve())


if __name__ == "__main__":
    try:
        if "TOY_DETACH" in os.environ:
            log_file = Path(sys.argv[3]) / "supervisor.log"
            sys.exit(detach(lambda pipe: main(pipe, *sys.argv[1:]), log_file, Printer()))
        sys.exit(main(Printer(), *sys.argv[1:]))
    except RunError as error:
        print(json.dumps({"kind": "refused", "reason": str(error)}), flush=True)
        sys.exit(error.exit_code)
