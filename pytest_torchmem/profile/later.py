"""Fields of frozen dataclasses that are computed when they are first read.

And Python's garbage collector, for what makes many objects that are not in cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple


class Later(NamedTuple):
    """What a field is computed by when it is first read."""

    compute: Callable[[], Any]


class ComputedLater:
    """The base of a frozen dataclass with slots, some of whose fields may be ``Later``.

    It needs a field ``_later`` with an empty dictionary, and calls ``_put_off`` in its
    ``__post_init__``. Copies and pickles have the values.
    """

    __slots__ = ()
    if TYPE_CHECKING:
        _later: dict[str, Later]
    else:

        def __getattr__(self, name: str) -> Any:
            # Python asks here for a field that has no value.
            later = self._later.get(name) if name != "_later" else None
            if later is not None:
                object.__setattr__(self, name, later.compute())
                self._later.pop(name, None)  # another thread may have computed it as well
                return getattr(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _put_off(self, *names: str) -> None:
        """Take the value of each field of ``names`` that is ``Later`` off it, until it is read."""
        for name in names:
            if type(found := getattr(self, name)) is Later:
                self._later[name] = found
                object.__delattr__(self, name)


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
