"""What C++ reads of a tensor without an operator, where Python asks for it; numbers, arrays and
text that a program takes out of a tensor; and storages that get memory without an operator.

``torch.tensor([loss])`` excludes the key of the interception while it reads ``loss``
(torch/csrc/utils/tensor_new.cpp, ``internal_new_from_data``).

Subclasses of ``torch.Tensor`` are called with sizes or data, ``SubTensor([0.5])``. C++ makes a
tensor and gives it a Python object of that class (torch/csrc/autograd/ python_variable.cpp,
``THPVariable_NewWithVar``). In a trace the tensor comes from Python, and has an object already.

Storages are read from files, mapped, resized, and made for random states.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
import torch.serialization
import torch.utils.dlpack
from torch import Tensor, nn

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import Functions, Layer, TraceContext, instead_of
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.python_api.files import unknown_regions
from pytest_torchmem.interception.sparse import put_together, strided_parts
from pytest_torchmem.interception.values import answers, computed
from pytest_torchmem.interception.values.known import NotKnown
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private import dispatcher, keys, patches
from pytest_torchmem.torch_private.modes import made_by, make
from pytest_torchmem.torch_private.tensors import TensorBase, bytes_of, make_subclass

_SIZES = ("size", "nbytes", "__len__")
"""What says how many bytes a storage holds."""


def storages_booked(trace: TraceContext) -> AbstractContextManager[None]:
    """Book storages that a program makes by themselves; on fake cuda ``Storages`` does."""

    def made(*args: Any, **kwargs: Any) -> Any:
        storage = make(torch.UntypedStorage, *args, **kwargs)
        if not trace.off() and storage.device.type == "cpu":
            trace.expect_made(storage)
        return storage

    return made_by(torch.UntypedStorage, made)


class RealStorages(Functions):
    """Books what functions of torch make beside operators."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._waiting = 0
        self._sizes: dict[str, Any] = {name: getattr(torch.UntypedStorage, name) for name in _SIZES}

    def replacements(self) -> patches.Replacements:
        """Return the methods, and what says sizes."""
        sizes = {name: self._size(name) for name in _SIZES}
        return [*super().replacements(), (torch.UntypedStorage, sizes)]

    @instead_of(torch.serialization, "default_restore_location")
    def restore(self, original: Any, storage: Any, location: str) -> Any:
        """Book the storages that ``torch.load`` reads; a mapped file is booked as a whole."""
        restored = original(storage, location)
        if self._trace.off() or location != "cpu":
            return restored
        if not self._trace.mapped.holds(storage):
            self._trace.meet_storage(storage)
        elif not self._trace.mapped.is_known(storage):
            self._trace.borrow_storage(storage)
        return restored

    @instead_of(torch.jit, "load")
    def load_script(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Book the tensors that C++ reads from a module's file, but not the texts of its code
        (torch/csrc/jit/serialization/import.cpp).
        """
        module = original(*args, **kwargs)
        if not self._trace.off():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    self._trace.meet_storage(tensor.untyped_storage())
        return module

    @instead_of(torch.UntypedStorage)
    def from_file(self, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        """Book a file that is mapped, as torch's profiler does (aten/src/ATen/MapAllocator.cpp).
        ``torch.load(mmap=True)`` and safetensors cut their tensors out of it.
        """
        storage = original(filename, *args, **kwargs)
        if not self._trace.off():
            self._trace.mapped.add(storage, unknown_regions(filename))
            self._trace.meet_storage(storage)
        return storage

    @instead_of(torch.UntypedStorage, "from_buffer")
    @instead_of(torch.random, "get_rng_state")
    @instead_of(torch, "get_rng_state")
    def copied(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Book a copy of a program's bytes: an object that is sent, say
        (torch/distributed/distributed_c10d.py, ``_object_to_tensor``); or the tensor that the CPU's
        generator writes its state to.
        """
        made = original(*args, **kwargs)
        if not self._trace.off():
            (self._trace.meet if isinstance(made, Tensor) else self._trace.expect_made)(made)
        return made

    @instead_of(*patches.RECEIVING)
    def received(self, original: Any, *args: Any) -> Any:
        """Book shared memory where it is mapped, as torch's profiler does (MapAllocator.cpp)."""
        storage = original(*args)
        if not (self._waiting or self._trace.off()):
            self._trace.meet_storage(storage)
        return storage

    @instead_of(patches.next_batch)
    def next_batch(self, original: Any, iterator: Any) -> Any:
        """Book what a ``DataLoader``'s workers have loaded where the program gets it. Which batches
        arrive before it, and wait for their turn, is a matter of time.
        """
        if self._trace.off():
            return original(iterator)
        self._waiting += 1
        try:
            batch = original(iterator)
        finally:
            self._waiting -= 1
        for tensor in tensors_in(batch):
            if tensor.layout is torch.strided and tensor.is_shared():
                self._trace.meet_storage(tensor.untyped_storage())
        return batch

    @instead_of(patches.set_from_file)
    def set_from_file(self, original: Any, storage: torch.UntypedStorage, *args: Any) -> Any:
        """Read a storage that is there already, as ``torch.load`` does files of the older format
        (torch/serialization.py, ``_legacy_load``): what was known of it before is not its content.
        """
        record = self._trace.record_of(storage)
        if record is None:
            return original(storage, *args)
        contents = self._trace.values.contents
        with self._trace.working():
            read = torch.UntypedStorage(storage.nbytes()) if record.hollow else storage
            original(read, *args)
            if record.hollow or contents.known(record) is not None:
                contents.remember(record, bytes_of(read))
        return storage

    @instead_of(torch.UntypedStorage, "__getitem__")
    def get(self, original: Any, storage: torch.UntypedStorage, index: Any) -> Any:
        """Return a part of a storage, or one byte; that of a mapped file stands in the file.
        ``torch.asarray(storage)`` takes the first, to see that it is no sequence of sequences
        (torch/csrc/utils/tensor_new.cpp, ``compute_sizes``).
        """
        if isinstance(index, slice) or self._trace.off() or not self._trace.mapped.holds(storage):
            return original(storage, index)
        with self._trace.working():
            return original(storage, index)

    @instead_of(torch.UntypedStorage, "resize_")
    def resize(self, original: Any, storage: torch.UntypedStorage, size: int) -> Any:
        """Book that a storage without memory gets or gives back memory, as ``fully_shard`` does.

        Its tensors keep their geometry, and it has room for as much as it was made for. What the
        trace has computed values of is real memory that cannot be resized, and is booked alike.
        """
        record = self._trace.record_of(storage)
        if record is None or (not record.hollow and storage.resizable()):
            if self._trace.own is not None and not self._trace.off():
                with self._trace.working():
                    if storage.device.type == "cpu" and self._trace.brought(bytes_of(storage)):
                        self._trace.own.note_storage(storage)
            return original(storage, size)
        if size > self._sizes["nbytes"](storage):
            raise UnsupportedOperatorError(
                f"{self._trace.user_line()}: UntypedStorage.resize_ to more bytes than the storage "
                "was made with is not supported in a trace. Use tensor.resize_(size), or make a "
                "new tensor"
            )
        self._trace.resize(record, size)
        return storage

    def _size(self, name: str) -> Callable[[torch.UntypedStorage], int]:
        original, trace = self._sizes[name], self._trace

        def size(storage: torch.UntypedStorage) -> int:
            resized = trace.resized
            if resized and not trace.off():
                found = resized.get(storage._cdata)
                if found is not None:
                    return found
            # Of a fake tensor it may be a symbol, of which a number would fix its sizes.
            return original(storage)  # type: ignore[no-any-return]

        return size


_CPU = torch.device("cpu")
_SEQUENCES = (list, tuple)
_MOST_DIMENSIONS = 128
"""Beyond them torch raises; ``MAX_DIMS`` of torch/csrc/utils/tensor_new.cpp."""


def data_functions(trace: TraceContext) -> Layer[None]:
    """Let what reads or writes the data of tensors without memory go by what is known of them.
    Entered when all other functions of torch are replaced for a device: it calls those.
    """
    return Layer(_Data(trace).replacements(), None)


def readable(trace: TraceContext, data: Any, name: str, depth: int = 0) -> Any:
    """Return nested sequences with real tensors for those that C++ could not read. ``name`` is that
    of the function of torch that they are for.
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
        return trace.values.stand_in(TensorBase.detach(data), record, asked)


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
        """Meet a tensor on memory that stays shared with whoever has it, as numpy's array."""
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
        record = self._trace.without_memory(tensor)
        if record is None:
            return None
        with self._trace.working():
            known = self._trace.values.contents.find(record, tensor.detach())
            return None if known is None else int(known.data_ptr())

    # -- elements, one by one, and addresses -------------------------------------------------------

    @instead_of(*patches.to_dlpack)
    @instead_of(torch.utils.dlpack, "to_dlpack")
    def exported(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
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
        record, name = self._trace.record_of(storage), original.__name__
        if record is None or not record.hollow:
            return original(storage, *args, **kwargs)
        if name == "byteswap":
            self._trace.values.contents.assume(record, None)
            return storage
        if name == "copy_":
            source = args[0] if args else kwargs["source"]
            kwargs, args = {}, (self._whole(getattr(source, "_untyped_storage", source)),)
        getattr(self._whole(storage), name)(*args, **kwargs)
        return storage

    def _whole(self, storage: torch.UntypedStorage) -> Tensor:
        with self._trace.working():
            return bytes_of(storage)

    @instead_of(torch.UntypedStorage)
    def share_memory_(self, original: Any, storage: torch.UntypedStorage, *args: Any) -> Any:
        """Let what is known of a storage lie in shared memory; the program's own stay in place, and
        a forked process writes to these for itself.
        """
        record = self._trace.record_of(storage)
        if record is None and not (self._trace.off() or self._trace.stands):
            self._trace.borrow_storage(storage)
            record = self._trace.record_of(storage)
        if record is None:
            return original(storage, *args)
        record.shared = None
        if record.hollow:
            with self._trace.working():
                self._trace.values.contents.share(record)
        else:
            self._trace.values.warn(
                "a tensor is shared that was made before the trace: what other processes write to "
                "it is not seen. Make it in what is traced"
            )
        return storage

    @instead_of(torch.UntypedStorage)
    def is_shared(self, original: Any, storage: torch.UntypedStorage) -> bool:
        """Return whether other processes may see a storage. One on a GPU always is
        (torch/csrc/StorageSharing.cpp, ``THPStorage_isShared``).
        """
        record = self._trace.record_of(storage)
        if record is None:
            return bool(original(storage))
        if record.ledger.device.type == "cuda":
            return True
        return hasattr(record, "shared") or (not record.hollow and original(storage))

    @instead_of(*patches.SHARING)
    def sent(self, original: Any, storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        """Hand a storage to another process, which gets what is known."""
        record = self._trace.record_of(storage)
        if record is None:
            return original(storage, *args, **kwargs)
        with self._trace.working():
            sent = self._trace.values.contents.share(record)
            if sent is not None or not record.hollow:
                record.outdated = not record.hollow
                shared = storage if sent is None else sent.untyped_storage()
                return original(shared, *args, **kwargs)
        raise self._trace.values.unknown("a tensor of unknown values is sent to a process")


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
    dispatcher.reach_past_modes()
    original = Tensor.__new__

    def new(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if cls is Tensor or trace.off() or (args and isinstance(args[0], Tensor)):
            return original(cls, *args, **kwargs)
        return make_subclass(cls, Tensor(*args, **kwargs), False)  # type: ignore[no-any-return]

    return patches.replaced(Tensor, __new__=staticmethod(new))


def _noticing(begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call ``begin`` when the first such class is made."""
    begun: list[type[Tensor]] = []

    def noticed(cls: Any, /, **kwargs: Any) -> None:
        super(Tensor, cls).__init_subclass__(**kwargs)
        if not begun and _is_other(cls):
            begun.append(cls)
            begin()

    return patches.replaced(Tensor, __init_subclass__=classmethod(noticed))


def _is_other(kind: type) -> bool:
    return not str(kind.__module__).startswith(_OF_TORCH)


def _there_are_others(kind: type) -> bool:
    found: list[type] = type.__subclasses__(kind)
    return any(_is_other(one) or _there_are_others(one) for one in found)


class ValueMethods(Functions):
    """Methods of ``torch.Tensor`` that give values to Python, or need them."""

    def replacements(self) -> patches.Replacements:
        """Return the methods, and what else reads numbers."""
        return [*super().replacements(), (math, answers.functions_of_math())]

    @instead_of(Tensor)
    def item(self, original: Any, tensor: Tensor) -> Any:
        """Return a number; one that is not known may be told, and decides nothing."""
        contents = self._trace.values.contents
        record = self._trace.record(tensor) or self._trace.record_at_compiler(tensor)
        if (
            record is None
            or contents.known(record) is not None
            or record.assumption is not None
            or tensor.numel() != 1
            or tensor.dtype is torch.bool
            or tensor.dtype.is_complex
            or self._trace.values.uses_captured(record)
        ):
            return original(tensor)
        if self._trace.mode.compiles:
            # What makes fake tensors asks for numbers on the host, and takes those that are not
            # finite as they come (torch/_subclasses/fake_tensor.py, ``from_real_tensor``).
            return math.nan
        return self._trace.values.number(tensor)

    @instead_of(Tensor, "__float__", "__int__", "__index__", "__bool__", "__complex__")
    def number_in_cpp(self, original: Any, tensor: Tensor) -> Any:
        """Convert to a number, as C++ asks elements of a list to, too. It excludes the key of the
        interception meanwhile (torch/csrc/utils/tensor_new.cpp, ``internal_new_from_data``), and
        reads memory that holds nothing if a value is not known.
        """
        record = self._trace.without_memory(tensor) if keys.is_excluded(keys.FAKE) else None
        if record is None:
            return original(tensor)
        with self._trace.working():
            asked = "read an unknown value of a tensor in C++"
            return original(self._trace.values.stand_in(TensorBase.detach(tensor), record, asked))

    @instead_of(Tensor)
    def tolist(self, original: Any, tensor: Tensor) -> Any:
        """Return the numbers of a copy on the host (csrc/utils/tensor_list.cpp)."""
        tensor = self._on_host(tensor)
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor)
        with self._trace.working():
            return original(self._real(tensor, record, "tolist"))

    @instead_of(Tensor)
    def numpy(self, original: Any, tensor: Tensor, *, force: bool = False) -> Any:
        """Return an array that keeps ``tensor`` alive, as one of its memory would."""
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor, force=force)
        if force:
            return self.numpy(original, self._on_host(TensorBase.detach(tensor)))
        with self._trace.working():
            self._trace.values.contents.begin_writing(record)
            real = self._real(tensor, record, "numpy")
            if tensor.requires_grad:
                real = TensorBase.clone(real).requires_grad_()  # which numpy refuses
            # an array of the same memory that holds the tensor, as one made of it would
            import numpy

            return numpy.asarray(_Owner(original(real), tensor))

    @instead_of(Tensor, "__dlpack__")
    def dlpack(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        contents = self._trace.values.contents
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor, *args, **kwargs)
        contents.begin_writing(record)
        if contents.known(record) is None:
            raise self._trace.values.unknown(".__dlpack__() of a tensor of unknown values")
        with self._trace.working():
            return original(contents.value(record, TensorBase.detach(tensor)), *args, **kwargs)

    @instead_of(Tensor, "__repr__")
    def text(self, original: Any, tensor: Tensor, *, tensor_contents: Any = None) -> str:
        """Return what a tensor without memory is printed as."""
        if self._trace.describes:
            return f"tensor(..., size={tuple(tensor.shape)})"
        record = self._trace.without_memory(tensor)
        is_known = record is not None and self._trace.values.contents.known(record) is not None
        sparse = tensor.layout is not torch.strided
        if record is None or ((is_known or not tensor.numel()) and not sparse):
            # By operators, which take memory of their own.
            return cast(str, original(tensor, tensor_contents=tensor_contents))
        if is_known:
            with suppress(NotKnown):
                # what torch prints of it, on the device it is on
                known = self._trace.values.known_value
                with self._trace.working():
                    real = put_together(tensor, [known(part) for part in strided_parts(tensor)])
                    text = str(original(real))
                device = record.ledger.device
                told = "" if device.type == "cpu" else f", device='{device}'"
                told += ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
                told += "" if tensor.is_leaf else f", grad_fn=<{type(tensor.grad_fn).__name__}>"
                return f"{text[:-1]}{told})" if text.endswith(")") else text
        gradient = ", requires_grad=True" if tensor.requires_grad else ""
        return (
            f"tensor(..., device='{record.ledger.device}', size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype}{f', layout={tensor.layout}' if sparse else ''}{gradient})"
        )

    @instead_of(nn.functional)
    def one_hot(self, original: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Make the output without the check of the classes; native/Onehot.cpp."""
        known = self._trace.values.contents.known
        record = self._trace.record(tensor)
        if record is None or num_classes <= 0 or not tensor.numel() or known(record) is not None:
            return cast(Tensor, original(tensor, num_classes))
        if record.ledger.device.type == "cpu":
            tensor.min(), tensor.max()
        return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor as C++ reads it; by no method, which a program may have replaced."""
        plain: Tensor = TensorBase.resolve_neg(TensorBase.resolve_conj(tensor))
        if not self._trace.is_on_gpu(plain):
            return plain
        with self._trace.placing_on(_CPU):
            return cast(Tensor, torch.ops.aten._to_copy.default(plain, device=_CPU))

    def _real(self, tensor: Tensor, record: StorageRecord, method: str) -> Tensor:
        asked = f".{method}() of a tensor of unknown values"
        if self._trace.values.uses_captured(record):
            raise computed.not_permitted()
        return self._trace.values.stand_in(TensorBase.detach(tensor), record, asked)


class _Owner:
    """What an array's memory belongs to; numpy keeps it as the array's base."""

    def __init__(self, array: Any, tensor: Tensor) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array, self.tensor = array, tensor
