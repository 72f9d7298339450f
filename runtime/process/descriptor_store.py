"""systemd's store of descriptors: a service that is started again gets back what its predecessor has put there.

Used by a gateway without a supervisor, which keeps its connections there (sd_notify(3): FDSTORE; sd_listen_fds(3): LISTEN_FDNAMES).
systemd drops a stored connection by itself once its client or its gateway has shut it down.
"""

import contextlib
import logging
import os
import socket
from array import array
from collections.abc import Mapping

from ...shm.connection_records import ConnectionRecords, RecordSizes
from ...shm.kept_records import KeptRecords
from ...shm.tcp_count import reset
from ..environment import STORED

log = logging.getLogger(__name__)

_CONNECTION = "connection-"
_RECORDS, _ANSWERS = "records", "answers"
_SEND_S = 1.0  # for room in systemd's queue, which is short; no clients wait for a systemd that takes nothing


class DescriptorStore:
    """What the service has there, by names without ``STORED``. In the gateway's event loop."""

    def __init__(self, address: str, stored: Mapping[str, int]) -> None:
        """``address``: of systemd (NOTIFY_SOCKET). ``stored``: the descriptors that came back."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._stored = dict(stored)
        self._is_failing = False
        for fd in self._stored.values():
            os.set_inheritable(fd, False)

    def records(self, sizes: RecordSizes) -> ConnectionRecords:
        """Return the records of the connections, those of the predecessor if they have these sizes. Raises: OSError."""
        fd = self._stored.pop(_RECORDS, None)
        if fd is not None and os.fstat(fd).st_size == sizes.number * sizes.stride:
            return ConnectionRecords(fd, sizes)
        self.drop_connections()
        self._replace(_RECORDS, fd)
        records = ConnectionRecords.create(sizes)
        self._put(_RECORDS, records.descriptor)
        return records

    def connections(self, records: ConnectionRecords) -> dict[int, socket.socket]:
        """Return the connections that came back, by the numbers of their records, and clear the records of the others."""
        held = self._connections()
        for number in range(records.sizes.number):
            if number not in held and (record := records.record(number)).is_used:
                record.clear()
        return held

    def drop_connections(self) -> None:
        """Reset the connections that came back: nobody can go on with them."""
        for number, connection in self._connections().items():
            with contextlib.suppress(OSError):
                reset(connection)
            connection.close()
            self.remove(number)

    def answers(self) -> KeptRecords:
        """Return the records of kept answers, those of the predecessor if there are any. Raises: OSError."""
        if (fd := self._stored.pop(_ANSWERS, None)) is not None:
            try:
                return KeptRecords(fd)
            except ValueError as error:
                log.warning("kept answers are gone: %s", error)
        self._replace(_ANSWERS, fd)
        fd = KeptRecords.create()
        self._put(_ANSWERS, fd)
        return KeptRecords(fd)

    def put(self, number: int, connection: socket.socket) -> None:
        """Store a new connection."""
        self._put(f"{_CONNECTION}{number}", connection.fileno())

    def remove(self, number: int) -> None:
        """Drop a connection from the store."""
        self._say(f"FDSTOREREMOVE=1\nFDNAME={STORED}{_CONNECTION}{number}")

    def close(self) -> None:
        self._socket.close()

    def _connections(self) -> dict[int, socket.socket]:
        names = [name for name in self._stored if name.startswith(_CONNECTION)]
        return {int(name.removeprefix(_CONNECTION)): socket.socket(fileno=self._stored.pop(name)) for name in names}

    def _replace(self, name: str, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
            self._say(f"FDSTOREREMOVE=1\nFDNAME={STORED}{name}")

    def _put(self, name: str, fd: int) -> None:
        self._say(f"FDSTORE=1\nFDNAME={STORED}{name}", [fd])

    def _say(self, text: str, fds: list[int] | None = None) -> None:
        """Tell systemd. If it does not listen, what is not stored ends with this process."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._socket.settimeout(0 if self._is_failing else _SEND_S)
            self._socket.sendmsg([text.encode()], rights, 0, self._address)  # send_fds of Python 3.11 leaves out the address
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("a connection ends with this gateway: systemd does not store it: %s", error)
            self._is_failing = True
