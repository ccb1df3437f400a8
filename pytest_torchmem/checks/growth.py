"""How fast memory may grow with a size of the input: "linear in sequence"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_torchmem.errors import UsageError

POWERS = {"constant": 0, "linear": 1, "quadratic": 2, "cubic": 3}
_BOUND = re.compile(r"\s*(\w+)\s+in\s+([A-Za-z_]\w*)\s*")


@dataclass(frozen=True, slots=True)
class Bound:
    """The highest power of one size that a peak may grow with."""

    size: str
    power: int

    @property
    def word(self) -> str:
        """Return the power in a word."""
        return word_of(self.power)


def word_of(power: int) -> str:
    """Return a power in a word: ``"quadratic"``."""
    return next((word for word, known in POWERS.items() if known == power), f"of power {power}")


def parse_bounds(value: object, source: str) -> tuple[Bound, ...]:
    """Return the bounds that a text names: ``"linear in sequence, linear in batch"``.

    Raises ``UsageError`` with ``source`` for anything else.
    """
    if not isinstance(value, str):
        raise UsageError(f"{source}: {value!r}: {_EXPECTED}")
    found = []
    for part in re.split(r",|\band\b", value):
        match = _BOUND.fullmatch(part)
        if match is None or match[1].lower() not in POWERS:
            raise UsageError(f"{source}: {value!r}: {_EXPECTED}")
        found.append(Bound(match[2], POWERS[match[1].lower()]))
    return tuple(found)


_EXPECTED = (
    f"expected one of {', '.join(POWERS)} and a size, such as 'linear in sequence' or "
    "'linear in batch and quadratic in sequence'"
)
