"""What C++ reads of a tensor without an operator, where Python asks for it.

``torch.tensor([loss])`` excludes the key of the interception while it reads ``loss``
(torch/csrc/utils/tensor_new.cpp, ``internal_new_from_data``).

Subclasses of ``torch.Tensor`` are called with sizes or data, ``SubTensor([0.5])``. C++ makes a
tensor and gives it a Python object of that class (torch/csrc/autograd/ python_variable.cpp,
``THPVariable_NewWithVar``). In a trace the tensor comes from Python, and has an object already.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
import torch.utils.dlpack
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Functions, Layer, instead_of
from pytest_torchmem.torch_private.dispatcher import reach_past_modes
from pytest_torchmem.torch_private.patches import SHARING, replaced, to_dlpack
from pytest_torchmem.torch_private.tensors import bytes_of, make_subclass

_CPU = torch.device("cpu")
_SEQUENCES = (list, tuple)
_MOST_DIMENSIONS = 128
"""Beyond them torch raises; ``MAX_DIMS`` of torch/csrc/utils/tensor_new.cpp."""


def data_functions(device: str) -> AbstractContextManager[None]:
    """Let what reads or writes the data of tensors without memory go by what is known of them.

    Entered when all other functions of torch are replaced for a ``device``: it calls those.
    """
    return LASTING.layer(f"data on {device}", _functions)


def _functions(trace: TraceContext) -> Layer[None]:
    return Layer(_Data(trace).replacements(), None)


def readable(trace: TraceContext, data: Any, name: str, depth: int = 0) -> Any:
    """Return nested sequences with real tensors for those that C++ could not read.

    ``name`` is that of the function of torch that they are for.
    """
    if type(data) in _SEQUENCES:
        if depth > _MOST_DIMENSIONS or not any(
            isinstance(item, (Tensor, *_SEQUENCES)) for item in data
        ):
            return data
        return [readable(trace, item, name, depth + 1) for item in data]
    record = trace.without_memory(data) if isinstance(data, Tensor) else None
    if record is None:
        return data
    with trace.working():
        asked = f"torch.{name}() of a list with a tensor of unknown values"
        return trace.values.stand_in(data.detach(), record, asked)


class _Data(Functions):
    """The functions for one trace."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._in_capsules: dict[int, ReferenceType[Tensor]] = {}
        """Tensors without memory that capsules were made of, by the address of their values."""

    # -- tensors made of data ----------------------------------------------------------------------

    @instead_of(torch, "from_dlpack", "from_file", "from_numpy", "frombuffer")
    @instead_of(torch.utils.dlpack, "from_dlpack")
    def on_memory(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Meet a tensor on memory that is there, and stays shared with whoever has it, as one of
        numpy's array is.
        """
        if self._trace.off():
            return original(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and not kwargs:  # of from_dlpack
            return args[0].detach()
        with self._trace.placing_on(_CPU):
            made = original(*args, **kwargs)
            known = self._made_into_capsule(made)
            return torch.ops.aten.lift_fresh.default(made) if known is None else known.detach()

    @instead_of(torch, "tensor", "as_tensor", "asarray")
    def of_data(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of nested sequences, which may have tensors in them."""
        return self._of_data(original, 0, args, kwargs)

    @instead_of(Tensor, "new_tensor", "new")
    def beside(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make one as another is."""
        return self._of_data(original, 1, args, kwargs)

    def _of_data(self, original: Any, position: int, args: Any, kwargs: Any) -> Any:
        if len(args) <= position or type(args[position]) not in _SEQUENCES or self._trace.off():
            return original(*args, **kwargs)
        data = readable(self._trace, args[position], original.__name__)
        return original(*args[:position], data, *args[position + 1 :], **kwargs)

    def _made_into_capsule(self, made: Tensor) -> Tensor | None:
        """Return the tensor whose values ``made`` shares by a capsule, if it is still there."""
        if not self._in_capsules:
            return None
        with self._trace.working():
            address = made.data_ptr()
        exported = self._in_capsules.pop(address, lambda: None)()
        if exported is None or self._address_of_values(exported) != address:
            return None
        alike = made.shape == exported.shape and made.dtype == exported.dtype
        return exported if alike else None

    def _address_of_values(self, tensor: Tensor) -> int | None:
        record, contents = self._trace.without_memory(tensor), self._trace.values.contents
        if record is None or contents.known(record) is None:
            return None
        with self._trace.working():
            return int(contents.value(record, tensor.detach()).data_ptr())

    # -- elements, one by one, and addresses -------------------------------------------------------

    @instead_of(to_dlpack[0])
    @instead_of(to_dlpack[1])
    @instead_of(torch.utils.dlpack, "to_dlpack")
    def exported(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Make a capsule of a tensor."""
        if self._trace.without_memory(tensor) is None:
            return original(tensor, *args, **kwargs)
        capsule = tensor.__dlpack__()
        address = self._address_of_values(tensor)
        if address is not None:
            self._in_capsules[address] = ref(tensor)
        return capsule

    @instead_of(Tensor, "apply_", "map_", "map2_")
    def on_elements(self, original: Any, tensor: Tensor, *args: Any) -> Any:
        """Call a function of Python's for each element."""
        real: list[tuple[Any, Any]] = []
        for one in (tensor, *args[:-1]):
            record = self._trace.without_memory(one)
            if record is not None and self._trace.values.contents.known(record) is None:
                asked = f".{original.__name__}() of a tensor of unknown values"
                raise self._trace.values.unknown(asked)
            real.append((one, record))
        if all(record is None for _, record in real):
            return original(tensor, *args)
        with self._trace.working():
            value = self._trace.values.contents.value
            known = [one if record is None else value(record, one) for one, record in real]
            original(*known, args[-1])
        return tensor

    # -- storages ----------------------------------------------------------------------------------

    @instead_of(torch.UntypedStorage, "fill_", "copy_", "__setitem__", "byteswap")
    def write(self, original: Any, storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        """Do by a tensor what torch does in the storage's memory."""
        record = self._trace.record_of(storage)
        if record is None or not record.hollow:
            return original(storage, *args, **kwargs)
        _WRITES[original.__name__](self, self._whole(storage), *args, **kwargs)
        return storage

    def _whole(self, storage: torch.UntypedStorage) -> Tensor:
        with self._trace.working():
            return bytes_of(storage)

    def _fill(self, whole: Tensor, value: Any) -> None:
        whole.fill_(value)

    def _copy(self, whole: Tensor, source: Any, non_blocking: bool | None = None) -> None:
        whole.copy_(self._whole(source.untyped() if hasattr(source, "untyped") else source))

    def _set_item(self, whole: Tensor, index: Any, value: Any) -> None:
        whole[index] = value

    def _forget(self, whole: Tensor, dtype: Any) -> None:
        record = self._trace.record(whole)
        if record is not None:
            self._trace.values.contents.assume(record, None)

    @instead_of(torch.UntypedStorage)
    def share_memory_(self, original: Any, storage: torch.UntypedStorage, *args: Any) -> Any:
        """Move a storage to shared memory; the program's own storages stay in place."""
        record = self._trace.record_of(storage)
        if record is None and not (self._trace.off() or self._trace.stands):
            self._trace.borrow_storage(storage)
            record = self._trace.record_of(storage)
        if record is None:
            return original(storage, *args)
        record.shared = True
        return storage

    @instead_of(torch.UntypedStorage)
    def is_shared(self, original: Any, storage: torch.UntypedStorage) -> bool:
        """Return whether other processes may see a storage.

        One on a GPU always is (torch/csrc/StorageSharing.cpp, ``THPStorage_isShared``).
        """
        record = self._trace.record_of(storage)
        if record is None:
            return bool(original(storage))
        if record.ledger.device.type == "cuda":
            return True
        return getattr(record, "shared", False) or (not record.hollow and original(storage))

    @instead_of(SHARING[0])
    @instead_of(SHARING[1])
    def sent(self, original: Any, storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        """Hand a storage to another process, which gets what is known."""
        record = self._trace.record_of(storage)
        if record is None or not record.hollow:
            return original(storage, *args, **kwargs)
        self._trace.values.contents.begin_writing(record)
        known = self._trace.values.contents.known(record)
        if known is None:
            raise self._trace.values.unknown("a tensor of unknown values is sent to a process")
        with self._trace.working():
            sent = known.clone().untyped_storage()  # its file is open while it lives
            finalize(storage, sent.nbytes)
            return original(sent, *args, **kwargs)


_WRITES: dict[str, Callable[..., None]] = {
    "fill_": _Data._fill,
    "copy_": _Data._copy,
    "__setitem__": _Data._set_item,
    "byteswap": _Data._forget,
}
_OF_TORCH = "torch."


@contextmanager
def subclasses_made(trace: TraceContext) -> Iterator[None]:
    """Make a tensor of a subclass of one that is there, while ``trace`` runs.

    From when a program has such classes: CPython calls a ``__new__`` that was once replaced by
    looking it up, also when it is inherited again, which takes a little longer.
    """
    with ExitStack() as stack:
        if _there_are_others(Tensor):
            stack.enter_context(_made_of_another(trace))
        else:
            stack.enter_context(_noticing(lambda: stack.enter_context(_made_of_another(trace))))
        yield


def _made_of_another(trace: TraceContext) -> AbstractContextManager[None]:
    reach_past_modes()
    original = Tensor.__new__

    def new(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if cls is Tensor or trace.off() or (args and isinstance(args[0], Tensor)):
            return original(cls, *args, **kwargs)
        return make_subclass(cls, Tensor(*args, **kwargs), False)  # type: ignore[no-any-return]

    return replaced(Tensor, __new__=staticmethod(new))


def _noticing(begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call ``begin`` when the first such class is made."""
    begun: list[type[Tensor]] = []

    def noticed(cls: Any, /, **kwargs: Any) -> None:
        super(Tensor, cls).__init_subclass__(**kwargs)
        if not begun and _is_other(cls):
            begun.append(cls)
            begin()

    return replaced(Tensor, __init_subclass__=classmethod(noticed))


def _is_other(kind: type) -> bool:
    return not str(kind.__module__).startswith(_OF_TORCH)


def _there_are_others(kind: type) -> bool:
    """Return whether a class has subclasses that are not torch's own."""
    found: list[type] = type.__subclasses__(kind)
    return any(_is_other(one) or _there_are_others(one) for one in found)
