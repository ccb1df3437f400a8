"""Check every workspace function of the CPU against the real allocator, call by call.

    python -m benchmarks.workspace_cpu                      # a grid of programs written here
    python -m benchmarks.workspace_cpu --samples            # every OpInfo and ModuleInfo as well
    python -m benchmarks.workspace_cpu --programs convolution --operators mm --show 5
    python -m benchmarks.workspace_cpu --threads 1

A program runs for real under torch's profiler while every operator that reaches a kernel is marked,
as the trace would see it: composite operators are decomposed. What the allocator gave out between
a mark's ends, less the storages that the operator returned, is what its function has to say.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch._C._profiler import _EventType
from torch._ops import OpOverload

from pytest_torchmem.operators.registry import OperatorKind
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace import as_workspace
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.targets.host import Host, this_machine
from pytest_torchmem.torch_private.dispatch.dispatcher import interception
from pytest_torchmem.torch_private.dispatch.kernels import (
    run_composite_explicit,
    run_composite_implicit,
)
from pytest_torchmem.torch_private.dispatch.keys import FAKE, set_excluded
from pytest_torchmem.torch_private.dispatch.operators import is_view

Program = Callable[[], Any]

CLOSE = 64
"""Bytes that count as close: a few scalars."""

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
        """Bytes that the operator's function gives, 0 where it has none."""
        function = spec_of(self.operator).cpu.workspace
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
        set_excluded(FAKE, True)
        try:
            return next(iterator, None)
        finally:
            set_excluded(FAKE, False)

    def _kernel(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        operator = spec_of(overload)
        tensors = argument_tensors((args, kwargs))
        if operator.kind is OperatorKind.DECOMPOSED:
            return run_composite_implicit(overload, *args, **kwargs)
        if operator.composite and tensors:
            return run_composite_explicit(overload, *args, **kwargs)
        set_excluded(FAKE, True)
        try:
            if is_view(overload) or not all(_is_dense(tensor) for tensor in tensors):
                return overload(*args, **kwargs)
            return self._record(overload, args, kwargs, tensors)
        finally:
            set_excluded(FAKE, False)

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
                call.requests = [size for _, size in sorted(_allocations(event))]
            else:
                pending.extend(event.children)


def _allocations(event: Any) -> Iterator[tuple[int, int]]:
    pending = [event]
    order = 0
    while pending:
        child = pending.pop()
        if child.tag == _EventType.Allocation:
            yield child.start_time_ns, child.extra_fields.alloc_size
        pending.extend(child.children)
        order += 1


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


# -- programs ------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor contiguous, with its channels last and with its dimensions turned."""
    yield tensor
    if tensor.dim() == 4:
        yield tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    turned = tensor.detach().transpose(0, -1).contiguous().transpose(0, -1)
    yield turned.requires_grad_()


def convolution(dtype: torch.dtype) -> Iterator[Program]:
    """Images with and without bias, strides, dilation and groups; other dimensions; transposed."""
    cases = [
        (2, 16, 32, 3, 1, 1, 1, 1),
        (1, 17, 33, 5, 1, 2, 1, 1),
        (4, 3, 64, 7, 2, 3, 1, 1),
        (2, 64, 64, 1, 1, 0, 1, 1),
        (1, 5, 7, 3, 1, 1, 1, 1),
        (2, 16, 16, 3, 1, 2, 2, 1),
        (2, 32, 32, 3, 1, 1, 1, 32),
        (2, 32, 64, 3, 1, 1, 1, 2),
    ]
    for batch, channels, filters, kernel, stride, padding, dilation, groups in cases:
        weight = _random(filters, channels // groups, kernel, kernel, dtype=dtype)
        bias = _random(filters, dtype=dtype)
        for input in islice(_layouts(_random(batch, channels, 17, 16, dtype=dtype)), 2):
            for added in (bias, None):
                yield (
                    lambda x=input, w=weight, b=added, s=stride, p=padding, d=dilation, g=groups: (
                        F.conv2d(x, w, b, s, p, d, g)
                    )
                )
    for dims, operators in enumerate(
        (
            (F.conv1d, F.conv_transpose1d),
            (F.conv2d, F.conv_transpose2d),
            (F.conv3d, F.conv_transpose3d),
        ),
        start=1,
    ):
        input = _random(2, 16, *(10, 9, 8)[:dims], dtype=dtype)
        for groups, stride, dilation in ((1, 1, 1), (2, 1, 1), (16, 1, 1), (1, 2, 1), (1, 1, 2)):
            weight = _random(16, 16 // groups, *[3] * dims, dtype=dtype)
            for operator in operators:
                yield lambda f=operator, x=input, w=weight, s=stride, d=dilation, g=groups: f(
                    x, w, stride=s, padding=1, dilation=d, groups=g
                )


def normalization(dtype: torch.dtype) -> Iterator[Program]:
    """Batch, group and layer normalization in training and evaluation."""
    for shape in ((8, 3, 17), (2, 16, 9, 9), (4, 10)):
        for input in _layouts(_random(*shape, dtype=dtype)):
            channels, last = shape[1], shape[-1]
            weight, bias = _random(channels, dtype=dtype), _random(channels, dtype=dtype)
            gain = _random(last, dtype=dtype)
            mean, variance = torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
            for training in (True, False):
                yield (
                    lambda x=input, w=weight, b=bias, m=mean, v=variance, t=training: F.batch_norm(
                        x, m, v, w, b, t
                    )
                )
            yield lambda x=input, w=weight, b=bias, c=channels: F.group_norm(x, c, w, b)
            yield lambda x=input, n=last, g=gain: F.layer_norm(x, (n,), g)


def products(dtype: torch.dtype) -> Iterator[Program]:
    """Matrix products of operands in rows, in columns and with gaps."""
    for rows, depth, columns in ((33, 65, 17), (128, 256, 512), (4, 5, 6), (64, 512, 1000)):
        first, second = _random(rows, depth, dtype=dtype), _random(depth, columns, dtype=dtype)
        bias = _random(columns, dtype=dtype)
        batch = _random(3, rows, depth, dtype=dtype)
        yield lambda a=first, b=second: a @ b
        yield lambda a=first, b=second, c=bias: torch.addmm(c, a, b)
        yield lambda a=batch, b=second, c=bias: F.linear(a, b.t(), c)
        yield lambda a=batch, b=second: torch.bmm(a, b.expand(3, *b.shape))


def attention(dtype: torch.dtype) -> Iterator[Program]:
    """Flash attention of short and long sequences, causal or not."""
    for batch, heads, queries, keys, width in (
        (2, 3, 17, 17, 16),
        (1, 8, 200, 200, 64),
        (1, 2, 300, 700, 32),
        (1, 4, 800, 60, 128),
    ):
        query = _random(batch, heads, queries, width, dtype=dtype)
        key = _random(batch, heads, keys, width, dtype=dtype)
        value = _random(batch, heads, keys, width, dtype=dtype)
        for causal in (False, True):
            yield lambda q=query, k=key, v=value, c=causal: F.scaled_dot_product_attention(
                q, k, v, is_causal=c
            )


def pooling(dtype: torch.dtype) -> Iterator[Program]:
    """Pooling, padding, interpolation and sampling of images."""
    for shape in ((2, 3, 17, 18), (4, 16, 16, 16)):
        for input in _layouts(_random(*shape, dtype=dtype)):
            yield lambda x=input: F.max_pool2d(x, 3, 2, 1)
            yield lambda x=input: F.avg_pool2d(x, 2)
            yield lambda x=input: F.adaptive_avg_pool2d(x, (2, 5))
            yield lambda x=input: F.pad(x, (1, 2, 2, 1), mode="reflect")
            yield lambda x=input: F.unfold(x, 3)
            for mode in ("nearest", "bilinear", "bicubic"):
                yield lambda x=input, m=mode: F.interpolate(x, scale_factor=2, mode=m)
            grid = torch.rand(shape[0], 5, 6, 2).to(dtype).requires_grad_()
            yield lambda x=input, g=grid: F.grid_sample(x, g, align_corners=False)


def reductions(dtype: torch.dtype) -> Iterator[Program]:
    """Sums, means, norms, softmaxes and order statistics, over one dimension, several and all."""
    functions = (torch.sum, torch.mean, torch.amax, torch.logsumexp, torch.linalg.vector_norm)
    for shape in ((4, 10), (8, 300, 17), (2, 16, 9, 33)):
        for input in _layouts(_random(*shape, dtype=dtype)):
            for dim in (0, -1, tuple(range(len(shape)))):
                for function in functions:
                    yield lambda f=function, x=input, d=dim: f(x, dim=d)
            for dim in (0, -1):
                for single in (F.softmax, F.log_softmax, torch.sort, torch.cumsum, torch.argmax):
                    yield lambda f=single, x=input, d=dim: f(x, d)
                yield lambda x=input, d=dim: torch.median(x, d)
                yield lambda x=input, d=dim: torch.topk(x, 3, d)


def elementwise(dtype: torch.dtype) -> Iterator[Program]:
    """Operands of several types, numbers, and losses."""
    for input in _layouts(_random(8, 30, 5, dtype=dtype)):
        for other in (torch.float64, torch.int64, torch.bool, torch.float32):
            for shape in ((8, 30, 5), (5,), ()):
                operand = torch.ones(shape).to(other)
                for function in (torch.add, torch.mul, torch.lt, torch.maximum):
                    yield lambda f=function, x=input, y=operand: f(x, y)
        for number in (2, 2.5):
            for with_number in (torch.add, torch.mul, torch.div, torch.gt, torch.pow):
                yield lambda f=with_number, x=input, n=number: f(x, n)
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss):
            for reduction in ("mean", "sum", "none"):
                yield lambda f=loss, x=input, r=reduction: f(x, x.detach() * 2, reduction=r)
        yield lambda x=input: F.gelu(x)
        yield lambda x=input: torch.native_dropout(x, 0.5, True)


def recurrent(dtype: torch.dtype) -> Iterator[Program]:
    """LSTM layers."""
    for inputs, hidden, steps, batch in ((8, 16, 5, 3), (33, 20, 4, 5), (64, 64, 20, 8)):
        layer = torch.nn.LSTM(inputs, hidden, 2, bidirectional=True).to(dtype)
        input = _random(steps, batch, inputs, dtype=dtype)
        yield lambda f=layer, x=input: f(x)


def transforms(dtype: torch.dtype) -> Iterator[Program]:
    """Fourier transforms."""
    if dtype is not torch.float32:
        return
    for input in _layouts(_random(8, 30, 16, dtype=dtype)):
        yield lambda x=input: torch.fft.rfft(x)
        yield lambda x=input: torch.fft.rfft2(x)
        yield lambda x=input: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1)


PROGRAMS: dict[str, Callable[[torch.dtype], Iterator[Program]]] = {
    function.__name__: function
    for function in (
        convolution,
        normalization,
        products,
        attention,
        pooling,
        reductions,
        elementwise,
        recurrent,
        transforms,
    )
}


def torch_samples(dtype: torch.dtype) -> Iterator[Program]:
    """Yield every sample that torch tests its operators and modules with."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for operator in op_db:
        if dtype not in operator.dtypes:
            continue
        gradient = operator.supports_autograd and dtype in operator.backward_dtypes
        try:
            samples = list(operator.sample_inputs("cpu", dtype, requires_grad=gradient))
        except RuntimeError:
            continue
        for sample in samples:
            yield lambda o=operator, s=sample: o.op(s.input, *s.args, **s.kwargs)
    for module in module_db:
        if dtype not in module.dtypes:
            continue
        for training in (True, False):
            for made in module.module_inputs_func(
                module, device="cpu", dtype=dtype, requires_grad=True, training=training
            ):
                instance = module.module_cls(
                    *made.constructor_input.args, **made.constructor_input.kwargs
                )
                instance.to(dtype).train(training)
                if made.forward_input is not None:
                    yield lambda m=instance, i=made.forward_input: m(*i.args, **i.kwargs)


# -- the table -----------------------------------------------------------------------------------


def table(calls: Iterable[Call], host: Host) -> tuple[list[list[Any]], dict[str, list[Call]]]:
    """Rows of operator, calls, exact, close and largest error; and the calls that differ."""
    by_operator: dict[str, list[tuple[int, Call]]] = defaultdict(list)
    for call in calls:
        by_operator[call.name].append((call.predicted(host) - call.measured, call))
    rows: list[list[Any]] = []
    different: dict[str, list[Call]] = {}
    for name, found in by_operator.items():
        errors = [abs(error) for error, _ in found]
        exact = errors.count(0)
        close = sum(error <= CLOSE for error in errors)
        rows.append([name, len(found), exact, close, max(errors)])
        if exact < len(found):
            found.sort(key=lambda pair: -abs(pair[0]))
            different[name] = [call for error, call in found if error]
    rows.sort(key=lambda row: (row[3] - row[1], row[2] - row[1]))
    return rows, different


def main(arguments: list[str] | None = None) -> int:
    """Run the programs, print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--samples", action="store_true", help="torch's own samples as well")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--operators", nargs="*", default=[], help="names without namespace")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--show", type=int, default=0, help="calls to print of each that differs")
    options = parser.parse_args(arguments)
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    recorder = Recorder()
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for name in options.programs:
            recorder.run(PROGRAMS[name](dtype))
        if options.samples:
            samples = torch_samples(dtype)
            while chunk := list(islice(samples, 200)):
                recorder.run(chunk)
    calls = recorder.calls
    if options.operators:
        calls = [call for call in calls if call.name.partition("::")[2] in options.operators]
    rows, different = table(calls, this_machine())
    shown = [row for row in rows if row[2] < row[1]]
    print(tabulate(shown, headers=["operator", "calls", "exact", "within 64", "largest error"]))
    total, exact, close = (sum(row[column] for row in rows) for column in (1, 2, 3))
    print(f"\n{total} calls, {exact / total:.2%} exact, {close / total:.2%} within {CLOSE} bytes")
    for found in different.values():
        for call in found[: options.show]:
            print(f"{call}: {call.predicted(this_machine())}, measured {call.measured}")
            print(f"  outputs {call.output_bytes}, requests {call.requests[:20]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
