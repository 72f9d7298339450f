"""Says that a start makes Python's bytecode, which takes most of it after an install without (uv's, ``pip --no-compile``). Called by
the supervisor before its zygote imports."""

import importlib.util
import os
import sys
from pathlib import Path


def missing_bytecode(package: str) -> str:
    """Return in words that there is none of a package, and whether it will be kept; "" if there is, or no such package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.has_location:
        return ""
    file = Path(importlib.util.cache_from_source(spec.origin))
    if file.exists():
        return ""
    remedy = f"call python -m compileall -q {Path(spec.origin).parent}"
    if sys.dont_write_bytecode:
        return f"has no bytecode of {package}, and PYTHONDONTWRITEBYTECODE is set: each start makes it; unset it, or {remedy}"
    folder = next(parent for parent in file.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        return f"has no bytecode of {package}, and may not write in {folder}: each start makes it; {remedy} as its owner"
    return f"has no bytecode of {package}: this start makes it and takes longer, later ones find it"
