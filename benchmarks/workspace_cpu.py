"""What kernels of the CPU ask the real allocator for, call by call, for the tests of workspaces.

A program runs for real under torch's profiler while every operator that reaches a kernel is marked,
as the trace would see it: composite operators are decomposed. What the allocator gave out between
a mark's ends, less the storages that the operator returned, is what its function has to say.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch._ops import OpOverload

from pytest_torchmem.operators.registry import OperatorKind
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace import as_workspace
from pytest_torchmem.operators.workspace_of import workspace_function
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.kernels import run_composite_explicit, run_composite_implicit
from pytest_torchmem.torch_private.keys import FAKE, excluded, is_view

Program = Callable[[], Any]

_MARK = "workspace:"


@dataclass
class Call:
    """One operator that reached a kernel: its arguments without their data, and its requests."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None
    output_bytes: int = 0
    requests: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def name(self) -> str:
        return str(self.operator.name()).partition(".")[0]

    @property
    def measured(self) -> int:
        """Bytes at the kernel's own peak beyond its outputs."""
        return max([0, *accumulate(self.requests)]) - self.output_bytes

    def predicted(self, host: Host) -> int:
        """Bytes that the operator's function gives, 0 where nobody knows."""
        function = workspace_function(spec_of(self.operator), "cpu")
        if function is None:
            return 0
        found = function(self.args, self.kwargs, machine=host, outputs=self.outputs)
        return as_workspace(found, self.name).nbytes

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(tensor.shape)}{'' if tensor.is_contiguous() else tensor.stride()} "
            f"{str(tensor.dtype).removeprefix('torch.')}"
            for tensor in argument_tensors((self.args, self.kwargs))
        )
        return f"{self.operator.name()}({shapes})"


def _hollow(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


class Recorder:
    """Runs programs and keeps every call of a geometry not seen before."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failed: list[str] = []
        self._seen: set[str] = set()
        self._marked: list[Call] = []

    def run(self, programs: Iterable[Program]) -> None:
        """Run ``programs``, forward and backward, and read what their kernels allocated."""
        self._marked = []
        with (
            warnings.catch_warnings(),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile,
            interception(self._kernel),
        ):
            warnings.simplefilter("ignore")
            iterator = iter(programs)
            while (program := self._next(iterator)) is not None:
                try:
                    _differentiate(program())
                except Exception as error:
                    self.failed.append(str(error).partition("\n")[0])
        self._read(profile)
        self.calls += [call for call in self._marked if call.finished]

    @staticmethod
    def _next(iterator: Iterator[Program]) -> Program | None:
        """Return the next program; what it makes beforehand is not recorded."""
        with excluded(FAKE):
            return next(iterator, None)

    def _kernel(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        operator = spec_of(overload)
        tensors = argument_tensors((args, kwargs))
        if operator.kind is OperatorKind.DECOMPOSED:
            return run_composite_implicit(overload, *args, **kwargs)
        if operator.composite and tensors:
            return run_composite_explicit(overload, *args, **kwargs)
        with excluded(FAKE):
            if is_view(overload) or not all(_is_dense(tensor) for tensor in tensors):
                return overload(*args, **kwargs)
            return self._record(overload, args, kwargs, tensors)

    def _record(
        self, overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Any
    ) -> Any:
        call = Call(overload, replace_tensors(args, _hollow), replace_tensors(kwargs, _hollow))
        key = f"{overload.name()}{_geometry(args)}{_geometry(kwargs)}"
        if key in self._seen:
            return overload(*args, **kwargs)
        self._seen.add(key)
        before = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        sizes = {address: storage.nbytes() for address, storage in before.items()}
        self._marked.append(call)
        with torch.autograd.profiler.record_function(f"{_MARK}{len(self._marked) - 1}"):
            result = overload(*args, **kwargs)
        made = {}
        for tensor in argument_tensors(result):
            if not _is_dense(tensor):
                return result
            storage = tensor.untyped_storage()
            made[storage._cdata] = storage.nbytes() - sizes.get(storage._cdata, 0)
        call.output_bytes = sum(made.values())
        call.outputs = replace_tensors(result, _hollow)
        call.finished = True
        return result

    def _read(self, profile: Any) -> None:
        """Give every marked call the requests made between its ends, in their order."""
        pending = list(profile.profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            if event.name.startswith(_MARK):
                call = self._marked[int(event.name.removeprefix(_MARK))]
                inner, requests = [event], []
                while inner:
                    child = inner.pop()
                    if child.tag == _EventType.Allocation:
                        requests.append((child.start_time_ns, child.extra_fields.alloc_size))
                    inner.extend(child.children)
                call.requests = [size for _, size in sorted(requests)]
            else:
                pending.extend(event.children)


def _geometry(value: Any) -> str:
    def describe(tensor: Tensor) -> Any:
        return _Shown(f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}")

    return repr(replace_tensors(value, describe))


class _Shown(str):
    __slots__ = ()


def _differentiate(result: Any) -> None:
    """Run the backward of all outputs: with expanded gradients, dense ones and transposed ones."""
    outputs = [tensor for tensor in argument_tensors(result) if tensor.requires_grad]
    if not outputs or any(output.is_complex() for output in outputs):
        return
    torch.autograd.backward([output.sum() for output in outputs], retain_graph=True)
    dense = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, dense, retain_graph=True)
    first = outputs[0]
    if first.dim() > 1:
        turned = torch.randn_like(first).transpose(0, -1).contiguous().transpose(0, -1)
        torch.autograd.backward(first, turned)
