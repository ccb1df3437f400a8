"""The operators and modules of the fixed slice, and what of them torch itself cannot run.

Names are those of ``benchmarks.conformance``; a dot parts an operator from its variant.
"""

from pathlib import Path

OPERATORS = tuple(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split())

CANNOT_RUN = {"op:nn.functional.nll_loss": "RuntimeError: grad_input must be contiguous"}
"""Why torch itself does not run some samples: channels-last gradients of this loss."""
