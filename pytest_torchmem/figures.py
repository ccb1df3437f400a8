"""The figures of a profile: their names, how people write them, and what is done with each."""

from typing import NamedTuple

DEFAULT_TOLERANCE = "1%"
"""By how much a figure may grow where nobody says anything else."""


class Figure(NamedTuple):
    """One figure, in bytes."""

    name: str
    """The field of a profile, and the key in every file."""
    selector: str = ""
    """What people write for it in a tolerance; empty for figures that are parts of others."""
    phase: str = ""
    """The phase that has to run for it, as people call it; empty where every step has it."""
    title: str = ""
    """What messages call it, where that is not its name."""
    tolerance: str = ""
    """The built-in tolerance, where it is not the default."""
    counts: str = "requested"
    """Which bytes: those that tensors ask for, what the caching allocator counts for them, or those
    of the host's memory, whatever it is that allocates them."""


# A block keeps what is left of its segment below 1 MiB, and most segments are of 20 MiB: for a byte
# more, another one may be taken.
_OF_ALLOCATOR = f"{DEFAULT_TOLERANCE}+20MiB"

# Numbers on the host come and go with every check of a loss.
_OF_HOST = f"{DEFAULT_TOLERANCE}+64KiB"
_HOST = "host"

_TABLE = (
    Figure("baseline"),
    Figure("forward_peak", "forward", "forward pass"),
    Figure("backward_peak", "backward", "backward pass"),
    Figure("optimizer_peak", "optimizer", "optimizer step"),
    Figure("peak", "peak"),
    Figure("retained", "retained", "forward pass", "memory retained after the forward pass"),
    Figure("end", "end", title="memory alive at the end of the step"),
    Figure("allocated_peak", "allocated", tolerance=_OF_ALLOCATOR, counts="allocated"),
    Figure("reserved_peak", "reserved", tolerance=_OF_ALLOCATOR, counts="reserved"),
    Figure("host_peak", "host", title="peak of host memory", tolerance=_OF_HOST, counts=_HOST),
)
_BY_NAME = {figure.name: figure for figure in _TABLE}

FIGURES = tuple(_BY_NAME)
"""Every figure, in the order in which they are shown."""
SELECTORS = {figure.selector: figure.name for figure in _TABLE if figure.selector}
"""What people write for a figure, and the figure."""
JUDGED = tuple(SELECTORS.values())
"""The figures that may not grow."""
MEASURED = tuple(
    figure.name for figure in _TABLE if figure.name.endswith("peak") and figure.counts != _HOST
)
"""The figures that a real GPU gives as well."""
ALLOCATOR_PEAKS = {
    figure.name: figure.counts for figure in _TABLE if figure.counts in ("allocated", "reserved")
}
"""The figures of cuda alone, which the caching allocator counts, and what it calls them."""
ALLOCATED = "allocated_peak"
RESERVED = "reserved_peak"
HOST = "host_peak"
PEAK = "peak"
RETAINED = "retained"
END = "end"
PEAKS = tuple(name for name in MEASURED if name not in ALLOCATOR_PEAKS)
"""The figures that are explained by module and operator."""
PHASE_PEAKS = tuple(name for name in PEAKS if _BY_NAME[name].phase)
"""The peaks of single phases, of which the overall peak is one."""
TOLERANCES = {figure.name: figure.tolerance for figure in _TABLE if figure.tolerance}
"""The figures with a built-in tolerance of their own."""


def phase_of(figure: str) -> str:
    """Return the phase without which a step has no such figure: "backward pass", or ""."""
    return _BY_NAME[figure].phase


def label(figure: str) -> str:
    """Return a figure's name for a table: "forward peak"."""
    return figure.replace("_", " ")


def title(figure: str) -> str:
    """Return a figure's name for a sentence: "memory retained after the forward pass"."""
    return _BY_NAME[figure].title or label(figure)
