"""Why operators still differ by more than 64 bytes, or are not supported."""

from __future__ import annotations

import re

REASONS: dict[str, str] = {
    # Values decide.
    "matrix_exp|linalg.matrix_exp": (
        "the norms of the matrices decide how many terms are added up, and of which"
    ),
    # Libraries decide.
    r"nn\.(functional\.conv(_transpose)?|Conv(Transpose)?)[123]d": (
        "oneDNN chooses the blocks of strided and of bfloat16 channels-last kernels by estimates "
        "that are not modelled"
    ),
}
"""By a regular expression for the whole name of an operator or module."""


def reason_for(operator: str) -> str | None:
    """Return why an operator is known to differ, or None where nobody knows."""
    return next((reason for name, reason in REASONS.items() if re.fullmatch(name, operator)), None)
