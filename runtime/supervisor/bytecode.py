"""Says that a start makes Python's bytecode, which takes most of it after an install without (uv's, ``pip --no-compile``). Called by
the supervisor before its zygote imports."""

import importlib.util
import sys
from pathlib import Path


def missing_bytecode(package: str) -> str:
    """Return in words that there is none of a package, and whether it will be kept; "" if there is, or no such package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.has_location:
        return ""
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return ""
    if sys.dont_write_bytecode:
        where = Path(spec.origin).parent
        remedy = f"unset it, or call python -m compileall -q {where}"
        return f"has no bytecode of {package}, and PYTHONDONTWRITEBYTECODE is set: each start makes it; {remedy}"
    return f"has no bytecode of {package}: this start makes it and takes longer, later ones find it"
