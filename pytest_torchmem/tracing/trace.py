"""One trace: the layers switched on, the step run, the layers switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_torchmem.allocator import AllocatorOptions, parse_options
from pytest_torchmem.errors import UnsupportedTorchError, UsageError
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import give_survivors_data
from pytest_torchmem.interception.distributed import (
    module_wrappers_refused,
    process_group_kept,
    refuse_wrapped,
)
from pytest_torchmem.interception.fingerprint import Program, fingerprint_of_step
from pytest_torchmem.interception.gradient_accumulation import References
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.python_api.functions import python_functions
from pytest_torchmem.profile.profile import MemoryProfile, figures_of
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.global_state import process_kept, thread_kept
from pytest_torchmem.step.phases import optimizer_steps
from pytest_torchmem.step.step import Step
from pytest_torchmem.targets.calibration import Calibration
from pytest_torchmem.targets.gpus import DEFAULT_GPU, Gpu, find_gpu
from pytest_torchmem.targets.host import REFERENCE, Host, this_machine
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.self_test import check_torch
from pytest_torchmem.tracing.clone import HollowCloner
from pytest_torchmem.tracing.lock import run_alone
from pytest_torchmem.units import parse_size

DEVICES = ("cpu", "cuda")
_HOSTS: dict[str, Callable[[], Host]] = {"reference": lambda: REFERENCE, "here": this_machine}


def trace(
    target: Any,
    *args: Any,
    device: str = "cpu",
    gpu: str | None = None,
    host: str = "reference",
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    allocator: str = "",
    memory: int | str | None = None,
    calibration: Calibration | None = None,
    **kwargs: Any,
) -> MemoryProfile:
    """Trace one training step of ``target`` on a fake device, and return its memory in bytes.

    ``target`` is an ``nn.Module``, whose parameters may be real or on ``meta`` and which is never
    changed, or a callable that builds a model and runs its step. For a module the step is: the
    forward with ``args`` and ``kwargs``; ``loss_fn(output)``, else the output's ``.loss``, else the
    sum of its floating tensors that require grad; ``backward()``; and with ``optimizer`` (a class
    or function of the parameters) its ``step()``. ``steps`` repeats it.

    ``device`` is ``"cpu"`` or ``"cuda"``. ``gpu`` is the GPU to model on cuda, by its name in the
    catalogue. ``host`` is ``"reference"`` (the same figures on every machine) or ``"here"``, which
    warns of estimates on a CPU that was never compared with its allocator.

    ``allocator`` has options of cuda's caching allocator, written as for ``PYTORCH_ALLOC_CONF``;
    the variable itself is not read, so that a trace is the same everywhere. ``memory`` is the GPU's
    memory, such as ``"20 GiB"``, or ``"unlimited"``; the default is that of the named ``gpu``, and
    unlimited if none is named. A step that needs more raises ``torch.OutOfMemoryError``, at the
    operator at which the GPU would.

    ``calibration`` has workspaces that were measured on GPUs because they cannot be computed
    (``pytest_torchmem.read_calibration``, ``pytest_torchmem.calibrate``).

    Raises ``UsageError`` for invalid arguments, ``UnknownValueError`` if the program needs a value
    that the trace does not have, ``UnsupportedOperatorError`` for an operator whose output shapes
    are unknown, ``UnsupportedTorchError`` if this torch is not supported, and whatever ``target``
    raises.
    """
    __tracebackhide__ = True
    machine = _machine(device, gpu, host, calibration)
    limit = _Memory(parse_options(allocator), *_limit(memory, gpu))
    step = Step(loss_fn, backward, optimizer, steps)
    step.check(target)
    check_torch()
    return _trace(machine, limit, target, args, kwargs, step)


class _Memory(NamedTuple):
    """How the fake GPU's memory is asked for."""

    options: AllocatorOptions
    limited: bool
    size: int | None
    """What the GPU has, where it is not what the catalogue says."""

    def of(self, ledger: DeviceLedger, gpu: Gpu) -> DeviceMemory:
        """Return the memory of ``gpu``."""
        if self.size is not None:
            gpu = replace(gpu, memory=self.size, context=min(gpu.context, self.size))
        return DeviceMemory(ledger, gpu, self.options, self.limited)


def _limit(memory: int | str | None, gpu: str | None) -> tuple[bool, int | None]:
    """Return whether the GPU's memory is limited, and its size unless it is the catalogue's."""
    if memory is None:
        return gpu is not None, None
    if memory == "unlimited":
        return False, None
    try:
        return True, parse_size(memory)
    except UsageError as error:
        raise UsageError(f"memory={memory!r}: {error}, or 'unlimited'") from None


def _trace(
    machine: Target,
    limit: _Memory,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Step,
) -> MemoryProfile:
    __tracebackhide__ = True
    ledger = Ledger()
    on_device = ledger.on(machine.device)
    memory = limit.of(on_device, machine.gpu) if machine.gpu is not None else None
    attribution = Attribution()
    interceptor = Interceptor(machine, ledger, attribution, _gradient_held_by_engine_alone())

    def switch_on(layers: ExitStack) -> None:
        layers.enter_context(process_kept())
        layers.enter_context(process_group_kept())
        layers.callback(give_survivors_data, ledger)
        layers.callback(interceptor.parts.conversion.return_borrowed)
        layers.enter_context(thread_kept())
        layers.enter_context(_layers(interceptor, memory))

    def run() -> MemoryProfile:
        __tracebackhide__ = True
        return _profile(interceptor, memory, target, args, kwargs, step)

    # The step in a function of its own: when it returns, nothing of it is alive but what the
    # program keeps for itself.
    return run_alone(switch_on, run)


def _profile(
    interceptor: Interceptor,
    memory: DeviceMemory | None,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Step,
) -> MemoryProfile:
    __tracebackhide__ = True
    ledger, machine = interceptor.parts.ledger, interceptor.parts.target
    program = Program(ledger)
    fingerprint = ""
    if isinstance(target, nn.Module):
        refuse_wrapped(target)
        ledger.begin(Phase.BASELINE)
        cloner = HollowCloner(interceptor, machine.device)
        target = cloner.clone_module(target)
        args, kwargs = cloner.clone_inputs(args, kwargs)
        fingerprint = fingerprint_of_step(ledger, machine.device)
        del cloner
        ledger.enter(Phase.FORWARD)
    else:
        interceptor.parts.attribution.on_outermost_call = program.called
        interceptor.parts.conversion.names = program.names
    outcome = step.run(target, args, kwargs)
    interceptor.parts.numbers.settle()
    device = ledger.devices[machine.device]
    if memory is not None:
        memory.close()
    timeline = device.timeline()
    profile = MemoryProfile(
        device=machine.device.type,
        gpu=machine.gpu.name if machine.gpu else None,
        host=machine.host.name,
        torch_version=torch.__version__,
        workload=fingerprint or program.fingerprint(),
        warnings=(
            *interceptor.parts.values.warnings,
            *_compiled(interceptor.parts.attribution),
            *_unknown(device, machine),
        ),
        unknown_workspaces=tuple(sorted(device.unknown_workspaces)),
        calibrated_workspaces=tuple(sorted(device.calibrated_workspaces)),
        questions=tuple(sorted(device.questions)),
        timeline=timeline,
        replay=memory.peaks if memory is not None else None,
        **figures_of(timeline),
    )
    del outcome
    return profile


def _compiled(attribution: Attribution) -> tuple[str, ...]:
    if not attribution.compiled_calls:
        return ()
    return (
        "a module wrapped by torch.compile was traced eagerly; compiled, it may need more or less "
        "memory",
    )


def _unknown(device: DeviceLedger, machine: Target) -> tuple[str, ...]:
    """Return one warning of workspaces that are not counted, and of those that are estimates."""
    estimated = device.estimated_workspaces
    parts = [
        f"the workspace of {', '.join(sorted(operators))} is {why}"
        for operators, why in (
            (device.unknown_workspaces - estimated, "unknown and not included"),
            (estimated, f"an estimate: {machine.host.unchecked}"),
        )
        if operators
    ]
    return ("; ".join(parts),) if parts else ()


@cache
def _gradient_held_by_engine_alone() -> References:
    """Learn how many references a gradient has that the engine is about to add to in place.

    Raises ``UnsupportedTorchError`` where the engine's addition is not seen.
    """
    ledger = Ledger()
    interceptor = Interceptor(Target(REFERENCE), ledger, Attribution(), None)

    def program() -> None:
        twice_used = torch.empty(2, requires_grad=True) * 1.0
        ((twice_used * 2.0) + (twice_used * 3.0)).sum().backward()

    try:
        with torch.enable_grad(), interceptor.running():
            program()
    finally:
        give_survivors_data(ledger)
    if interceptor.kernels.sums.seen is None:
        raise UnsupportedTorchError(
            f"pytest-torchmem cannot trace on torch {torch.__version__}: the autograd engine does "
            "not accumulate gradients as in the supported versions (2.11 to 2.15)"
        )
    return interceptor.kernels.sums.seen


@contextmanager
def _layers(interceptor: Interceptor, memory: DeviceMemory | None) -> Iterator[None]:
    """Switch on interception, dispatch and identity, module and optimizer following; then off."""
    gpu = interceptor.parts.target.gpu
    with ExitStack() as stack:
        context = TraceContext(interceptor)
        stack.enter_context(python_functions(context))
        stack.enter_context(module_wrappers_refused(context))
        if memory is not None and gpu is not None:
            from pytest_torchmem.fake_cuda.api.identity import cuda_identity
            from pytest_torchmem.fake_cuda.decompositions import cuda_dispatch

            interceptor.paths = stack.enter_context(cuda_dispatch(gpu, context))
            stack.enter_context(cuda_identity(context, memory))
        stack.enter_context(interceptor.parts.attribution.following_modules())
        stack.enter_context(
            optimizer_steps(interceptor.enter_optimizer, interceptor.parts.phases.leave_optimizer)
        )
        stack.enter_context(interceptor.running())
        yield


def _machine(device: str, gpu: str | None, host: str, calibration: Calibration | None) -> Target:
    if device not in DEVICES:
        raise UsageError(f"device={device!r}: expected one of {', '.join(map(repr, DEVICES))}")
    if host not in _HOSTS:
        raise UsageError(f"host={host!r}: expected one of {', '.join(map(repr, _HOSTS))}")
    modelled = find_gpu(DEFAULT_GPU if gpu is None else gpu)
    if device == "cpu":
        return Target(_HOSTS[host]())
    if calibration is not None and not isinstance(calibration, Calibration):
        raise UsageError(
            f"calibration={calibration!r}: expected a Calibration, as read_calibration() returns"
        )
    if calibration is not None and not calibration.covers(modelled.name):
        calibration = None  # plans are then those of every other trace
    return Target(_HOSTS[host](), modelled, calibration=calibration)
