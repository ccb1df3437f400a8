"""Workspace: the bytes a kernel takes for itself beyond the outputs it returns.

The workspace of a record is a small pure function of geometry for each operator and device::

    @operator("aten::native_layer_norm_backward").workspace("cpu")
    def layer_norm_backward(machine: Host, input: Tensor, normalized_shape: Sequence[int]) -> int:
        '''Per-thread sums of gamma and beta; LayerNormBackwardKernelImplInternal.'''
        return machine.threads * 2 * math.prod(normalized_shape) * input.element_size()

Besides arguments of the operator it may take ``machine``, the ``Host`` or ``Gpu`` that the trace
stands for, ``outputs``, what the operator returned, and ``cudnn``, which it can ask. Tensors have
their geometry (``shape``, ``stride()``, ``dtype``, ``numel()``) and no data. A function returns the
bytes at the kernel's own peak beyond what was live before it and its outputs: an ``int``, a tuple
of the single requests in their order, or a ``Workspace``, which can also say that the figure is a
limit, that it is not known, and which buffers stay after the kernel has returned. What a kernel
gives back before it makes more requests is there again with a minus (``passing``), and ``Made``
stands where it makes an output; without any, the outputs are made first.

Such functions share what bytes copies, layouts and blocks have, and the peak of a sequence. Kernels
copy what does not lie in the memory format that they want, gradients mostly: autograd hands kernels
the expanded gradient of a sum, or one that was transposed.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu, LibraryAnswer, WorkspaceKey
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_on_meta


class Buffer(NamedTuple):
    """A workspace that stays: a library's own, taken at its first use and kept from then on.

    It is taken once for each handle of the library and stream; each thread has a handle, and the
    autograd engine's has one. That of the whole ``process`` is taken once.
    """

    name: str
    nbytes: int
    process: bool = False
    confidence: Confidence = Confidence.EXACT


class Made(NamedTuple):
    """A kernel makes the output at a position, or all that it has not made yet, in its order."""

    position: int | None


ALL = Made(None)


class First(NamedTuple):
    """A kernel gives back the first live request of this size, or the one after so many others."""

    nbytes: int
    others: int = 0


#: What a kernel asks for: bytes, less than nothing where it gives them back, its outputs, or a
#: library's buffer.
Request = int | Made | First | Buffer
_Request = TypeVar("_Request", bound=Request)


class Workspace(NamedTuple):
    """What a kernel takes: ``requests`` in bytes, in their order, and buffers that stay.

    A negative one gives back the last of its size; what is not given back is alive to the end.

    Of a workspace whose size is ``UNKNOWN``, ``requests`` are the part that is known, and
    ``unknown`` names the operators, and so does ``calibrated`` of those whose size was measured.
    Where it ``is_estimate``, they are an estimate of the whole, and ``estimated`` names them too.
    ``questions`` are what a calibration was or would be asked. ``told`` names operators whose size
    a library told, and ``answers`` is what it was asked and said.
    """

    requests: tuple[Request, ...] = ()
    confidence: Confidence = Confidence.EXACT
    kept: tuple[Buffer, ...] = ()
    is_estimate: bool = False
    unknown: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()
    calibrated: tuple[str, ...] = ()
    questions: tuple[WorkspaceKey, ...] = ()
    told: tuple[str, ...] = ()
    answers: tuple[LibraryAnswer, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of what is alive to the end."""
        given_back = sum(one.nbytes for one in self.requests if isinstance(one, First))
        return sum(one for one in self.requests if isinstance(one, int)) - given_back

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to write down."""
        noted = self.unknown or self.questions or self.answers
        return not (self.requests or self.kept or noted)


def passing(*requests: _Request) -> tuple[_Request | int, ...]:
    """Return ``requests`` that are given back before the next ones are made."""
    alive: list[int] = []
    for nbytes in requests:
        if isinstance(nbytes, First):
            alive.remove(nbytes.nbytes)
        if not isinstance(nbytes, int) or not nbytes:
            continue
        if nbytes > 0:
            alive.append(nbytes)
        else:
            del alive[max(at for at, one in enumerate(alive) if one == -nbytes)]
    return (*requests, *(-nbytes for nbytes in reversed(alive)))


def _of(confidence: Confidence, is_estimate: bool, *requests: Request) -> Workspace:
    return Workspace(requests, confidence, is_estimate=is_estimate)


bounded = partial(_of, Confidence.BOUNDED, False)
"""Return a workspace of at most so many bytes, as single requests."""
unknown = partial(_of, Confidence.UNKNOWN, False)
"""Return a workspace of which these requests are known, and others not."""
told = partial(_of, Confidence.LIBRARY, False)
"""Return a workspace of these requests, as far as a library's own answer is right."""
estimate = partial(_of, Confidence.UNKNOWN, True)
"""Return a workspace of about these requests."""


def as_workspace(found: int | tuple[Request, ...] | Workspace, operator: str) -> Workspace:
    """Return what a workspace function returned for ``operator`` in one form."""
    if isinstance(found, int):
        found = (max(0, found),)
    result = found if isinstance(found, Workspace) else Workspace(found)
    requests = tuple(request for request in result.requests if request)
    names = (operator,) if result.confidence is Confidence.UNKNOWN else ()
    estimated = names if result.is_estimate else ()
    told = (operator,) if result.confidence is Confidence.LIBRARY else ()
    return result._replace(requests=requests, unknown=names, estimated=estimated, told=told)


def joined(parts: Iterable[Workspace]) -> Workspace:
    """Return what is not known, was measured and would be asked of an operator made of others."""
    parts, found = list(parts), dict[str, Any]()
    for name in ("unknown", "estimated", "calibrated", "questions", "told", "answers"):
        found[name] = tuple(dict.fromkeys(one for part in parts for one in getattr(part, name)))
    return Workspace(**found)


Entry = int | tuple[int, int]
"""Bytes of a buffer in a scratchpad; with the alignment where that is more than 128."""


def booked(*entries: Entry) -> int:
    """Bytes of a scratchpad: every buffer has room to be aligned; ``registry_t::book``."""
    pairs = [(entry, 128) if isinstance(entry, int) else entry for entry in entries]
    return sum(size + alignment for size, alignment in pairs if size)


def by_onednn(host: Host, dtype: torch.dtype, nbytes: int) -> int | Workspace:
    """Return a workspace of oneDNN's: an estimate, on a host that was not checked."""
    return nbytes if host.is_checked(dtype) else estimate(nbytes)


Outputs = Tensor | Sequence["Tensor | None"]

HALVES = (torch.float16, torch.bfloat16)
INT = FLOAT = 4
LONG = DOUBLE = 8
SCALAR = 8
"""Bytes of a Python number wrapped in a tensor."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense_bytes(tensor: Tensor | None, dtype: torch.dtype | None = None) -> int:
    """Bytes of a dense tensor of this shape, in ``dtype`` or its own; 0 for ``None``."""
    if tensor is None:
        return 0
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def scalar_type(tensor: Tensor) -> str:
    """Return what C++ calls a tensor's dtype: ``Half``; c10/core/ScalarType.h."""
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor of 4 or 5 dimensions is contiguous with its channels last."""
    return tensor.dim() in _CHANNELS_LAST and tensor.is_contiguous(
        memory_format=_CHANNELS_LAST[tensor.dim()]
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether elements fill their memory, none of it twice."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return dense


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """``TensorBase::suggest_memory_format``: channels last where the strides are ordered so."""
    last = _CHANNELS_LAST.get(tensor.dim())
    if last is not None and torch.ops.aten.is_strides_like_format.default(tensor, last):
        return last
    return torch.contiguous_format


def contiguous_copy(
    tensor: Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> int:
    """Bytes that ``tensor.contiguous(memory_format)`` allocates: 0 where it already is."""
    if tensor is None or tensor.is_contiguous(memory_format=memory_format):
        return 0
    return dense_bytes(tensor)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """``at::opmath_type``: float for the 16-bit types, else the type itself."""
    if dtype in HALVES:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def type_of_number(number: complex) -> torch.dtype:
    """Return the dtype of the tensor that a Python number is wrapped in."""
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.complex128 if isinstance(number, complex) else torch.float64


def output_bytes(outputs: Outputs) -> int:
    """Bytes of the storages an operator returned, as dense tensors."""
    if isinstance(outputs, Tensor):
        return dense_bytes(outputs)
    return sum(dense_bytes(output) for output in outputs)


def beyond(outputs: Outputs | int, requests: Iterable[int]) -> int:
    """Peak of a sequence of requests (negative: a release), less the outputs among them."""
    total = outputs if isinstance(outputs, int) else output_bytes(outputs)
    return max(0, max(accumulate(requests), default=0) - total)


def transpose_scratch(source: Tensor) -> int:
    """The block that a transposed matrix is copied through; Copy.cpp, copy_same_type_transpose_."""
    side = 120 if source.dtype == torch.uint8 else 60
    transposed = (
        source.dim() == 2
        and source.stride(0) == 1
        and source.stride(1) == source.shape[0]
        and source.numel() >= 60 * 60
    )
    return side * side * source.element_size() if transposed else 0


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor without data, of the geometry of another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return an empty contiguous tensor of the type of ``tensor``, of its shape or another."""
    return tensor.new_empty(tuple(tensor.shape if shape is None else shape))


def asked_for(outputs: Iterable[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return outputs, and None for those that an ``output_mask`` leaves out."""
    return tuple(one if wanted else None for one, wanted in zip(outputs, mask, strict=True))


def laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return an empty tensor of the shape and type of ``tensor`` in a layout."""
    return torch.empty_like(tensor, memory_format=memory_format)


def lying_alike(tensor: Tensor, **options: Any) -> Tensor:
    """Return an empty tensor like one on ``meta``, also in its layout; ``options`` as of torch.
    ``torch.empty_like`` does the same in Python there, and imports the compiler's symbols for it.
    """
    made: Tensor = run_on_meta(torch.ops.aten.empty_like.default, tensor, **options)
    return made


def ceil_div(amount: int, parts: int) -> int:
    """Return ``amount`` divided by ``parts``, rounded up."""
    return -(-amount // parts)


def round_up(amount: int, multiple: int) -> int:
    """Return ``amount`` in whole multiples."""
    return ceil_div(amount, multiple) * multiple


CONTIGUOUS = torch.contiguous_format
SUGGESTED = torch.preserve_format
"""The format that a tensor's own strides suggest: channels last stays so."""

Wanted = torch.memory_format | str
"""A format, or the name of the argument whose suggested format is meant."""


def dense_copy(tensor: Tensor, memory_format: torch.memory_format = CONTIGUOUS) -> int:
    """Bytes of a copy on the CPU where one is needed, with the block that a transpose goes
    through; native/Copy.cpp, copy_same_type_transpose_.
    """
    copied = contiguous_copy(tensor, memory_format)
    return copied + transpose_scratch(tensor) if copied and memory_format == CONTIGUOUS else copied


def copied(*, first: bool = False, **formats: Wanted) -> Callable[..., int | tuple[Request, ...]]:
    """Return the workspace of a kernel that copies arguments into the layout it wants.

    ``formats`` are the arguments that it copies, with what it wants of each; ``outputs`` are made
    in that format and copied into those that lie in another one. Copies may come ``first``.
    """

    def copies(machine: Host | Gpu, **operands: Any) -> int | tuple[Request, ...]:
        on_cpu = isinstance(machine, Host)
        copy = dense_copy if on_cpu else contiguous_copy
        requests = [
            copy(tensor, _meant(wanted, tensor, operands))
            for name, wanted in formats.items()
            for tensor in argument_tensors(operands[name])
        ]
        return sum(requests) if on_cpu else (*requests, ALL) if first else tuple(requests)

    names = [*formats, *(one for one in formats.values() if isinstance(one, str))]
    _set_parameters(copies, "machine", *dict.fromkeys(names))
    copies.__doc__ = f"Copies of {', '.join(formats)} where they do not lie as wanted."
    return copies


def _meant(wanted: Wanted, tensor: Tensor, operands: Mapping[str, Any]) -> torch.memory_format:
    if wanted == CONTIGUOUS:
        return CONTIGUOUS
    like = operands[wanted] if isinstance(wanted, str) else tensor
    return suggested_format(like) if like.dim() == tensor.dim() else CONTIGUOUS


def _set_parameters(function: Any, *names: str) -> None:
    """Make a function take arguments by these names, as if it were written with them."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, keyword_only) for name in names]
    )


def made_like(**formats: Wanted) -> Callable[..., Any]:
    """Return a meta function: outputs of the shapes and types of these arguments, in formats."""

    def made(**operands: Any) -> Any:
        outputs = tuple(
            laid_out(operands[name], _meant(wanted, operands[name], operands))
            for name, wanted in formats.items()
        )
        return outputs if len(outputs) > 1 else outputs[0]

    _set_parameters(made, *formats)
    dense = set(formats.values()) == {CONTIGUOUS}
    how = "contiguous" if dense else "in the format that the strides suggest"
    made.__doc__ = f"Like {' and '.join(formats)}, {how}."
    return made


def shaped_by(overload: Any, memory_format: torch.memory_format) -> Callable[..., Tensor]:
    """Return a meta function: the shape that ``overload`` has there, in a format of the kernel's.
    ``SUGGESTED`` is what the first argument suggests, where it has as many dimensions.
    """

    def made(arguments: Mapping[str, Any]) -> Tensor:
        first: Tensor = next(iter(arguments.values()))
        result: Tensor = overload(**arguments)
        if memory_format == SUGGESTED and first.dim() == result.dim():
            return laid_out(result, suggested_format(first))
        return result if memory_format == SUGGESTED else first.new_empty(result.shape)

    made.__doc__ = f"The shape that meta gives {overload}, in another format."
    return made
