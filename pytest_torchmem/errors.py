"""The errors a user can meet; each message says what was wrong, where, and what to do."""

from __future__ import annotations


class TorchmemError(Exception):
    """Base of everything this package raises on purpose."""


class UsageError(TorchmemError, ValueError):
    """An argument, marker, option or file the user wrote cannot be understood."""


class SnapshotError(UsageError):
    """A snapshot or calibration file that cannot be used; it is left as it is."""


class UnknownValueError(TorchmemError, RuntimeError):
    """The program asked for a value that a trace does not know, such as ``mask.any()``."""


class UnsupportedOperatorError(TorchmemError, NotImplementedError):
    """The geometry of an operator's outputs cannot be found, or torch works around operators."""


class DeviceMemoryError(TorchmemError, RuntimeError):
    """A measured step needs more memory than the real GPU has."""


class UnsupportedTorchError(TorchmemError, RuntimeError):
    """The private parts of this torch are not as the profiler expects them."""
