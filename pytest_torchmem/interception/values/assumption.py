"""What can be assumed of a storage's values."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Assumption(Enum):
    """A value that stands for all elements of a storage, and whether it is a guess."""

    TRUE = (True, False)
    FALSE = (False, False)
    GUESSED_TRUE = (True, True)
    GUESSED_FALSE = (False, True)
    FIRST = (0, "position")
    """Of the positions that were found, one that exists wherever there is any."""

    @property
    def answer(self) -> Any:
        """The value."""
        return self.value[0]

    @property
    def guessed(self) -> bool:
        """Whether the value may well be another one in a real run."""
        return bool(self.value[1])
