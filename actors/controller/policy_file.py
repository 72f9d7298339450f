"""A scheduling policy from a user's file: reading, loading, and the place of a failure in it.

The file defines ``policy``, an object with ``rank`` and ``plan`` (``runtime/controller/scheduling/policy.py``). Each load makes a new
module, so nothing of an earlier version remains. In the controller process, and in the one that ``mmrt policy check`` runs in.
"""

import os
import stat
import sys
import traceback
from collections.abc import Sequence
from hashlib import blake2b
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import CodeType
from typing import Any

from ...runtime.controller.scheduling.facts import Facts
from ...runtime.controller.scheduling.types import Candidate, Rank, StepLimits, StepPlan, View

MAX_FILE_BYTES = 1 << 20
_MODULE = "mmrt_policy"
_PROPERTIES = frozenset(name for name in vars(Candidate) if not name.startswith("_"))


class PolicyFile:
    """The contents of a policy's file. ``version`` is their digest, 16 hexadecimal digits."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.source = source
        self.version = blake2b(source, digest_size=8).hexdigest()

    @classmethod
    def read(cls, path: Path, exposed: Sequence[Path] = ()) -> "PolicyFile":
        """Read the file. ``exposed``: directories where the video process may write, which parses what clients send.

        Raises: OSError; ValueError for what is no regular file, is too large, or could have been written by others than its user.
        """
        with open(path, "rb", opener=_open_at_once) as file:
            status, place = os.fstat(file.fileno()), Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is not a regular file")
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
                raise ValueError(f"{path} is not this user's alone to write")
            if directory := next((directory for directory in exposed if place.is_relative_to(directory.resolve())), None):
                raise ValueError(f"{path} lies in {directory}, where the video process may write")
            source = file.read(MAX_FILE_BYTES + 1)
        if len(source) > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        return cls(path, source)

    def load(self) -> "FilePolicy":
        """Run the file. Raises any exception; ``explain`` has its words."""
        loader = _Loader(self)
        module = module_from_spec(ModuleSpec(_MODULE, loader, origin=str(self.path)))
        before = sys.modules.get(_MODULE)
        sys.modules[_MODULE] = module  # dataclasses look there
        try:
            loader.exec_module(module)
            return FilePolicy(self, getattr(module, "policy", None))
        except BaseException:
            sys.modules.pop(_MODULE, None)
            if before is not None:
                sys.modules[_MODULE] = before
            raise

    def explain(self, error: BaseException) -> str:
        """Describe an exception in one line that begins with the line of the file, if it comes from there. Raises any exception."""
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            return f"{self.path.name}:{error.lineno}: {type(error).__name__}: {error.msg}"
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(self.path)), None)
        what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        return f"{self.path.name}: {what}" if line is None else f"{self.path.name}:{line}: {what}"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Loader(InspectLoader):
    """Runs the contents as they were read, whatever is on disk by then."""

    def __init__(self, file: PolicyFile) -> None:
        self._file = file

    def get_source(self, fullname: str) -> str:
        return decode_source(self._file.source)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._file.source, str(self._file.path))


class FilePolicy:
    """A policy of a file as one of the core's. Raises: TypeError if it lacks a method."""

    def __init__(self, file: PolicyFile, policy: Any) -> None:
        if policy is None or isinstance(policy, type):
            raise TypeError(f"{file.path.name} must end with policy = SomePolicy()" + (", an object" if policy else ""))
        for method in ("rank", "plan"):
            if not callable(getattr(policy, method, None)):
                raise TypeError(f"policy has no method {method!r}")
        self.file = file
        self.name = file.path.name
        self.ages = bool(getattr(policy, "ages", False))
        self._policy = policy

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        rank: Rank = self._policy.rank(_ReadOnly(request), facts)
        return rank

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        plan, memory = self._policy.plan(view, limits, memory)
        return plan, memory


class _ReadOnly:
    """A request as a file's policy gets it: the properties of ``Candidate``, and no way to change them."""

    __slots__ = ("_request",)

    def __init__(self, request: Candidate) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        if name not in _PROPERTIES:
            raise AttributeError(f"a request has no {name!r}; it has {', '.join(sorted(_PROPERTIES))}")
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy cannot set {name!r} of a request")
