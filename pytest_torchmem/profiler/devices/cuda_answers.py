"""What ``torch.cuda`` answers while a trace stands for a GPU, with the ledger's own figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_torchmem.profiler.devices.tensors import Guard
from pytest_torchmem.profiler.hollow import Interceptor
from pytest_torchmem.profiler.patches import replaced


@contextmanager
def cuda_answers(interceptor: Interceptor, guard: Guard) -> Iterator[None]:
    """Answer for the GPU on the trace's thread; nothing reaches a real CUDA context."""
    gpu = interceptor.machine.gpu
    assert gpu is not None
    ledger = interceptor.ledger.on(interceptor.machine.device)
    since = [0]

    def peak() -> int:
        return max(ledger.highest_since(since[0]), ledger.current)

    def reset(device: Any = None) -> None:
        since[0] = len(ledger.events)

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: gpu.product,
        "get_device_capability": lambda device=None: gpu.capability,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or gpu.capability >= (8, 0)
        ),
        "mem_get_info": lambda device=None: (gpu.memory - ledger.current, gpu.memory),
        "memory_allocated": lambda device=None: ledger.current,
        "max_memory_allocated": lambda device=None: peak(),
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }

    def answering(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(torch.cuda, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            if guard.off() and name != "_lazy_init":
                return original(*args, **kwargs)
            return answer(*args, **kwargs)

        return function

    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
            stack.enter_context(
                replaced(
                    module,
                    **{
                        name: answering(name, answer)
                        for name, answer in answers.items()
                        if hasattr(module, name) and hasattr(torch.cuda, name)
                    },
                )
            )
        yield
