"""The toy run of the supervisor's tests."""

from mmrt.tests.runtime.supervisor.conftest import toy

__all__ = ["toy"]
