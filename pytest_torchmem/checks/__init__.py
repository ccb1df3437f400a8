"""One check: trace, compare, judge; findings are data.

Here are the names and defaults that pytest needs at every start: light to import.
"""

from inspect import Parameter, Signature

MARKER = "memory_budget"
SELECTED_BY = "torchmem"
"""The marker that every memory test gets, for ``-m torchmem``."""
LIMITS = ("peak", "forward", "backward", "optimizer", "retained", "allocated", "reserved", "host")
_OTHERS = (
    *LIMITS[1:],
    *("device", "gpu", "gpus", "tolerance", "measure", "values"),
    *("world_size", "ranks", "scaling", "growth", "name"),
)
ARGUMENTS = Signature(
    [
        Parameter("peak", Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in _OTHERS),
    ]
)
SIGNATURE = f"{MARKER}{ARGUMENTS}"
DEFAULT_DEVICES = "cpu,cuda"
DEFAULT_GPU = "a100-80gb"
DEFAULT_MEASURE_TOLERANCE = "5%"
UPDATE_MODES = ("new", "changed", "obsolete")
MEASURE_MODES = ("auto", "never", "require")
STAND_IN = "stand-in"
"""Measures every check of a run in processes of their own, without a GPU; not of one test."""
VALUES_MODES = ("auto", "real", "none")
GITHUB_MODES = ("auto", "always", "never")
