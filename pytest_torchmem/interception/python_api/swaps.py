"""Tensors whose contents are swapped (``torch.utils.swap_tensors``).

torch swaps no tensor that has a weak reference, and a trace has some: they are gone meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch.utils
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patching.patches import Replacements

_NOTHING = object()


class Swaps:
    """``swap_tensors`` in a trace."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._original: Any = torch.utils.swap_tensors

    def replacements(self) -> Replacements:
        """Return what takes the place of torch's own."""
        return [(torch.utils, {"swap_tensors": self.swap})]

    def swap(self, t1: Tensor, t2: Tensor) -> None:
        """Swap two tensors, and what is noted of their contents."""
        if not self._trace.on_thread():
            self._original(t1, t2)
            return
        stay, move = self._trace.noted_tensors, self._trace.noted_contents
        tables = [*stay, *move]
        notes = [(table.pop(t1, _NOTHING), table.pop(t2, _NOTHING)) for table in tables]
        swapped = False
        try:
            self._original(t1, t2)
            swapped = True
        finally:
            for position, (table, (first, second)) in enumerate(zip(tables, notes, strict=True)):
                if swapped and position >= len(stay):
                    first, second = second, first
                for tensor, note in ((t1, first), (t2, second)):
                    if note is not _NOTHING:
                        table[tensor] = note
