"""What is switched on for a trace, or while a fake GPU stands, and off again in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_torchmem.allocator.options import AllocatorOptions
from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.fake_cuda.launches.libraries import ON_CPU, launching_libraries
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.distributed.modules import split_modules
from pytest_torchmem.interception.gradient_accumulation import References
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.lasting import LASTING
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.python_api.cuda import cuda_refused
from pytest_torchmem.interception.python_api.data import data_functions, subclasses_made
from pytest_torchmem.interception.python_api.functions import python_functions
from pytest_torchmem.interception.python_api.storages import storages_booked
from pytest_torchmem.interception.survivors import give_survivors_data
from pytest_torchmem.step.generators import keeping_forward_draws
from pytest_torchmem.step.phases import engine_asked, optimizer_steps
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import REFERENCE
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.dispatch.modes import device_constructors

if TYPE_CHECKING:
    from pytest_torchmem.fake_cuda.memory import DeviceMemory


class Memory(NamedTuple):
    """How the fake GPU's memory is asked for."""

    options: AllocatorOptions
    limited: bool
    size: int | None = None
    """What the GPU has, where it is not what the catalogue says."""

    def of(self, ledger: DeviceLedger, gpu: Gpu) -> DeviceMemory:
        """Return the memory of ``gpu``."""
        from pytest_torchmem.fake_cuda.memory import DeviceMemory

        if self.size is not None:
            gpu = replace(gpu, memory=self.size, context=min(gpu.context, self.size))
        return DeviceMemory(ledger, gpu, self.options, self.limited)


@cache
def gradient_held_by_engine_alone() -> References:
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
        interceptor.threads.released()
        give_survivors_data(ledger)
    if interceptor.kernels.sums.seen is None:
        raise UnsupportedTorchError(
            f"pytest-torchmem cannot trace on torch {torch.__version__}: the autograd engine does "
            "not accumulate gradients as in the supported versions (2.11 to 2.15)"
        )
    return interceptor.kernels.sums.seen


@contextmanager
def layers(
    interceptor: Interceptor, context: TraceContext, memories: tuple[DeviceMemory, ...]
) -> Iterator[None]:
    """Switch on interception, dispatch and identity, module and optimizer following; then off.

    What is real on the host keeps what the program does to it; all else is given back.
    """
    gpu, on_thread = interceptor.parts.target.gpu, interceptor.threads.on_thread
    device_constructors()  # torch remembers the functions that are there when it is first asked
    with ExitStack() as stack:
        stack.enter_context(keeping_forward_draws(interceptor.parts.values.forward_draws))
        stack.enter_context(LASTING.following(context))
        stack.enter_context(python_functions(context, gives_back=not interceptor.real_host))
        stack.enter_context(subclasses_made(context))
        stack.enter_context(split_modules(context))
        if gpu is not None:
            from pytest_torchmem.fake_cuda.api.identity import cuda_identity
            from pytest_torchmem.fake_cuda.decompositions import cuda_dispatch

            interceptor.paths = stack.enter_context(cuda_dispatch(gpu, context))
            stack.enter_context(cuda_identity(context, memories))
        else:
            stack.enter_context(storages_booked(context))
            stack.enter_context(launching_libraries(context, ON_CPU))
            stack.enter_context(cuda_refused())
        stack.enter_context(data_functions("cpu" if gpu is None else "cuda"))
        stack.enter_context(interceptor.parts.attribution.following_modules(on_thread))
        stack.enter_context(engine_asked(interceptor.enter_backward, on_thread))
        stack.enter_context(
            optimizer_steps(
                interceptor.enter_optimizer,
                interceptor.leave_optimizer,
                on_thread,
                interceptor.parts.attribution.note_optimizer,
            )
        )
        stack.enter_context(interceptor.running())
        try:
            yield
        finally:
            interceptor.paths = {}  # which refer back to it
