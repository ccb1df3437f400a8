"""``torch.utils.data.DataLoader`` with workers: what they load is pinned on the trace's thread.

torch pins it on a thread of the loader's own (torch/utils/data/_utils/pin_memory.py), which a trace
knows nothing of: with a GPU present it would get pinned memory from the real one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import Replacements
from pytest_torchmem.torch_private.replaceable import begin_loading, next_batch, pin_memory


def data_loaders(trace: TraceContext) -> Replacements:
    """Let loaders that are iterated in the trace have no thread of their own to pin on."""
    original_init, original_next = begin_loading.original, next_batch.original
    pinning: WeakSet[Any] = WeakSet()

    def init(iterator: Any, loader: Any) -> None:
        if trace.off() or not loader.pin_memory:
            original_init(iterator, loader)
            return
        loader.pin_memory = False
        try:
            original_init(iterator, loader)
        finally:
            loader.pin_memory = True
        pinning.add(iterator)

    def next_data(iterator: Any) -> Any:
        data = original_next(iterator)
        return pin_memory(data) if iterator in pinning and not trace.off() else data

    return [begin_loading.by(init), next_batch.by(next_data)]
