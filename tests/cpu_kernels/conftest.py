"""One thread, unless a test says otherwise."""

from mmrt.tests.threads import one_thread

__all__ = ["one_thread"]
