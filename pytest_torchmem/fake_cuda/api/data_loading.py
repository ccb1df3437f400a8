"""``torch.utils.data.DataLoader`` with workers: what they load is pinned on the trace's thread.

torch pins it on a thread of the loader's own (torch/utils/data/_utils/pin_memory.py), which a trace
knows nothing of: with a GPU present it would get pinned memory from the real one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patching.patches import Replacements
from pytest_torchmem.torch_private.patching.replaceable import begin_loading, next_batch, pin_memory


class DataLoaders:
    """Loaders that are iterated in the trace have no thread of their own to pin on."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._init, self._next = begin_loading.original, next_batch.original
        self._pinning: WeakSet[Any] = WeakSet()

    def begin(self) -> None:
        """Forget the loaders of the trace before."""
        self._pinning.clear()

    def replacements(self) -> Replacements:
        """Return what takes the place of torch's own."""
        return [begin_loading.by(self.begin_loading), next_batch.by(self.next_data)]

    def begin_loading(self, iterator: Any, loader: Any) -> None:
        """Begin to load."""
        if self._trace.off() or not loader.pin_memory:
            self._init(iterator, loader)
            return
        loader.pin_memory = False
        try:
            self._init(iterator, loader)
        finally:
            loader.pin_memory = True
        self._pinning.add(iterator)

    def next_data(self, iterator: Any) -> Any:
        """Return the next batch."""
        data = self._next(iterator)
        return pin_memory(data) if iterator in self._pinning and not self._trace.off() else data
