"""Tensors without memory that are copied (``copy.deepcopy``), pickled or saved.

Tensors whose contents are swapped (``torch.utils.swap_tensors``).

torch swaps no tensor that has a weak reference, and a trace has some: they are gone meanwhile.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.serialization
import torch.utils
from torch import Tensor, nn

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.interception.python_api.addresses import untouched_pages
from pytest_torchmem.interception.values.policy import zeros
from pytest_torchmem.torch_private.patches import legacy_save
from pytest_torchmem.torch_private.tensors import is_wrapper

_COPIED = "pytest_torchmem: copied storages"
"""Where the memory of a deep copy has them."""


class Copies(Functions):
    """Copies by operators; torch copies a storage's memory."""

    @instead_of(Tensor, "__deepcopy__")
    def of_tensor(self, original: Any, tensor: Tensor, memo: dict[int, Any]) -> Any:
        """Copy a tensor with its gradient and attributes; torch/_tensor.py, ``__deepcopy__``."""
        if self._trace.record(tensor) is None:
            return original(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        with torch.no_grad():
            shares = type(tensor) is Tensor and tensor.layout is torch.strided
            shares = shares and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            copy = _with_its_storage(tensor, memo) if shares else tensor.detach().clone()
            copy.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
        if tensor.grad is not None:
            copy.grad = self.of_tensor(original, tensor.grad, memo)
        copy.__dict__.update(deepcopy(tensor.__dict__, memo))
        return copy

    @instead_of(nn.Parameter, "__deepcopy__")
    def of_parameter(self, original: Any, parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        """Copy a parameter without its gradient; torch/nn/parameter.py, ``__deepcopy__``."""
        if id(parameter) not in memo:
            copy = type(parameter)(parameter.data.clone(), parameter.requires_grad)
            memo[id(parameter)] = copy
        return memo[id(parameter)]


def _with_its_storage(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy the whole storage of a tensor, once for all tensors on it; torch/storage.py,
    ``TypedStorage.__deepcopy__``. Its copy begins as one element.
    """
    storage = tensor.untyped_storage()
    copies: dict[int, Tensor] = memo.setdefault(_COPIED, {})
    whole = copies.get(storage._cdata)
    if whole is None:
        elements = storage.nbytes() // tensor.element_size()
        whole = tensor.detach().as_strided((elements,), (1,), 0).clone()
        copies[storage._cdata] = whole
    made = tensor.new_empty([])
    return made.set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class Pickling(Functions):
    """Pickles known values, and for those not known zeros, of pages that nobody has touched."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self.unknown: set[int] = set()
        """The addresses of storages that were pickled as zeros."""
        self.older = False
        """Whether the archive that is written stands for a file of the older format."""
        self._zeros_of: dict[tuple[torch.device, int], Tensor] = {}
        self._places: dict[int, tuple[torch.UntypedStorage, str]] = {}
        """Storages that were pickled, and the devices they belong to in the trace, by address."""

    def begin(self) -> None:
        """Forget what was pickled in the trace before."""
        self.unknown.clear()
        self._zeros_of.clear()
        self._places.clear()

    @instead_of(Tensor, "__reduce_ex__")
    def reduce(self, original: Any, tensor: Tensor, protocol: Any) -> Any:
        """Pickle a real tensor of the same geometry."""
        record = self._trace.without_memory(tensor)
        if record is None or tensor.layout is not torch.strided or is_wrapper(tensor):
            # Of its parts, each as it comes.
            return original(tensor, protocol)
        nbytes = tensor.untyped_storage().nbytes()
        with self._trace.working():
            content = self._trace.values.contents.known(record)
            if content is None:
                content = self._zeros(record, nbytes)
            storage = content.untyped_storage()
            # The name of the host is one string, which a pickle writes once (``_cpu_tag``).
            on_host = record.ledger.device.type == "cpu"
            place = "cpu" if on_host else str(record.ledger.device)
            self._places[storage._cdata] = storage, place
            real = Output.of(tensor).on(storage)
            return original(real.requires_grad_(tensor.requires_grad), protocol)

    @instead_of(torch.serialization)
    def location_tag(self, original: Any, storage: Any) -> Any:
        """Return where a pickled storage was, which ``torch.load`` will put it to."""
        place = self._places.get(storage._cdata) if hasattr(storage, "_cdata") else None
        return original(storage) if place is None else place[1]

    @instead_of(legacy_save)
    def save(
        self, original: Any, obj: Any, file: Any, pickle_module: Any, pickle_protocol: Any
    ) -> None:
        """Write an archive instead of the older format, which ``pickle`` asks for: there is no
        place in that to say what is not known. Either is read back by ``torch.load``. A program
        may have put something else, which asks for the older one, in the place of ``torch.save``.
        """
        if self._trace.off():
            original(obj, file, pickle_module, pickle_protocol)
            return
        self.older = True
        try:
            torch.serialization.save(obj, file, pickle_module, pickle_protocol)
        finally:
            self.older = False

    def _zeros(self, record: StorageRecord, nbytes: int) -> Tensor:
        """Return what stands for a storage that is not known, the same one each time."""
        key = (record.ledger.device, record.index)
        made = self._zeros_of.get(key)
        if made is None or made.numel() != nbytes:
            pages = untouched_pages(nbytes) if nbytes else None
            made = zeros(nbytes) if pages is None else torch.frombuffer(pages, dtype=torch.uint8)
            self._zeros_of[key] = made
            self.unknown.add(made.untyped_storage()._cdata)
        return made


_NOTHING = object()


class Swaps(Functions):
    """``swap_tensors`` in a trace."""

    @instead_of(torch.utils, "swap_tensors")
    def swap(self, original: Any, t1: Tensor, t2: Tensor) -> None:
        """Swap two tensors, and what is noted of their contents."""
        if not self._trace.on_thread():
            original(t1, t2)
            return
        stay, move = (
            self._trace.own.by_tensor if self._trace.own else (),
            self._trace.noted_contents,
        )
        tables = [*stay, *move]
        notes = [(table.pop(t1, _NOTHING), table.pop(t2, _NOTHING)) for table in tables]
        swapped = False
        try:
            original(t1, t2)
            swapped = True
        finally:
            for position, (table, (first, second)) in enumerate(zip(tables, notes, strict=True)):
                if swapped and position >= len(stay):
                    first, second = second, first
                for tensor, note in ((t1, first), (t2, second)):
                    if note is not _NOTHING:
                        table[tensor] = note
