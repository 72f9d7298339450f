"""The scheduling policy of a run and how it does, as the controller reports it in shared memory."""

import msgspec


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """``name`` is in charge, since ``since_s`` (wall clock). ``wanted``: the name or the file that was set, by the configuration or by
    ``mmrt policy set``, whose order has ``number``. Counts are since it took over; times are of its last 1000 calls, in seconds.
    """

    name: str = "unified"
    wanted: str = "unified"
    number: int = 0  # 0: the configuration's
    is_loading: bool = False  # the file that is wanted: everything else is as it was before
    version: str = ""  # of the file that is in charge or set aside: a digest of its contents, in hexadecimal
    since_s: float = 0.0
    plans: int = 0
    overruled: int = 0
    illegal: int = 0
    median_s: float = 0.0
    p99_s: float = 0.0
    longest_s: float = 0.0  # since it took over
    error: str = ""  # why it was last overruled
    refused: str = ""  # why the present contents of the file are not in charge: they cannot be loaded
    set_aside: str = ""  # why ``unified`` is in charge in place of the wanted policy
    loaded: str = ""  # the last version whose code ran in this controller: some of it may run on
    ended: int = 0  # controllers that had loaded this version and ended outside of its calls, none of them by a kill from outside
    condemned: str = ""  # the version that ended a controller, and is not loaded again under the order ``condemned_number``
    condemned_number: int = 0
    condemned_because: str = ""

    @property
    def summary(self) -> str:
        """The policy in one line for users."""
        version = f" (version {self.version})" if self.version else ""
        if self.set_aside:
            return f"{self.name}, in place of {self.wanted}{version}: {self.set_aside}"
        parts = [f"{self.name}{version}"]
        if self.refused:
            parts.append(f"{self.wanted} is refused: {self.refused}")
        if self.overruled:
            parts.append(f"overruled {often(self.overruled)}, last because of {self.error}")
        return "; ".join(parts)


def often(count: int) -> str:
    """Return a number of times in words."""
    return "once" if count == 1 else f"{count} times"


NO_POLICY_YET = PolicyReport()  # before the first report
