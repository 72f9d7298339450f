"""The wall clock is shown to people and never waited for: it jumps when somebody sets it, or a machine comes out of sleep."""

import ast
from pathlib import Path

import mmrt

ROOT = Path(mmrt.__file__).parent
FOLDERS = ("runtime", "actors", "shm", "serving", "media", "models", "cli")
READS = {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today", "time.CLOCK_REALTIME"}
CALCULATES = {  # with the wall clock, and what a jump costs there
    "actors/gateway/apis/response_routes.py": "the time that is said of an answer",
    "actors/gateway/watching/tracing.py": "times of one trace, shown in another program",
    "actors/weights_digest.py": "beside the times of files, which are of the same clock; a digest is computed again",
    "cli/policy.py": "how long ago a policy began, shown",
    "runtime/observe/replay_capture.py": "the time that is said of a capture",
    "runtime/supervisor/status_report.py": "the age of a run without a supervisor, shown",
    "serving/lists.py": "when a model may go, shown",
    "shm/robust_mutex.py": "only where the C library has no pthread_mutex_clocklock (glibc before 2.30)",
}


def reads(tree: ast.AST) -> dict[int, bool]:
    """Lines that read the wall clock, and whether something is calculated with it there, or later with the name that it gets, or it is
    handed on as a clock."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calculated = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.Compare)]
    within = {id(part) for node in calculated for part in ast.walk(node)}
    names = {part.id for node in calculated for part in ast.walk(node) if isinstance(part, ast.Name)}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in READS:
            call = parents[node]
            is_called = isinstance(call, ast.Call) and call.func is node
            kept = parents[call]
            is_named = isinstance(kept, ast.Assign) and any(isinstance(one, ast.Name) and one.id in names for one in kept.targets)
            found[node.lineno] = not is_called or id(node) in within or is_named
    return found


def test_no_deadline_is_of_the_wall_clock() -> None:
    files = {file: file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    files = {file: text for file, text in files.items() if "time.time" in text or "datetime" in text or "CLOCK_REALTIME" in text}
    assert {str(file.relative_to(ROOT)) for file, text in files.items() if any(reads(ast.parse(text)).values())} == CALCULATES.keys()


def test_what_the_search_finds() -> None:
    lines = [
        "a = time.time() + 5",
        "b = {'t': time.time()}",
        "wait(clock=time.time)",
        "if int(time.time()) > b: pass",
        "log(time.time())",
    ]
    assert reads(ast.parse("\n".join([*lines, "c = time.time()", "c < 3"]))) == {1: True, 2: False, 3: True, 4: True, 5: False, 6: True}
