"""What tensors, modules that hold them, the autograd engine and storages say of themselves.

Storages without memory have the address of pages that are reserved and that nobody fills. A kernel
that nobody intercepted (of an extension, or on a thread that was there before the trace) reads
zeros there, where at address 0 it would end the process. That pages were touched can be seen.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.torch_private.keys import CUDA
from pytest_torchmem.torch_private.names import listed, private, private_attribute, private_name

#: The class in C++ whose attributes ``torch.Tensor`` inherits.
TensorBase: Any = private("torch._C.TensorBase")
#: How many references hold the ``TensorImpl``, the Python object's own included.
tensor_use_count: Callable[[Tensor], int] = private("torch.Tensor._use_count")
version_of: Callable[[Tensor], int] = private_attribute("torch.Tensor._version")
set_version: Callable[[tuple[Tensor], tuple[int]], None] = private(
    "torch._C._autograd._unsafe_set_version_counter"
)
is_view_of_another: Callable[[Tensor], bool] = private("torch.Tensor._is_view")
_negative_view: Callable[[Tensor], Tensor] = private("torch._neg_view")
view_base: Callable[[Tensor], Tensor | None] = private_attribute("torch.Tensor._base")
#: Whether a subclass wraps tensors that ``__tensor_flatten__`` names.
is_wrapper: Callable[[object], bool] = private(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass"
)
#: What ``Parameter`` and its like are made by, on the data of another tensor (nn/parameter.py).
make_subclass: Callable[..., Any] = private("torch.Tensor._make_subclass")
_DISABLED: Any = private("torch._C._disabled_torch_dispatch_impl")

#: What is called with a leaf's gradient, and with the leaf once its gradient is there.
GRADIENT_HOOKS = private_name("torch.Tensor._backward_hooks")
ACCUMULATED_HOOKS = private_name("torch.Tensor._post_accumulate_grad_hooks")
_dispatch_keys: Callable[[Tensor], Any] = private("torch._C._dispatch_keys")
#: Two tensors have each other's data, gradient, graph and version; nothing else refers to these
#: weakly in C++.
exchange_implementations: Callable[[Tensor, Tensor], None] = private("torch._C._swap_tensor_impl")

#: Parts of a sparse tensor, which need not be coalesced.
sparse_indices: Callable[[Tensor], Tensor] = private("torch.Tensor._indices")
sparse_values: Callable[[Tensor], Tensor] = private("torch.Tensor._values")
specified_elements: Callable[[Tensor], int] = private("torch.Tensor._nnz")
#: The sizes of a nested tensor's parts, one row each.
nested_sizes: Callable[[Tensor], Tensor] = private("torch.Tensor._nested_tensor_size")

_is_functional: Callable[[Tensor], bool] = private("torch._is_functional_tensor")
_functional_value: Callable[[Tensor], Tensor] = private("torch._from_functional_tensor")
_FunctionalTensor: Any = private("torch._subclasses.functional_tensor.FunctionalTensor")
_is_wrapped: Callable[[Tensor], bool] = private("torch._C._functorch.is_functorch_wrapped_tensor")
_get_unwrapped: Callable[[Tensor], Tensor] = private("torch._C._functorch.get_unwrapped")

#: A module's own parameters, buffers and children, by name.
PARAMETERS = private_name("torch.nn.Module._parameters")
BUFFERS = private_name("torch.nn.Module._buffers")
UNSAVED_BUFFERS = private_name("torch.nn.Module._non_persistent_buffers_set")
CHILDREN = private_name("torch.nn.Module._modules")
#: The dictionaries of what is called with a module.
HOOK_TABLES = tuple(
    private_name(f"torch.nn.Module.{name}")
    for name in listed("""
        _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
        _forward_pre_hooks _forward_pre_hooks_with_kwargs _backward_hooks _backward_pre_hooks
        _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
        _load_state_dict_post_hooks
    """)
)


def read_as(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a view of another tensor, conjugated and negated when read, as ``tensor`` is."""
    other = other.conj() if tensor.is_conj() else other
    return _negative_view(other) if tensor.is_neg() else other


def is_on_real_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on cuda for C++, as those on a fake GPU are not."""
    return bool(_dispatch_keys(tensor).has(CUDA))


def has_dispatch(tensor: Tensor) -> bool:
    """Return whether a tensor's class runs operators itself (``__torch_dispatch__``)."""
    return type(tensor).__torch_dispatch__ is not _DISABLED


def wrapped_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a subclass wraps, where it ``is_wrapper``. Wrappers may have other
    parts: a ``DTensor`` has its mesh.
    """
    names, _ = cast(Any, tensor).__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)
    return [part for part in parts if isinstance(part, Tensor)]


def functional_value(tensor: Tensor) -> Tensor | None:
    """Return the tensor inside of one that AOTAutograd has made functional, or None. The wrapper in
    Python is around the one of C++ (torch/_subclasses/functional_tensor.py).
    """
    if isinstance(tensor, _FunctionalTensor):
        tensor = cast(Any, tensor).elem
    return _functional_value(tensor) if _is_functional(tensor) else None


def unwrapped(tensor: Tensor) -> Tensor | None:
    """Return the tensor inside of a wrapper that ``vmap`` or ``grad`` made, or None."""
    return _get_unwrapped(tensor) if _is_wrapped(tensor) else None


#: -1 outside of a backward, else the number of the running graph task of this thread.
current_graph_task: Callable[[], int] = private("torch._C._current_graph_task_id")
current_node: Callable[[], Any] = private("torch._C._current_autograd_node")
#: The class for a compiled graph (torch/_functorch/_aot_autograd/runtime_wrappers.py).
OF_COMPILED_GRAPHS = "CompiledFunction"
#: Whether the running backward leaves its nodes what they have saved (``retain_graph``).
keeps_graph: Callable[[], bool] = private("torch._C._autograd._get_current_graph_task_keep_graph")
#: One more than the sequence number of the autograd node this thread made last.
sequence_number: Callable[[], int] = private("torch._C._autograd._get_sequence_nr")
#: The largest number of a node, which is that of every ``AccumulateGrad``.
LEAF_NUMBER = (1 << 64) - 1
_PLACE = 1 << 40
"""What is added to a place in the engine's order: threads do not count as far as this."""
_NUMBER = "torchmem_number"
_place: Callable[[Any], Callable[[int], None]] = private_attribute(
    "torch._C._FunctionBase._set_sequence_nr"
)
private_name("torch.autograd.graph.Node._sequence_nr")


def node_number(node: Any) -> int:
    """Return the sequence number that the thread counted which made a node; -1 for no node."""
    if node is None:
        return -1
    number: int = node._sequence_nr()
    return number if number < _PLACE or number == LEAF_NUMBER else node.metadata[_NUMBER]


def place_node(node: Any, place: Callable[[int], int]) -> None:
    """Let the engine have a node at the place of its number; once, and leaves where they are."""
    number = node._sequence_nr()
    if number < _PLACE:
        node.metadata[_NUMBER] = number
        _place(node)(_PLACE + place(number))


#: What a node knows of the gradients that it takes.
node_inputs: Callable[[Any], Any] = private_attribute("torch.autograd.graph.Node._input_metadata")
engine_has_threads: Callable[[], bool] = private("torch._C._is_multithreading_enabled")

ENGINE_CODE: CodeType = private("torch.autograd.graph._engine_run_backward.__code__")


def run_engine(run: Callable[[], Any], after: Callable[[], None]) -> Any:
    """Run the autograd engine, and call ``after()`` when it is done."""
    try:
        return run()
    finally:
        after()


#: The frames that the autograd engine is called from; an operator whose caller one is was issued by
#: C++ inside of the engine and not by a hook or a custom function.
ENGINE_CODES = (ENGINE_CODE, run_engine.__code__)
#: The code that calls what ``torch.vmap`` was given.
VMAP_CODE: CodeType = private("torch._functorch.vmap._flat_vmap.__code__")


def saved_by(node: Any, name: str) -> Any:
    """Return what a node has saved by a name of derivatives.yaml, or None (``_saved_input``)."""
    return getattr(node, f"_saved_{name}", None)


def numbers_saved_by(outputs: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the tensors of no dimension, on the host, that nodes have saved for some outputs.

    Autograd saves a Python number as the tensor that it is wrapped in, also where everything else
    is a fake tensor. They are returned by the addresses of their storages.
    """
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_saved_")):
            with suppress(RuntimeError):  # freed, or written to since
                value = getattr(node, name)
                if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu":
                    found[value.untyped_storage().data_ptr()] = value
    return found


def in_engine_thread() -> bool:
    """Return whether a GPU's kernels would be launched by the autograd engine's own thread now."""
    return current_graph_task() != -1 and engine_has_threads()


#: The attribute of a ``torch.autograd.Function`` with the class of its nodes.
_NODE = private_name("torch.autograd.Function._backward_cls")


def name_node(function: Any, name: str) -> None:
    """Give the graph's nodes of a ``torch.autograd.Function`` the name of one of torch's own."""
    node = getattr(function, _NODE)
    node.__name__ = node.__qualname__ = name


_NOWHERE = "pytest_torchmem_nowhere"
_SIZE = 1 << 44
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""
_LOOKED_AT = 256
"""Pages at the beginning by which a touch is seen."""
_LOWEST_BITS = int.from_bytes(b"\1" * _LOOKED_AT, "little")


def untouched_pages(nbytes: int) -> mmap.mmap | None:
    """Return ``nbytes`` bytes of zeros that take no memory; None where there are no such pages."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError):  # strict overcommit, a limit of addresses
        return None


class Nowhere:
    """Reserved pages of this process; without any, an address of 0."""

    def __init__(self) -> None:
        self.address = 0
        self._pages: Any = untouched_pages(_SIZE) if sys.platform == "linux" else None
        self._mincore: Any = None
        self._seen = (ctypes.c_ubyte * _LOOKED_AT)()
        if self._pages is None:
            return
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        for advice in ("MADV_DONTDUMP", "MADV_NOHUGEPAGE"):
            with suppress(AttributeError, OSError):  # of a system, or a kernel, without it
                self._pages.madvise(getattr(mmap, advice))
        self._watch()

    def _watch(self) -> None:
        """Find out whether touched pages can be told from others; not every system does."""
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._mincore = mincore
        before = self.touched()
        ctypes.string_at(self.address, 1)
        if before or not self.touched():
            self._mincore = None
        self.forget()

    def touched(self) -> bool:
        """Return whether anybody has read or written where there is no memory."""
        if self._mincore is None:
            return False
        size = _LOOKED_AT * mmap.PAGESIZE
        if self._mincore(self.address, size, self._seen):
            return False
        return bool(int.from_bytes(self._seen, "little") & _LOWEST_BITS)

    def forget(self) -> None:
        """Give touched pages back; they are zeros again."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


def nowhere() -> Nowhere:
    """Return those of this process, whichever copy of this package reserved them."""
    found: Nowhere | None = vars(torch).get(_NOWHERE)
    if found is None:
        found = vars(torch)[_NOWHERE] = Nowhere()
    return found


_CPU = torch.device("cpu")

#: The address of a tensor's ``StorageImpl``: its identity for as long as the storage lives.
storage_address: Callable[[Tensor], int] = private("torch._C._storage_address")
storage_use_count: Callable[[int], int] = private("torch._C._storage_Use_Count")
#: An object's address in C++, of a storage or a generator, which is read in place.
CDATA = private_name("torch.UntypedStorage._cdata"), private_name("torch.Generator._cdata")
_construct_storage: Callable[..., Any] = private("torch._C._construct_storage_from_data_pointer")
# The methods in C++: what is done for each tensor here needs nobody who stands before them.
_set_storage: Callable[..., Tensor] = private("torch._C.TensorBase.set_")
_data_ptr: Callable[[Tensor], int] = private("torch._C.TensorBase.data_ptr")
#: The same, whatever a trace lets a storage say.
storage_bytes: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes

_WORDS = 6
"""As many as a ``StorageImpl`` has at least before its size (c10/core/StorageImpl.h)."""
LEGACY = listed("""
    BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor
    LongTensor ShortTensor
""")
"""The names of types that say what a tensor holds, and some where it is."""
_BY_DTYPE: dict[torch.dtype, Callable[[], Tensor]] = {
    kind.dtype: kind for kind in (getattr(torch, name) for name in LEGACY)
}
"""They make an empty tensor in half the time of ``torch.empty``, whose arguments are parsed."""


def hollow_storage(nbytes: int, memory: Tensor | None = None) -> torch.UntypedStorage:
    """Return a CPU storage that says it holds ``nbytes`` and holds no memory.

    With ``memory`` it shows that tensor's bytes, which live as long: C++ and threads that outlive
    the trace read them.
    """
    address = _nowhere() if memory is None else _data_ptr(memory)
    storage: torch.UntypedStorage = _construct_storage(address, _CPU, nbytes)
    if memory is not None:
        storage.shown = memory  # type: ignore[attr-defined]
    return storage


@cache
def _nowhere() -> int:
    return nowhere().address


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage lies anywhere; what a trace replaces must not be in force."""
    try:
        return storage.data_ptr() not in (0, _nowhere())
    except RuntimeError:  # of bytes at address 0 (torch/csrc/StorageMethods.cpp, data_ptr)
        return False


def is_of_allocator(storage: torch.UntypedStorage) -> bool:
    """Return whether torch's allocator made the memory of a storage: neither numpy, nor a file.

    Only such a storage can be resized, but ``Tensor.numpy`` forbids that, too, for good
    (torch/csrc/utils/tensor_numpy.cpp). Its memory is then what its deleter is given, which for
    others is an object (c10/core/CPUAllocator.cpp; ATen/ops/from_blob.h).
    """
    if storage.resizable():
        return True
    word = _deleted_by_address()
    return word is not None and _words(storage)[word] == storage.data_ptr()


def _words(storage: torch.UntypedStorage) -> list[int]:
    """Return the first words of a storage in C++, among them its address and its deleter's."""
    return [*(ctypes.c_size_t * _WORDS).from_address(storage._cdata)]


@cache
def _deleted_by_address() -> int | None:
    """Return which word is what a deleter is given; None where that cannot be told."""
    own = torch.empty(64, dtype=torch.uint8).untyped_storage()
    other = torch.frombuffer(bytearray(64), dtype=torch.uint8).untyped_storage()
    address = own.data_ptr()
    places = [place for place, word in enumerate(_words(own)) if word == address][1:]
    known = len(places) == 1 and _words(other)[places[0]] != other.data_ptr()
    return places[0] if known else None


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    """Return a tensor of that geometry on ``storage``; the Fake key must be excluded."""
    legacy = _BY_DTYPE.get(dtype)
    made = torch.empty(0, dtype=dtype) if legacy is None else legacy()
    return _set_storage(made, storage, offset, shape, stride)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return _set_storage(_BY_DTYPE[torch.uint8](), storage)
