"""Places in a process where a request is worked on, as its record names them for a successor."""

import enum


class Workplace(enum.IntEnum):
    """A place; each has one writer at a time."""

    LOOP = 1
    THREAD = 2
