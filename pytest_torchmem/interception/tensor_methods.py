"""What hollow tensors answer in Python where C++ would reach into memory they do not have."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.addresses import Addresses
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.layouts.compressed import LAYOUTS
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.values import known
from pytest_torchmem.torch_private.internals import (
    below_interception,
    storage_address,
    tensor_on,
    unwrapped,
)
from pytest_torchmem.torch_private.patches import replaced


class Guard:
    """Decides whether a replaced Python function stands in for torch's own at this call."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self._thread = threading.get_ident()

    def off(self) -> bool:
        """Return whether the caller is the profiler itself or another thread."""
        return self.interceptor.inside or not self.on_thread()

    def on_thread(self) -> bool:
        """Return whether the caller is on the trace's thread."""
        return threading.get_ident() == self._thread

    def record(self, tensor: Tensor) -> StorageRecord | None:
        """Return the ledger's record of a tensor, or None for one that is not hollow."""
        if self.off():
            return None
        try:
            return self.interceptor.ledger.records.get(storage_address(tensor))
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            inner = tensor.values() if tensor.layout in LAYOUTS else unwrapped(tensor)
            return None if inner is None else self.record(inner)


@contextmanager
def hollow_answers(interceptor: Interceptor) -> Iterator[None]:
    """Let tensors of this thread answer without memory: copies, numbers, text."""
    guard = Guard(interceptor)
    addresses = Addresses()

    def known_or_raise(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            record = guard.record(tensor)
            if record is None or not record.hollow:
                return original(tensor, *args, **kwargs)
            if record.known is None:
                raise interceptor.values.unknown(f".{name}() of a tensor was asked for")
            with interceptor.working():
                return original(known.value_of(record, tensor.detach()), *args, **kwargs)

        return method

    def taken_out(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that gives something of Python's or numpy's with a tensor's values."""

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            record = guard.record(tensor)
            if record is None or not record.hollow:
                return original(tensor, *args, **kwargs)
            if kwargs.pop("force", False):
                return method(tensor.detach().cpu(), *args, **kwargs)
            with interceptor.working():
                asked = f".{name}() of a tensor was asked for"
                stand_in = interceptor.values.stand_in(tensor.detach(), record, asked)
                if name != "numpy":
                    return original(stand_in, *args, **kwargs)
                if tensor.requires_grad:
                    stand_in = stand_in.clone().requires_grad_()  # which numpy refuses
                return _array_that_keeps(original(stand_in, *args, **kwargs), tensor)

        return method

    original_reduce: Any = Tensor.__reduce_ex__
    pickled: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def reduce(tensor: Tensor, protocol: Any) -> Any:
        """Pickle zeros, of pages that nobody has touched, in the place of what is not known."""
        record = guard.record(tensor)
        if record is None or not record.hollow:
            return original_reduce(tensor, protocol)
        storage = tensor.untyped_storage()
        with interceptor.working():
            content = record.known
            if content is None:
                content = torch.zeros(storage.nbytes(), dtype=torch.uint8)
            stand_in = tensor_on(
                content.untyped_storage(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
            ).requires_grad_(tensor.requires_grad)
            pickled[content.untyped_storage()._cdata] = (
                content.untyped_storage(),
                str(record.ledger.device),
            )
            return original_reduce(stand_in, protocol)

    original_location: Any = torch.serialization.location_tag

    def location_tag(storage: Any) -> Any:
        """Return where a pickled storage was, which ``torch.load`` will put it to."""
        known_place = pickled.get(storage._cdata) if hasattr(storage, "_cdata") else None
        return original_location(storage) if known_place is None else known_place[1]

    original_restore: Any = torch.serialization.default_restore_location

    def default_restore_location(storage: Any, location: str) -> Any:
        """Book what ``torch.load`` reads from a file; one that it maps is booked as a whole."""
        restored = original_restore(storage, location)
        if not guard.off() and location == "cpu" and not cut_out_of_a_file(storage):
            with interceptor.working():
                interceptor.meet(torch.empty(0, dtype=torch.uint8).set_(storage))
        return restored

    original_from_file: Any = torch.UntypedStorage.from_file
    files: list[weakref.ref[torch.UntypedStorage]] = []

    def cut_out_of_a_file(storage: torch.UntypedStorage) -> bool:
        """Return whether a storage lies in a mapped file, which lives as long as it does."""
        files[:] = [file for file in files if file() is not None]
        return any(
            0 <= storage.data_ptr() - mapped.data_ptr() < mapped.nbytes()
            for mapped in (file() for file in files)
            if mapped is not None
        )

    def from_file(*args: Any, **kwargs: Any) -> Any:
        """Book a file that is mapped, as torch's profiler does (aten/src/ATen/MapAllocator.cpp).

        ``torch.load(mmap=True)`` and safetensors cut their tensors out of it.
        """
        storage = original_from_file(*args, **kwargs)
        if not guard.off():
            files.append(weakref.ref(storage))
            with interceptor.working():
                interceptor.meet(torch.empty(0, dtype=torch.uint8).set_(storage))
        return storage

    original_item: Any = Tensor.item

    def item(tensor: Tensor) -> Any:
        __tracebackhide__ = True
        record = guard.record(tensor)
        if (
            record is None
            or record.known is not None
            or record.assumed is not None
            or tensor.numel() != 1
            or not known.is_count(tensor.dtype)
        ):
            return original_item(tensor)
        return interceptor.values.count(tensor)

    original_copy: Any = Tensor.__deepcopy__
    original_repr: Any = Tensor.__repr__

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        record = guard.record(tensor)
        if record is None:
            return original_copy(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
        if tensor.grad is not None:
            copy.grad = deepcopy(tensor.grad, memo)
        copy.__dict__.update(tensor.__dict__)
        return copy

    def parameter_deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        if id(parameter) in memo:
            return memo[id(parameter)]
        # As torch/nn/parameter.py does it; a parameter's gradient is not copied.
        copy = type(parameter)(parameter.data.clone(), parameter.requires_grad)
        memo[id(parameter)] = copy
        return copy

    def text(tensor: Tensor, *, tensor_contents: Any = None) -> str:
        record = guard.record(tensor)
        if record is None or not record.hollow:
            return cast(str, original_repr(tensor, tensor_contents=tensor_contents))
        gradient = ", requires_grad=True" if tensor.requires_grad else ""
        return (
            f"tensor(..., device='{record.ledger.device}', size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype}{gradient})"
        )

    def random_state() -> Tensor:
        state = original_random_state()
        if not guard.off():
            interceptor.meet(state)
        return state

    def data_ptr(tensor: Tensor) -> int:
        """Return an address that differs where memory would: programs compare them."""
        record = guard.record(tensor)
        if record is None or not record.hollow or tensor.numel() == 0:
            return cast(int, original_data_ptr(tensor))
        start = storage_data_ptr(tensor.untyped_storage())
        return start + int(tensor.storage_offset()) * tensor.element_size()

    def storage_data_ptr(storage: torch.UntypedStorage) -> int:
        record = None if guard.off() else interceptor.ledger.records.get(storage._cdata)
        if record is None or not record.hollow:
            return cast(int, original_storage_data_ptr(storage))
        if record.memory is not None:
            return record.memory.data_ptr()
        return addresses.of(record.ledger.device, record.index, storage.nbytes())

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Make the output without the check of the classes, which decides nothing where their
        number is given; native/Onehot.cpp.
        """
        record = guard.record(tensor)
        if record is None or record.known is not None or num_classes <= 0 or not tensor.numel():
            return cast(Tensor, original_one_hot(tensor, num_classes))
        if record.ledger.device.type == "cpu":
            tensor.min(), tensor.max()
        return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

    original_one_hot: Any = nn.functional.one_hot
    original_data_ptr: Any = Tensor.data_ptr
    original_storage_data_ptr: Any = torch.UntypedStorage.data_ptr
    original_random_state = torch.random.get_rng_state
    methods: dict[str, Any] = {
        name: known_or_raise(name, getattr(Tensor, name)) for name in ("__dlpack__",)
    }
    methods["__reduce_ex__"] = reduce
    methods |= {name: taken_out(name, getattr(Tensor, name)) for name in ("tolist", "numpy")}
    methods["item"] = item
    with ExitStack() as stack:
        stack.enter_context(
            replaced(Tensor, __deepcopy__=deepcopy, __repr__=text, data_ptr=data_ptr, **methods)
        )
        stack.enter_context(
            replaced(
                torch.UntypedStorage, data_ptr=storage_data_ptr, from_file=staticmethod(from_file)
            )
        )
        stack.enter_context(
            replaced(
                torch.serialization,
                location_tag=location_tag,
                default_restore_location=default_restore_location,
            )
        )
        stack.enter_context(replaced(nn.functional, one_hot=one_hot))
        stack.enter_context(replaced(nn.Parameter, __deepcopy__=parameter_deepcopy))
        for module in (torch, torch.random):
            stack.enter_context(replaced(module, get_rng_state=random_state))
        stack.enter_context(
            replaced(HigherOrderOperator, dispatch=below_interception(HigherOrderOperator.dispatch))
        )
        stack.enter_context(_modules_given_back(guard))
        yield


def _array_that_keeps(array: Any, tensor: Tensor) -> Any:
    """Return an array of the same memory that holds ``tensor``, as one made of it would."""
    import numpy

    class Owner:
        """What the array's memory belongs to; numpy keeps it as its base."""

        def __init__(self) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array, self.tensor = array, tensor

    return numpy.asarray(Owner())


@contextmanager
def _modules_given_back(guard: Guard) -> Iterator[None]:
    """Give real modules that a program moves or converts their own tensors back afterwards."""
    original: Any = nn.Module._apply
    # Weakly: a module that the program makes on another thread is real too, and dies in the trace.
    parameters: Any = WeakIdKeyDictionary()
    buffers: Any = WeakIdKeyDictionary()

    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not guard.off():
            for parameter in module._parameters.values():
                if parameter is not None and guard.record(parameter) is None:
                    parameters.setdefault(parameter, (parameter.data, parameter.grad))
            for name, buffer in module._buffers.items():
                if buffer is not None and guard.record(buffer) is None:
                    buffers.setdefault(module, {}).setdefault(name, buffer)
        return original(module, *args, **kwargs)

    try:
        with replaced(nn.Module, _apply=apply):
            yield
    finally:
        for parameter, (data, gradient) in parameters.items():
            if data.device.type != "meta" and parameter.data.data_ptr() != data.data_ptr():
                parameter.grad = None
                parameter.data = data
                parameter.grad = gradient
        for module, named in buffers.items():
            module._buffers.update(named)
