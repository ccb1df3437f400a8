"""Names and defaults that pytest needs at every start: nothing is imported for them."""

from __future__ import annotations

MARKER = "memory_budget"
SIGNATURE = (
    f"{MARKER}(peak=None, *, forward=None, backward=None, optimizer=None, retained=None, "
    "device=None, gpu=None, tolerance=None, measure=None)"
)
DEFAULT_DEVICES = "cpu,cuda"
DEFAULT_GPU = "a100-80gb"
DEFAULT_MEASURE_TOLERANCE = "5%"
UPDATE_MODES = ("new", "changed", "obsolete")
MEASURE_MODES = ("auto", "never", "require")
GITHUB_MODES = ("auto", "always", "never")
