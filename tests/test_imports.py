"""No circle of imports between the files of the package, those inside functions included."""

from graphlib import TopologicalSorter
from pathlib import Path

import mmrt
from mmrt.runtime.supervisor.source_tree import SourceTree


def test_no_file_imports_itself_by_way_of_others() -> None:
    tree = SourceTree(Path(mmrt.__file__).parent, "mmrt")
    modules = set(tree.load())
    assert not tree.errors
    graph = {name: {found for found in tree.imports[name] & modules if not f"{name}.".startswith(f"{found}.")} for name in modules}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle; a package that a file lies in does not count
