"""Whether the graphs of a trace are lowered by Inductor: not again where that was found to fail."""

from __future__ import annotations

from pytest_torchmem.errors import UnknownValueError

_BY_VALUES = "the program decides by values, which Inductor's kernels do not compute here"


class Lowering:
    """What the passes of a trace have found out; the next one runs graphs operator by operator."""

    def __init__(self, reason: str = "") -> None:
        self.used = False
        """Whether a pass has lowered graphs."""
        self.reason = reason
        """Why graphs are not lowered any more."""
        self._failed = ""

    @property
    def is_open(self) -> bool:
        """Whether the next pass may end because of what it lowers."""
        return self.used and not self.reason

    def failed(self, why: str) -> None:
        """Take note of a backward that cannot be lowered: its forward has run already."""
        self._failed = self._failed or why

    def ends_by(self, error: BaseException) -> bool:
        """Return whether lowering ended a pass, so that one without lowering can follow."""
        if not self.is_open:
            return False
        by_values = isinstance(error, UnknownValueError)
        self.reason = self._failed or (_BY_VALUES if by_values else "")
        return bool(self.reason)
