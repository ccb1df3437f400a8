"""Python's garbage collector, for what makes many objects that are not in cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Have no garbage collected in between.

    While millions of objects are made, and kept, the collector goes through all of them again and
    again (Modules/gcmodule.c, ``gc_collect_generations``): most of the time of a large report.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
