"""Exit statuses in words."""

import signal


def describe_exit(returncode: int) -> str:
    """ "exit status 1" or "SIGKILL"."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
