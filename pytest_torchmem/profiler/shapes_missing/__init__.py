"""Geometry of outputs that torch does not know on ``meta``, or knows wrongly."""

from pytest_torchmem.profiler.shapes_missing import (
    convolutions,
    layouts,
    linear_algebra,
    losses,
    normalization,
    others,
    recurrent,
)
from pytest_torchmem.profiler.shapes_missing.registry import (
    CPU_META_FUNCTIONS,
    META_FUNCTIONS,
    MetaFunction,
    meta,
)

__all__ = [
    "CPU_META_FUNCTIONS",
    "META_FUNCTIONS",
    "MetaFunction",
    "convolutions",
    "layouts",
    "linear_algebra",
    "losses",
    "meta",
    "normalization",
    "others",
    "recurrent",
]
