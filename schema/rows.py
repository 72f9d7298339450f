"""Words of a row of the sequence table."""

import enum


class Phase(enum.IntEnum):
    """The phase of a row. Only the controller changes it."""

    FREE = 0
    PREPARE = 1
    DECODE = 2
    ENDING = 3


SNAPSHOT_SLOT = 2  # in place of one of a member's two states: nothing is prefilled behind the snapshot that it begins from


class EndCode(enum.IntEnum):
    """The reason why decode appends no more ids."""

    NONE = 0
    STOP = 1  # an end-of-sequence id, which is the last committed one
    LENGTH = 2
    ERROR = 3
    GRAMMAR = 4  # its grammar leads nowhere, or takes more time than a step has
