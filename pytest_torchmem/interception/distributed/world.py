"""The world of a trace: groups of processes of which one is there, and ``torchrun``'s variables.

A collective is an operator (``c10d::allreduce_`` and its like) with a kernel for ``meta``
(torch/csrc/distributed/c10d/Ops.cpp): intercepted as any other, it sends nothing and waits for
nobody, whatever the backend. So torch's fake process group can stand for that of every backend.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed

from pytest_torchmem.errors import UnsupportedOperatorError, UsageError
from pytest_torchmem.interception.distributed.store import FilesOfOthers, SharedStore
from pytest_torchmem.interception.values.messages import Mailbox
from pytest_torchmem.targets.world import World
from pytest_torchmem.torch_private.distributed import (
    Groups,
    default_group_noted,
    forget_meshes,
    groups_known,
    groups_of_world,
    groups_put_aside,
    know_groups,
    symmetric_memory,
)
from pytest_torchmem.torch_private.patches import Replacements, added, replaced_all

_STANDING: "WeakSet[StandingWorld]" = WeakSet()
_ON: "list[StandingWorld]" = []
"""Those that were switched on, the one that is there now last."""
_TRACED: list[bool] = []
"""Something, while a world is traced."""
_STORES = ("TCPStore", "FileStore", "HashStore")


@contextmanager
def world_entered(
    world: World | None, on_thread: Callable[[], bool], mailbox: Mailbox | None = None
) -> Iterator[None]:
    """Be one process of ``world``, with no process group yet; as before afterwards.

    ``mailbox`` has what processes write to their stores.

    Without one, the default process group that a program makes in its trace is destroyed. Caches of
    meshes (``forget_meshes``) are to be cleared before a world is left.
    """
    if world is None:
        with _process_group_kept(forget_meshes):
            yield
        return
    if not torch.distributed.is_available():
        raise UsageError("world_size= needs a build of torch that has torch.distributed")
    standing = max(
        (one for one in tuple(_STANDING) if one.is_of(world) and one.groups.default is not None),
        key=lambda one: one.is_on,
        default=None,
    )
    had_group = _has_process_group()
    with ExitStack() as stack:
        stack.enter_context(_variables(world.environment))
        stack.enter_context(_traced())
        stack.enter_context(groups_put_aside(standing.groups if standing else None))
        stand_in: list[Any] = []
        stack.enter_context(_alone(world, on_thread, stand_in, mailbox))
        stack.callback(stand_in.clear)
        if mailbox is not None:
            files = FilesOfOthers(mailbox, world.size, on_thread)
            stack.enter_context(replaced_all(files.replacements()))
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        stack.enter_context(_process_group_kept(lambda: None))
        if had_group and not _has_process_group():
            # Of a fixture, say: the program may go on with it, or begin its own.
            torch.distributed.init_process_group("fake")
        if _has_process_group():
            stand_in.append(torch.distributed.group.WORLD)
        yield


@contextmanager
def _alone(
    world: World, on_thread: Callable[[], bool], stand_in: list[Any], mailbox: Mailbox | None
) -> Iterator[None]:
    """Have what waits for other processes wait for nobody."""
    replacements, additions = groups_of_world(world.rank, world.size, lambda: not on_thread())
    with (
        added(additions),
        replaced_all(replacements),
        replaced_all(symmetric_memory(partial(refuse_symmetric_memory, on_thread))),
        replaced_all(_rendezvous(world, on_thread, stand_in, mailbox)),
    ):
        yield


class StandingWorld:
    """One process of a world between traces: fixtures make groups there for the same process.

    It belongs to the thread that makes it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._groups = Groups()
        self._thread = threading.get_ident()
        self.is_on = False
        """Whether this process is that of the world now."""
        self.asked = 0
        """How often something has asked for its default group, which is there."""
        _STANDING.add(self)

    def is_of(self, world: World) -> bool:
        """Return whether it is this process of a world as large, whatever its nodes have."""
        return (self.world.size, self.world.rank) == (world.size, world.rank)

    @property
    def groups(self) -> Groups:
        """What fixtures have made in it, and have not destroyed."""
        if not self.is_on:
            return self._groups
        asked, found = self.asked, groups_known()
        self.asked = asked
        return found

    @contextmanager
    def on(self) -> Iterator[None]:
        """Be this process; afterwards variables and groups are as before, and its own are kept."""
        if self.is_on or not torch.distributed.is_available():
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(_variables_set(self.world.environment))
            stack.enter_context(groups_put_aside(self._groups))
            stack.callback(forget_meshes)
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            stack.callback(self._keep)
            stack.enter_context(_alone(self.world, self._is_here, [], None))
            stack.enter_context(replaced_all(default_group_noted(self._note)))
            self.is_on = True
            _ON.append(self)
            stack.callback(_ON.remove, self)
            yield

    def close(self) -> None:
        """Let no trace have its groups."""
        _STANDING.discard(self)

    def _keep(self) -> None:
        self._groups, self.is_on = groups_known(), False

    def _note(self) -> None:
        self.asked += 1

    def _is_here(self) -> bool:
        alone = _ON[-1:] == [self] and not _TRACED
        return alone and threading.get_ident() == self._thread

    def end_group(self, group: object) -> None:
        """Forget all groups if the default one is still ``group``, which nobody destroyed."""
        if group is not None and self.groups.default is group:
            if self.is_on:
                know_groups(Groups())
            self._groups = Groups()


@contextmanager
def _traced() -> Iterator[None]:
    """Let a trace's own world be the only one."""
    _TRACED.append(True)
    try:
        yield
    finally:
        _TRACED.pop()


@contextmanager
def _variables_set(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while, and leave alone what the program sets."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in values.items():
            old = before[name]
            if os.environ.get(name) == value:
                if old is None:
                    del os.environ[name]
                else:
                    os.environ[name] = old


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


def refuse_symmetric_memory(
    on_thread: Callable[[], bool], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Refuse symmetric memory, which each process maps from all others."""
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

    @wraps(original)  # whose arguments are asked for where worlds stand on one another
    def split_group(*args: Any, **kwargs: Any) -> Any:
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
def _process_group_kept(forget: Callable[[], object]) -> Iterator[None]:
    """Destroy the default process group that a program made in its trace and left, and ``forget``.

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
            forget()


def _has_process_group() -> bool:
    """Return whether there is a default process group; some builds of torch cannot have one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
