"""A step run on a real GPU to see what kernels take that no formula gives.

A trace says which workspaces these are. The step then runs for real, every operator through the
interceptor's place in the dispatcher; around each call that answers a question, the caching
allocator's statistics say how much the kernel had alive beyond what stays. They are counted when
the allocator is called, on the host. In a backward, operators run in the thread that the autograd
engine has for the GPU; the engine carries the interception there.
"""

import gc
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UsageError
from pytest_torchmem.journal.journal import generators_kept
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.measurement.device import Device
from pytest_torchmem.measurement.measured import REQUESTED, on_copies, run_warm
from pytest_torchmem.operators.registry import OperatorKind
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.operators.workspace_of import key_of
from pytest_torchmem.profile.timeline import without_collections
from pytest_torchmem.step.imports import eager
from pytest_torchmem.step.step import Step
from pytest_torchmem.targets import gpus
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.kernels import run_composite_explicit, run_composite_implicit
from pytest_torchmem.torch_private.keys import FAKE, OpOverload, has_kernel_on, set_excluded
from pytest_torchmem.torch_private.names import TORCH_SERIES
from pytest_torchmem.torch_private.self_test import check_torch
from pytest_torchmem.tracing.trace import trace

_PEAK, _CURRENT = f"{REQUESTED}.all.peak", f"{REQUESTED}.all.current"


def calibrate(
    target: Any,
    *args: Any,
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    **kwargs: Any,
) -> gpus.Calibration:
    """Run the step of ``trace`` on this machine's GPU, and return the workspaces of its kernels.

    The calibration has a figure, in bytes, for every workspace that a trace of the step cannot
    compute exactly, if the step on the GPU calls the operator with the same geometry. Models and
    tensors are copied first, as ``measure`` does; the step of a module runs once before, to warm
    up.

    Raises ``UsageError`` if there is no GPU or its allocator has no statistics,
    ``DeviceMemoryError`` if the step needs more memory than the GPU has, and what ``trace`` raises.
    """
    step = Step(loss_fn, backward, optimizer, steps)
    step.check(target)
    device = devices.cuda_device()
    reason = device.why_not()
    if reason:
        raise UsageError(f"cannot calibrate: {reason}. Run this on a machine with the GPU")
    gpu = device.gpu()
    options = {**step.options(), **kwargs}
    with gpus.known_gpu(gpu):
        traced = trace(target, *args, device="cuda", gpu=gpu.name, memory="unlimited", **options)
    figures = record_figures(device, gpu, traced.questions, target, args, kwargs, step)
    return gpus.Calibration({setup_of(device, gpu): figures})


def setup_of(device: Device, gpu: gpus.Gpu) -> gpus.Setup:
    return gpus.Setup(gpu.name, TORCH_SERIES, device.cudnn())


def record_figures(
    device: Device,
    gpu: gpus.Gpu,
    questions: Collection[gpus.WorkspaceKey],
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    step: Step,
) -> dict[gpus.WorkspaceKey, gpus.WorkspaceSize]:
    """Run a step on ``device`` and return its answers to ``questions``, of several the largest.

    Raises ``DeviceMemoryError``, and ``UsageError`` where the allocator does not count.
    """
    if not questions:
        return {}
    check_torch()
    recorder = _Recorder(device, questions)
    there = partial(on_copies, device.torch_device, target, args, kwargs, step, moved=True)

    def run() -> dict[gpus.WorkspaceKey, gpus.WorkspaceSize]:
        # Without the cache (``PYTORCH_NO_CUDA_MEMORY_CACHING``) and with
        # ``backend:cudaMallocAsync`` the allocator has no such statistics; every kernel would seem
        # to take nothing.
        before = device.statistics().get(_CURRENT, 0)
        probe = torch.empty(1024, dtype=torch.uint8, device=device.torch_device)
        if device.statistics().get(_CURRENT, 0) - before != probe.numel():
            raise UsageError(
                "cannot calibrate: CUDA's caching allocator does not count requests here. "
                "Unset PYTORCH_NO_CUDA_MEMORY_CACHING, and leave out backend:cudaMallocAsync"
            )
        with there() as step_there:
            device.synchronise()
            # A GPU whose generator has a new seed makes cuDNN's state of dropout anew
            # (cudnn/RNN.cpp, get_dropout_state), though earlier layers have made one.
            torch.manual_seed(0)
            with interception(recorder):
                step_there()
        return recorder.figures

    gc.collect()
    with generators_kept(), without_collections(), eager():
        return run_warm(device, gpu, target, there, run)


class _Recorder:
    """Runs operators as they are, and records the workspace of those that are asked about."""

    def __init__(self, device: Device, questions: Collection[gpus.WorkspaceKey]) -> None:
        self.figures: dict[gpus.WorkspaceKey, gpus.WorkspaceSize] = {}
        self._device = device
        self._questions = frozenset(questions)
        self._operators = frozenset(question.operator for question in questions)

    def __call__(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
        set_excluded(FAKE, True)
        try:
            operator = spec_of(overload)
            if operator.name in self._operators:
                question = key_of(operator, args, kwargs)
                if question in self._questions:
                    return self._measured(question, operator, args, kwargs)
            body = self._body(operator)
            if body is None:
                return _run(operator, args, kwargs)
            set_excluded(FAKE, False)  # operators issued inside of this one come here again
            return body(overload, *args, **kwargs)
        finally:
            set_excluded(FAKE, False)

    def _body(self, operator: OperatorSpec) -> Callable[..., Any] | None:
        """Return what runs an operator as the sequence of others that a trace sees in its place."""
        if has_kernel_on(operator.overload, self._device.torch_device.type):
            return None
        if operator.kind is OperatorKind.DECOMPOSED:
            return run_composite_implicit
        return run_composite_explicit if operator.composite else None

    def _measured(
        self,
        question: gpus.WorkspaceKey,
        operator: OperatorSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        device = self._device
        # A block that another stream used is given back late, at a request after the stream got
        # there (c10/cuda/CUDACachingAllocator.cpp, process_events): not in this kernel's time.
        device.synchronise()
        torch.empty(1, dtype=torch.uint8, device=device.torch_device)
        device.reset_peaks()
        result = _run(operator, args, kwargs)
        found = device.statistics()
        # What is alive now stays: outputs, and what a library keeps from here on.
        nbytes = max(found.get(_PEAK, 0) - found.get(_CURRENT, 0), 0)
        figure = gpus.WorkspaceSize(nbytes, _reserve_of(operator, result))
        self.figures[question] = figure.largest(self.figures.get(question, figure))
        return result


def _run(operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator.overload(*operator.with_numbers_as_tensors(args, "cpu"), **kwargs)


def _reserve_of(operator: OperatorSpec, result: Any) -> int | None:
    if operator.record.library_state:
        return int(result.nbytes)
    position = operator.record.library_output
    reserve = None if position is None else result[position]
    return reserve.nbytes if isinstance(reserve, Tensor) else None
