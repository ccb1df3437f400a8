"""Why operators still differ by more than 64 bytes, or are not supported."""

from __future__ import annotations

import re

REASONS: dict[str, str] = {
    # Values decide.
    "matrix_exp|linalg.matrix_exp": (
        "the norms of the matrices decide how many terms are added up, and of which"
    ),
    "nn.functional.embedding_bag": "how many bags are empty decides what a maximum gathers",
    "to_sparse": "how many elements are not zero decides the size of indices and values",
    "linalg.eig": "the backward asks whether the loss depends on the phase of eigenvectors",
    "nonzero_static": "how many elements are not zero decides what is gathered before the cut",
    "prod": "the backward asks of an empty tensor how many of its elements are zero",
    # Libraries decide.
    r"nn\.(functional\.conv(_transpose)?|Conv(Transpose)?)[123]d": (
        "oneDNN chooses the blocks of strided and of bfloat16 channels-last kernels by estimates "
        "that are not modelled"
    ),
    # Not held by a trace.
    "sgn": "a zero tensor without memory (_efficientzerotensor) is booked as if it had some",
}
"""By a regular expression for the whole name of an operator or module."""


def reason_for(operator: str) -> str | None:
    """Return why an operator is known to differ, or None where nobody knows."""
    return next((reason for name, reason in REASONS.items() if re.fullmatch(name, operator)), None)
