"""Why operators still differ by more than 64 bytes, or are not supported."""

from __future__ import annotations

import re

REASONS: dict[str, str] = {
    "as_strided.*": "reads beyond what the trace can lay out",
}
"""By a regular expression for the whole name of an operator or module."""


def reason_for(operator: str) -> str | None:
    """Return why an operator is known to differ, or None where nobody knows."""
    return next((reason for name, reason in REASONS.items() if re.fullmatch(name, operator)), None)
