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
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, overload

from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.torch_private.settings import LIBRARY_VARIABLES

if TYPE_CHECKING:
    import torch

    from pytest_torchmem.targets.calibration import LibraryAnswer, WorkspaceKey
    from pytest_torchmem.targets.host import Host


@dataclass(frozen=True, slots=True)
class Buffer:
    """A workspace that stays: a library's own, taken at its first use and kept from then on.

    It is taken once for each thread that uses the library's handle, and so once by the program and
    once by the autograd engine, and by each of them for every stream. One of the whole ``process``
    is taken once.
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


@dataclass(frozen=True, slots=True)
class Workspace:
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


@overload
def passing(*requests: int) -> tuple[int, ...]: ...
@overload
def passing(*requests: Request) -> tuple[Request, ...]: ...
def passing(*requests: Request) -> tuple[Request, ...]:
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


def bounded(*requests: Request) -> Workspace:
    """Return a workspace of at most ``requests`` bytes."""
    return Workspace(requests, Confidence.BOUNDED)


def unknown(*requests: Request) -> Workspace:
    """Return a workspace of which ``requests`` are known, and others not."""
    return Workspace(requests, Confidence.UNKNOWN)


def told(*requests: Request) -> Workspace:
    """Return a workspace of ``requests`` bytes, as far as a library's own answer is right."""
    return Workspace(requests, Confidence.LIBRARY)


def estimate(*requests: Request) -> Workspace:
    """Return a workspace of about ``requests`` bytes."""
    return Workspace(requests, Confidence.UNKNOWN, is_estimate=True)


def as_workspace(found: int | tuple[Request, ...] | Workspace, operator: str) -> Workspace:
    """Return what a workspace function returned for ``operator`` in one form."""
    if isinstance(found, int):
        found = (max(0, found),)
    result = found if isinstance(found, Workspace) else Workspace(found)
    requests = tuple(request for request in result.requests if request)
    names = (operator,) if result.confidence is Confidence.UNKNOWN else ()
    estimated = names if result.is_estimate else ()
    told = (operator,) if result.confidence is Confidence.LIBRARY else ()
    return replace(result, requests=requests, unknown=names, estimated=estimated, told=told)


def joined(parts: Iterable[Workspace]) -> Workspace:
    """Return what is not known, was measured and would be asked of an operator made of others."""
    parts = list(parts)
    return Workspace(
        unknown=tuple(dict.fromkeys(name for part in parts for name in part.unknown)),
        estimated=tuple(dict.fromkeys(name for part in parts for name in part.estimated)),
        calibrated=tuple(dict.fromkeys(name for part in parts for name in part.calibrated)),
        questions=tuple(dict.fromkeys(question for part in parts for question in part.questions)),
        told=tuple(dict.fromkeys(name for part in parts for name in part.told)),
        answers=tuple(dict.fromkeys(answer for part in parts for answer in part.answers)),
    )


def environment_settings() -> tuple[str | None, ...]:
    """Return what of the environment libraries' workspaces depend on."""
    return tuple(map(os.environ.get, LIBRARY_VARIABLES))


Entry = int | tuple[int, int]
"""Bytes of a buffer in a scratchpad; with the alignment where that is more than 128."""


def booked(*entries: Entry) -> int:
    """Bytes of a scratchpad: every buffer has room to be aligned; ``registry_t::book``."""
    pairs = [(entry, 128) if isinstance(entry, int) else entry for entry in entries]
    return sum(size + alignment for size, alignment in pairs if size)


def by_onednn(host: Host, dtype: torch.dtype, nbytes: int) -> int | Workspace:
    """Return a workspace of oneDNN's: an estimate, on a host that was not checked."""
    return nbytes if host.is_checked(dtype) else estimate(nbytes)
