"""The world of a trace: groups of processes of which one is there, and ``torchrun``'s variables.

A collective is an operator (``c10d::allreduce_`` and its like) with a kernel for ``meta``
(torch/csrc/distributed/c10d/Ops.cpp): intercepted as any other, it sends nothing and waits for
nobody, whatever the backend. So torch's fake process group can stand for that of every backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed

from pytest_torchmem.errors import UnsupportedOperatorError, UsageError
from pytest_torchmem.interception.distributed.store import SharedStore
from pytest_torchmem.interception.values.messages import Mailbox
from pytest_torchmem.targets.world import World
from pytest_torchmem.torch_private.distributed.process_groups import (
    groups_of_world,
    groups_put_aside,
    symmetric_memory,
)
from pytest_torchmem.torch_private.distributed.sharding import forget_meshes
from pytest_torchmem.torch_private.patching.patches import Replacements, added, replaced_all

_STORES = ("TCPStore", "FileStore", "HashStore")


@contextmanager
def world_entered(
    world: World | None, on_thread: Callable[[], bool], mailbox: Mailbox | None = None
) -> Iterator[None]:
    """Be one process of ``world``, with no process group yet; as before afterwards.

    ``mailbox`` has what processes write to their stores.

    Without one, the default process group that a program makes in its trace is destroyed.
    """
    if world is None:
        with _process_group_kept():
            yield
        return
    if not torch.distributed.is_available():
        raise UsageError("world_size= needs a build of torch that has torch.distributed")
    replacements, additions = groups_of_world(world.rank, world.size, lambda: not on_thread())
    with ExitStack() as stack:
        stack.enter_context(_variables(world.environment))
        had_group = _has_process_group()
        stack.enter_context(groups_put_aside())
        stack.enter_context(added(additions))
        stack.enter_context(replaced_all(replacements))
        stack.enter_context(replaced_all(symmetric_memory(partial(_refuse, on_thread))))
        stand_in: list[Any] = []
        stack.enter_context(replaced_all(_rendezvous(world, on_thread, stand_in, mailbox)))
        stack.callback(stand_in.clear)
        stack.callback(forget_meshes)
        stack.enter_context(_process_group_kept())
        if had_group:  # of a fixture, say: the program may go on with it, or begin its own
            torch.distributed.init_process_group("fake")
            stand_in.append(torch.distributed.group.WORLD)
        yield


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment, and put back these and all that the program sets.

    Launchers tell their processes by variables what to do, and libraries tell themselves
    (``ACCELERATE_USE_FSDP``); the next trace may be of another program.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)


def _rendezvous(
    world: World, on_thread: Callable[[], bool], stand_in: list[Any], mailbox: Mailbox | None
) -> Replacements:
    """Replace what waits for other processes, or takes another world for granted.

    ``stand_in`` has the group that is there in the place of one from before the trace.
    """
    c10d: Any = torch.distributed.distributed_c10d
    rendezvous, initialise = c10d.rendezvous, c10d.init_process_group
    stores_alive: list[SharedStore] = []
    make_store = partial(SharedStore, world.size, stores_alive, mailbox)

    def meet(*args: Any, **kwargs: Any) -> Iterator[Any]:
        if not on_thread():
            return rendezvous(*args, **kwargs)  # type: ignore[no-any-return]
        return iter([(make_store(), world.rank, world.size)])

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        __tracebackhide__ = True
        if on_thread():
            for name, asked, there in (
                ("world_size", world_size, world.size),
                ("rank", rank, world.rank),
            ):
                if asked not in (-1, there):
                    raise UsageError(
                        f"init_process_group({name}={asked}) in a trace of {world}: let the "
                        "program take both from torchrun's variables, or trace with the same "
                        "world_size= and rank="
                    )
            world_size, rank = world.size, world.rank
            if stand_in and torch.distributed.group.WORLD is stand_in.pop():
                torch.distributed.destroy_process_group()
        initialise(backend, init_method, timeout, world_size, rank, *args, **kwargs)

    functions = {"rendezvous": meet, "init_process_group": init_process_group}
    if hasattr(c10d, "split_group"):
        functions["split_group"] = _splitting(c10d.split_group, on_thread)
    modules = (c10d, torch.distributed, torch.distributed.device_mesh)
    stores = {
        name: _store_class(getattr(torch.distributed, name), make_store, on_thread)
        for name in _STORES
        if hasattr(torch.distributed, name)
    }
    return [
        (
            module,
            {name: one for name, one in {**functions, **stores}.items() if name in vars(module)},
        )
        for module in modules
    ]


def _refuse(
    on_thread: Callable[[], bool], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Refuse symmetric memory, which each process maps from all others."""
    __tracebackhide__ = True
    if not on_thread():
        return original(*args, **kwargs)
    raise UnsupportedOperatorError(
        "the program asks for symmetric memory (torch.distributed._symmetric_memory), which a GPU "
        "maps from the other GPUs and a trace does not have. Trace the step with ordinary tensors "
        "(torch.empty in the place of symm_mem.empty) and the collectives of torch.distributed"
    )


def _splitting(original: Any, on_thread: Callable[[], bool]) -> Callable[..., Any]:
    """Return ``split_group``, which NCCL's groups have that know their device, and ``fake`` has
    not: new groups of the same processes stand for its parts.
    """
    arguments = signature(original)

    def split_group(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        world = torch.distributed.group.WORLD
        if not on_thread() or world is None or not world.bound_device_id:
            return original(*args, **kwargs)
        given = arguments.bind(*args, **kwargs).arguments
        ranks = torch.distributed.get_process_group_ranks(given.get("parent_pg"))
        own, found = torch.distributed.get_rank(), None
        for part in given.get("split_ranks") or ():
            members = sorted(ranks[place] for place in part)
            group = torch.distributed.new_group(members, group_desc=given.get("group_desc"))
            if own in members:
                found = group
        return found

    return split_group


def _store_class(
    original: Any, make: Callable[[], SharedStore], on_thread: Callable[[], bool]
) -> Any:
    """Return what stands for a class of stores, which wait for other processes."""

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make() if on_thread() else original(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, SharedStore))

    return Kind(original.__name__, (), {"__doc__": original.__doc__})


@contextmanager
def _process_group_kept() -> Iterator[None]:
    """Destroy the default process group that a program made in its trace and left.

    With it goes the ``sys.excepthook`` that ``init_process_group`` wrapped around the one there.
    """
    if _has_process_group():
        yield
        return
    hook = sys.excepthook
    try:
        yield
    finally:
        if _has_process_group():
            sys.excepthook = hook
            torch.distributed.destroy_process_group()
            forget_meshes()


def _has_process_group() -> bool:
    """Return whether there is a default process group; some builds of torch cannot have one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
