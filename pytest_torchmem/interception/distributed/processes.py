"""Programs that start the processes of their world themselves, rather than by ``torchrun``.

``torch.multiprocessing.spawn`` runs a function in so many processes, each of which is told its
number. In a trace with a world one of them is there: the function runs in it, with that number.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed
import torch.multiprocessing
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
)

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.world import World
from pytest_torchmem.torch_private.patches import Replacements

_MODULES = ("torch.multiprocessing", "torch.multiprocessing.spawn")
"""Of what starts processes the second calls its own, whoever has imported ``spawn`` by name."""
_STARTS = "start_processes"
LAUNCHER = "torch.distributed.launcher.api"
_LAUNCHES = "launch_agent"
"""What ``elastic_launch`` calls, which launchers of notebooks use."""
_WORKERS = "torch.utils.data."


def starts_of_processes(trace: TraceContext) -> Replacements:
    """Return what replaces what starts the processes of a world."""
    modules = [sys.modules[name] for name in _MODULES]
    starts = [(one, {_STARTS: _starting(trace, getattr(one, _STARTS))}) for one in modules]
    return [*starts, (BaseProcess, {"start": _beginning(trace, BaseProcess.start)})]


def follow_launcher(replace: Callable[..., None], trace: TraceContext) -> None:
    """Replace what launches a function as ``torchrun`` does a script."""
    module = sys.modules.get(LAUNCHER)
    if hasattr(module, _LAUNCHES):
        replace(module, _LAUNCHES, partial(_launching, trace))


def _starting(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return ``torch.multiprocessing.start_processes``."""

    def start_processes(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **others: Any,
    ) -> ProcessContext | None:
        world = None if trace.off() else trace.world
        if world is None:
            try:
                return original(fn, args, nprocs, join, *rest, **others)  # type: ignore[no-any-return]
            except (ProcessExitedException, ProcessRaisedException) as error:
                if trace.off():
                    raise
                raise UsageError(_unseen(trace, nprocs)) from error
        number = _number(trace, world, nprocs)
        with _as_process():
            fn(number, *args)
        return None if join else ProcessContext([], [])

    return start_processes


def _launching(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return ``torch.distributed.launcher.api.launch_agent``."""

    def launch_agent(config: Any, entrypoint: Any, args: Any, *rest: Any, **others: Any) -> Any:
        world = None if trace.off() else trace.world
        if world is None or not callable(entrypoint):
            return original(config, entrypoint, args, *rest, **others)
        _number(trace, world, config.nproc_per_node)
        result = None
        with _as_process():
            result = entrypoint(*args)
        return {world.rank: result}

    return launch_agent


def _beginning(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return ``multiprocessing.Process.start``."""

    def start(self: Any) -> Any:
        target = getattr(self, "_target", None)
        of_loader = str(getattr(target, "__module__", "")).startswith(_WORKERS)
        if trace.world is not None and not trace.off() and not of_loader:
            trace.values.warn(
                "starts a process, and what that takes is not in this profile; "
                "torch.multiprocessing.spawn runs its function as the rank that is traced"
            )
        return original(self)

    return start


def _number(trace: TraceContext, world: World, processes: int) -> int:
    """Return which of the processes that a program starts the traced one is.

    They are those of a node, or all of a world.
    """
    node = int(world.environment["LOCAL_WORLD_SIZE"])
    if processes == node:
        return world.local_rank
    if processes == world.size:
        return world.rank
    each = f" ({node} on its node)" if node != world.size else ""
    raise UsageError(
        f"{trace.user_line()}: the program starts {processes} processes in a trace of "
        f"{world}{each}: trace with world_size={processes}, or let it start as many"
    )


def _unseen(trace: TraceContext, processes: int) -> str:
    return (
        f"{trace.user_line()}: a process that the program started has failed, and the trace sees "
        f"nothing of it. To trace one of them give world_size={max(processes, 2)}: the function "
        "then runs as that rank, in this process"
    )


@contextmanager
def _as_process() -> Iterator[None]:
    """End what a process leaves behind: its variables, its process group, its exit."""
    variables, had_group = dict(os.environ), torch.distributed.is_initialized()
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        if torch.distributed.is_initialized() and not had_group:
            torch.distributed.destroy_process_group()
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
