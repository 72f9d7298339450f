"""Packages that only some benches need: the extras of the lab."""

from importlib.util import find_spec

from mmrt.bench.serve.errors import BenchError


def need_extra(extra: str, *modules: str) -> None:
    """Raises: BenchError, which says how to install the extra, without one of its ``modules``."""
    for module in modules:
        if find_spec(module) is None:
            raise BenchError(f"the package {module} is missing: pip install -e './lab[{extra}]'")
