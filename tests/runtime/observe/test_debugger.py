"""The files that a breakpoint may name."""

import pytest

from mmrt.runtime.observe.debugger import PACKAGE_DIRECTORY, Debugger


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("actors/prefill.py", "actors/prefill.py"),
        ("completions.py", "actors/gateway/apis/completions.py"),
        ("kinds/prefill.py", "runtime/controller/plans/kinds/prefill.py"),
        ("interface.py", None),  # several files end so
        ("state", None),  # a folder
        ("", None),
    ],
)
def test_files_are_found_by_the_end_of_their_path(name: str, found: str | None) -> None:
    debugger = Debugger(readrc=False)
    debugger.reset()
    assert debugger.lookupmodule(name) == (None if found is None else str(PACKAGE_DIRECTORY / found))
