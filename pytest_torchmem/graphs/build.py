"""Steps of several sizes: what a function of the sizes returns, to be traced."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.targets.gpus import DEFAULT_GPU, find_gpu
from pytest_torchmem.tracing.trace import trace

Build = Callable[..., Any]


def trace_built(build: Build, sizes: Mapping[str, int], **options: Any) -> MemoryProfile:
    """Trace what ``build(**sizes)`` returns, with the options of ``trace``."""
    with gpu_seen(options.get("device"), options.get("gpu")):
        target, args, kwargs = built_at(build, sizes)
    return trace(target, *args, **{**kwargs, **options})


def gpu_seen(device: str | None, gpu: str | None) -> AbstractContextManager[None]:
    """Have the GPU of a trace be there, for what a program does before its step: it may put its
    model on cuda, and ask about the GPU. Nothing happens for ``"cpu"``.
    """
    if device != "cuda":
        return nullcontext()
    from pytest_torchmem.tracing.standing import StandingGpu

    return StandingGpu(find_gpu(gpu or DEFAULT_GPU).name).on()


def refuse_unless_builds(build: Any, sizes: Iterable[str]) -> None:
    """Raise ``UsageError`` unless ``build`` is a function that takes these sizes by name."""
    if isinstance(build, nn.Module) or not callable(build):
        raise UsageError(
            f"build={type(build).__name__} object: expected a function of the sizes that returns a "
            "module and its arguments, such as: lambda batch: (model, torch.randn(batch, 8))"
        )
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # a builtin, which has none
        return
    try:
        signature.bind(**dict.fromkeys(sizes, 1))
    except TypeError as error:
        name = getattr(build, "__name__", type(build).__name__)
        raise UsageError(
            f"{name}{signature} is called with "
            f"{', '.join(f'{size}=' for size in sizes) or 'no arguments'}: {error}"
        ) from None


def _written(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def built_at(build: Build, sizes: Mapping[str, int]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what ``build(**sizes)`` does: a module or callable, and its arguments.

    It returns one of these, or a tuple of it and its arguments; a dictionary at the end of a tuple
    has keyword arguments. Raises ``UsageError`` for anything else.
    """
    refuse_unless_builds(build, sizes)
    built = build(**sizes)
    target, *args = built if isinstance(built, tuple) else (built,)
    if not isinstance(target, nn.Module) and not callable(target):
        own = getattr(build, "__name__", "")
        call = f"{own if own.isidentifier() else 'build'}({_written(sizes)})"
        returned = "nothing" if target is None else type(target).__name__
        raise UsageError(
            f"{call} returned {returned}: expected a module or a function that runs a step, or a "
            "tuple of one and its arguments, such as: return model, x"
        )
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return target, tuple(args), kwargs
