"""What C++ reads of a tensor without an operator, where Python asks for it.

``torch.tensor([loss])`` excludes the key of the interception while it reads ``loss``
(torch/csrc/utils/tensor_new.cpp, ``internal_new_from_data``).

Subclasses of ``torch.Tensor`` are called with sizes or data, ``SubTensor([0.5])``. C++ makes a
tensor and gives it a Python object of that class (torch/csrc/autograd/ python_variable.cpp,
``THPVariable_NewWithVar``). In a trace the tensor comes from Python, and has an object already.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
import torch.utils.dlpack
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.dispatch.dispatcher import reach_past_modes
from pytest_torchmem.torch_private.patching.patches import (
    SHARING,
    Replacements,
    replaced,
    to_dlpack,
)
from pytest_torchmem.torch_private.tensors.storages import bytes_of
from pytest_torchmem.torch_private.tensors.tensors import make_subclass

_CPU = torch.device("cpu")
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_FROM_MEMORY = ("from_dlpack", "from_file", "from_numpy", "frombuffer")
"""What lays a tensor on memory that is there, and stays shared with whoever has it."""
_METHODS_FROM_DATA = ("new_tensor", "new")
_ELEMENT_BY_ELEMENT = ("apply_", "map_", "map2_")
_SEQUENCES = (list, tuple)
_MOST_DIMENSIONS = 128
"""Beyond them torch raises; ``MAX_DIMS`` of torch/csrc/utils/tensor_new.cpp."""


def data_functions(device: str) -> AbstractContextManager[None]:
    """Let what reads or writes the data of tensors without memory go by what is known of them.

    Entered when all other functions of torch are replaced for a ``device``: it calls those.
    """
    return LASTING.layer(f"data on {device}", _functions)


def _functions(trace: TraceContext) -> Layer[None]:
    data = _Data(trace)
    return Layer([*data.from_data(), *data.by_address(), *data.storages()], None)


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


class _Data:
    """The functions for one trace."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._in_capsules: dict[int, ReferenceType[Tensor]] = {}
        """Tensors without memory that capsules were made of, by the address of their values."""

    # -- tensors made of data ----------------------------------------------------------------------

    def from_data(self) -> Replacements:
        """Return the functions that make a tensor of nested sequences."""
        functions = {name: self._of_data(getattr(torch, name), 0) for name in _FROM_DATA}
        methods = {name: self._of_data(getattr(Tensor, name), 1) for name in _METHODS_FROM_DATA}
        functions |= {name: self._shares(getattr(torch, name)) for name in _FROM_MEMORY}
        of_capsules = {"from_dlpack": functions["from_dlpack"]}
        return [(torch, functions), (torch.utils.dlpack, of_capsules), (Tensor, methods)]

    def _shares(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function whose tensor is met as one of numpy's array is."""

        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._trace.off():
                return original(*args, **kwargs)
            if args and isinstance(args[0], Tensor) and not kwargs:  # of from_dlpack
                return args[0].detach()
            with self._trace.placing_on(_CPU):
                made = original(*args, **kwargs)
                known = self._made_into_capsule(made)
                return torch.ops.aten.lift_fresh.default(made) if known is None else known.detach()

        return function

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

    def _of_data(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Return the function whose argument at ``position`` may have tensors in its lists."""

        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= position or type(args[position]) not in _SEQUENCES or self._trace.off():
                return original(*args, **kwargs)
            data = readable(self._trace, args[position], original.__name__)
            return original(*args[:position], data, *args[position + 1 :], **kwargs)

        return function

    # -- elements, one by one, and addresses -------------------------------------------------------

    def by_address(self) -> Replacements:
        """Return what C++ does with the memory of a tensor itself."""
        methods = {name: self._on_elements(name) for name in _ELEMENT_BY_ELEMENT}
        exporting: Any = torch.utils.dlpack
        functions = [each.by(self._exported(each.original)) for each in to_dlpack]
        public = {"to_dlpack": self._exported(exporting.to_dlpack)}
        return [(Tensor, methods), (exporting, public), *functions]

    def _exported(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that makes a capsule of a tensor."""

        def export(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._trace.without_memory(tensor) is None:
                return original(tensor, *args, **kwargs)
            capsule = tensor.__dlpack__()
            address = self._address_of_values(tensor)
            if address is not None:
                self._in_capsules[address] = ref(tensor)
            return capsule

        return export

    def _on_elements(self, name: str) -> Callable[..., Any]:
        """Return the method that calls Python for each element."""
        original: Any = getattr(Tensor, name)

        def method(tensor: Tensor, *args: Any) -> Any:
            real: list[tuple[Any, Any]] = []
            for one in (tensor, *args[:-1]):
                record = self._trace.without_memory(one)
                if record is not None and self._trace.values.contents.known(record) is None:
                    raise self._trace.values.unknown(f".{name}() of a tensor of unknown values")
                real.append((one, record))
            if all(record is None for _, record in real):
                return original(tensor, *args)
            with self._trace.working():
                value = self._trace.values.contents.value
                known = [one if record is None else value(record, one) for one, record in real]
                original(*known, args[-1])
            return tensor

        return method

    # -- storages ----------------------------------------------------------------------------------

    def storages(self) -> Replacements:
        """Return the methods by which a storage is written, and handed to another process."""
        methods: dict[str, Any] = {
            "fill_": self._written("fill_", lambda whole, value: whole.fill_(value)),
            "copy_": self._written("copy_", self._copy),
            "__setitem__": self._written("__setitem__", self._set_item),
            "byteswap": self._written("byteswap", lambda whole, dtype: self._forget(whole)),
            "share_memory_": self._share(),
            "is_shared": self._is_shared(),
        }
        sharing = [each.by(self._shared(each.original)) for each in SHARING]
        return [(torch.UntypedStorage, methods), *sharing]

    def _written(self, name: str, by_tensor: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that does by a tensor what torch does in the storage's memory."""
        original: Any = getattr(torch.UntypedStorage, name)

        def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            record = self._trace.record_of(storage)
            if record is None or not record.hollow:
                return original(storage, *args, **kwargs)
            by_tensor(self._whole(storage), *args, **kwargs)
            return storage

        return method

    def _whole(self, storage: torch.UntypedStorage) -> Tensor:
        with self._trace.working():
            return bytes_of(storage)

    def _copy(self, whole: Tensor, source: Any, non_blocking: bool | None = None) -> None:
        whole.copy_(self._whole(source.untyped() if hasattr(source, "untyped") else source))

    def _set_item(self, whole: Tensor, index: Any, value: Any) -> None:
        whole[index] = value

    def _share(self) -> Callable[..., torch.UntypedStorage]:
        """Return the method that moves a storage to shared memory; the program's own storages stay
        in place.
        """
        original: Any = torch.UntypedStorage.share_memory_

        def share_memory_(storage: torch.UntypedStorage, *args: Any) -> torch.UntypedStorage:
            record = self._trace.record_of(storage)
            if record is None and not (self._trace.off() or self._trace.stands):
                self._trace.borrow_storage(storage)
                record = self._trace.record_of(storage)
            if record is None:
                return original(storage, *args)  # type: ignore[no-any-return]
            record.shared = True
            return storage

        return share_memory_

    def _is_shared(self) -> Callable[..., bool]:
        """Return the method that says whether other processes may see a storage.

        One on a GPU always is (torch/csrc/StorageSharing.cpp, ``THPStorage_isShared``).
        """
        original: Any = torch.UntypedStorage.is_shared

        def is_shared(storage: torch.UntypedStorage) -> bool:
            record = self._trace.record_of(storage)
            if record is None:
                return bool(original(storage))
            if record.ledger.device.type == "cuda":
                return True
            return getattr(record, "shared", False) or (not record.hollow and original(storage))

        return is_shared

    def _forget(self, whole: Tensor) -> None:
        record = self._trace.record(whole)
        if record is not None:
            self._trace.values.contents.assume(record, None)

    def _shared(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method by which another process gets a storage; it gets what is known."""

        def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
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

        return method


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
