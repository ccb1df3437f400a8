"""The world of a trace: groups of processes of which one is there, and ``torchrun``'s variables.

A collective is an operator (``c10d::allreduce_`` and its like) with a kernel for ``meta``
(torch/csrc/distributed/c10d/Ops.cpp): intercepted as any other, it sends nothing and waits for
nobody, whatever the backend. So torch's fake process group can stand for that of every backend.

Processes share a store, and files that another one writes and that the traced one looks or waits
for. After a collective a program takes it that what another process wrote before is there. The
traced process alone has not seen it written, so the other is traced up to that collective
(``interception/values/messages.py``) before it is told that a file is not there.
"""

import errno
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from stat import S_ISREG
from types import FrameType
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed

from pytest_torchmem.errors import UnknownValueError, UnsupportedOperatorError, UsageError
from pytest_torchmem.interception.attribution import outward
from pytest_torchmem.interception.values.messages import AWAITED_CHANGE, AWAITED_FILE, Mailbox
from pytest_torchmem.journal.journal import variables
from pytest_torchmem.targets.world import World
from pytest_torchmem.torch_private import distributed as groups
from pytest_torchmem.torch_private.patches import Replacements, class_unless, replaced_all

_Store: Any = getattr(torch.distributed, "Store", object)


class SharedStore(_Store):  # type: ignore[misc]
    """A store to which every process has added what this one adds.

    What only another process would have written is asked of the first one. Where that is this one,
    to wait raises ``UnknownValueError`` at once.
    torch/csrc/distributed/c10d/init.cpp, ``PythonStore``.
    """

    def __init__(
        self, processes: int, alive: "list[SharedStore]", mailbox: Mailbox | None = None
    ) -> None:
        """``alive`` holds it: C++ that does, in a group or a ``PrefixStore``, holds no more than
        the part of it that is in C++.
        """
        super().__init__()
        alive.append(self)
        self._processes, self._mailbox = processes, mailbox
        self._values: dict[str, bytes] = {}

    def clone(self) -> "SharedStore":
        """Return the store: it has no connection that another would need."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._mailbox is not None:
            self._mailbox.write(key, self._values[key])

    def get(self, key: str) -> bytes:
        """Return a value that this process has written."""
        self.wait([key])
        return self._values[key]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write a value where the expected one is there, or nothing; return what is there then."""
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") in (expected, b""):
            self.set(key, desired)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, once for each process; return it."""
        number = int(self._values.get(key, b"0")) + amount * self._processes
        self._values[key] = str(number).encode()
        return number

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this process has written all of the values."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return if the values are there; raise ``UnknownValueError`` if they are not."""
        missing = [key for key in keys if key not in self._values]
        if self._mailbox is not None:
            for key in tuple(missing):
                value = self._mailbox.read(key)
                if value is not None:
                    self._values[key] = value
                    missing.remove(key)
        if missing:
            raise UnknownValueError(
                f"the program waits for what another process writes to the store "
                f"({', '.join(missing)}), and a trace has one process. Skip this line while tracing"
            )

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


_HELPERS = frozenset({"genericpath", "glob", "ntpath", "os", "pathlib", "posixpath", "shutil"})
"""Modules through which a program looks for a file."""
_OWN_FILES = frozenset({"torch", "triton", "sympy"}) | sys.stdlib_module_names
"""Those that look for files of their own: caches of compiled code, sources."""
_OF_PROGRAM = "torch.distributed.checkpoint"
_WAITS = 3
"""A program that looks so often, and sleeps in between, waits."""
_SPINS = 1000
"""So does one that looks so often without."""
_MOMENT, _LONGER = 0.001, 0.1
"""Seconds that it sleeps, until others were asked, and then: another of its threads may do it."""
_MOST_LOOKS = {True: 100, False: 100_000}
"""What ends a wait for a file that nobody writes, with and without sleep."""

_OF_PATHS = getattr(pathlib, "_NormalAccessor", None)
"""Where the paths of Python 3.10 keep functions of ``os`` that they found as they were imported."""
_PATHS_HAVE = ("listdir", "scandir", "stat", "unlink")
_MAKING = frozenset({"makedirs", "mkdir", "rmtree"})
_IMPORTING = "<frozen importlib._bootstrap>"


@dataclass(slots=True, eq=False, repr=False)
class _Looks:
    """How often a program has looked for a file that is not there, or into a directory."""

    times: int = 0
    sleeps: int = 0
    listed: frozenset[str] = frozenset()
    """What was in it, of a directory."""

    @property
    def waits(self) -> bool:
        return self.times >= _WAITS and (self.sleeps >= _WAITS - 1 or self.times >= _SPINS)


class FilesOfOthers:
    """What looks for files and waits for them, in the trace of one process."""

    def __init__(self, mailbox: Mailbox, processes: int, on_thread: Callable[[], bool]) -> None:
        self._mailbox, self._processes, self._on_thread = mailbox, processes, on_thread
        self._stat, self._unlink, self._sleep = os.stat, os.unlink, time.sleep
        self._access, self._listdir, self._scandir = os.access, os.listdir, os.scandir
        self._looks: dict[str, _Looks] = {}

    def replacements(self) -> Replacements:
        """Return what takes the place of functions of Python."""
        lists = {"listdir": self._lists(self._listdir), "scandir": self._lists(self._scandir)}
        removes = {"unlink": self.unlink, "remove": self.unlink}
        of_os = {"stat": self.stat, "access": self.access, **lists, **removes}
        of_paths: dict[str, Any] = {
            name: staticmethod(cast(Any, of_os[name])) for name in _PATHS_HAVE
        }
        in_pathlib = [] if _OF_PATHS is None else [(_OF_PATHS, of_paths)]
        return [(os, of_os), (time, {"sleep": self.sleep}), *in_pathlib]

    def stat(self, path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        """Return what is known of a file, as soon as the process that writes it has done so."""
        try:
            found = self._stat(path, *args, **kwargs)
        except FileNotFoundError:
            if self._looks_itself(path, sys._getframe(1)):
                whole = os.path.abspath(path)
                self._mailbox.look_for(whole)
                self._look(whole, self._looks.setdefault(whole, _Looks()), AWAITED_FILE)
            raise
        if not isinstance(path, (str, os.PathLike)) or not self._on_thread():
            return found
        whole = os.path.abspath(path)
        self._looks.pop(whole, None)
        if S_ISREG(found.st_mode) and self._mailbox.hides(whole):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def access(self, path: Any, mode: int, **kwargs: Any) -> bool:
        """Return whether a file may be used; to ask for one that is not there is to look for it."""
        if not kwargs and self._looks_itself(path, sys._getframe(1)):
            try:
                self.stat(path)
            except OSError:
                return False
        return self._access(path, mode, **kwargs)

    def _lists(self, original: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return what lists a directory, and notes that the program has looked."""

        def listed(path: Any = ".") -> Any:
            if self._looks_itself(path, sys._getframe(1)):
                self._list(path)
            return original(path)

        return listed

    def unlink(self, path: Any, **kwargs: Any) -> None:
        """Remove a file, unless another process, which is traced after this one, reads it."""
        is_path = isinstance(path, (str, os.PathLike)) and not kwargs and self._on_thread()
        if not is_path or not self._mailbox.is_read_by_other(os.path.abspath(path)):
            self._unlink(path, **kwargs)

    def _looks_itself(self, path: Any, frame: FrameType) -> bool:
        return self._on_thread() and _is_of_program(path, frame)

    def _list(self, path: Any) -> None:
        """Note that a program lists a directory: for a file of another process, if it waits."""
        whole = os.path.join(os.path.abspath(path), "")  # apart from looks for the directory itself
        with suppress(OSError):
            listed = frozenset(self._listdir(whole))
            looks = self._looks.setdefault(whole, _Looks())
            if listed != looks.listed:
                looks = self._looks[whole] = _Looks(listed=listed)
            self._look(whole, looks, AWAITED_CHANGE)

    def _look(self, path: str, looks: _Looks, kind: str) -> None:
        looks.times += 1
        if looks.waits:
            self._mailbox.wait_for(path, self._processes, kind)
        if looks.times > _MOST_LOOKS[looks.sleeps >= looks.times // 2]:
            what = "a file" if kind == AWAITED_FILE else "a file in a directory"
            raise UnknownValueError(
                f"the program waits for {what} ({path}) that no process writes, as far as they "
                "are traced. Have it there before the trace, or skip this line while tracing"
            )

    def sleep(self, seconds: float) -> None:
        """Sleep; hardly, where the program looks for a file in between: no other process runs."""
        if self._looks and self._on_thread():
            for looks in self._looks.values():
                if looks.times >= looks.sleeps:  # it has looked since it slept
                    seconds = min(seconds, _MOMENT if looks.sleeps <= _WAITS else _LONGER)
                looks.sleeps += 1
        self._sleep(seconds)


def _is_of_program(path: Any, innermost: FrameType) -> bool:
    """Return whether it is the program that looks for a file, and no library for its own.

    What a module looks for as it is imported belongs to it: to end that pass would leave the module
    half imported. ``os.makedirs`` looks for what it is about to make.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        return False
    name = ""
    for frame in outward(innermost):
        if not name and _module(frame).partition(".")[0] not in _HELPERS:
            name = _module(frame)
            if name.partition(".")[0] in _OWN_FILES and not name.startswith(_OF_PROGRAM):
                return False
        code = frame.f_code
        if (not name and code.co_name in _MAKING) or code.co_filename == _IMPORTING:
            return False
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_STANDING: "WeakSet[StandingWorld]" = WeakSet()
_ON: "list[StandingWorld]" = []
"""Those that were switched on, the one that is there now last."""
_TRACED: list[bool] = []
"""Something, while a world is traced, which is the only one then."""
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
        with _process_group_kept(groups.forget_meshes):
            yield
        return
    if not torch.distributed.is_available():
        raise UsageError("world_size= needs a build of torch that has torch.distributed")
    same = [
        one
        for one in tuple(_STANDING)  # whatever its nodes have
        if (one.world.size, one.world.rank) == (world.size, world.rank)
    ]
    with_group = (one for one in same if one.groups.default is not None)
    standing = max(with_group, key=lambda one: one.is_on, default=None)
    had_group = _has_process_group()
    with ExitStack() as stack:
        stack.enter_context(variables(world.environment))
        _TRACED.append(True)
        stack.callback(_TRACED.pop)
        stack.enter_context(groups.groups_put_aside(standing.groups if standing else None))
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
    own_groups = groups.groups_of_world(world.rank, world.size, lambda: not on_thread())
    with (
        replaced_all(own_groups),
        replaced_all(groups.symmetric_memory(partial(refuse_symmetric_memory, on_thread))),
        replaced_all(_rendezvous(world, on_thread, stand_in, mailbox)),
    ):
        yield


class StandingWorld:
    """One process of a world between traces: fixtures make groups there for the same process. It
    belongs to the thread that makes it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._groups = groups.Groups()
        self._thread = threading.get_ident()
        self.is_on = False
        """Whether this process is that of the world now."""
        self.asked = 0
        """How often something has asked for its default group, which is there."""
        _STANDING.add(self)

    @property
    def groups(self) -> groups.Groups:
        """What fixtures have made in it, and have not destroyed."""
        if not self.is_on:
            return self._groups
        asked, found = self.asked, groups.groups_known()
        self.asked = asked
        return found

    @contextmanager
    def on(self) -> Iterator[None]:
        """Be this process; afterwards variables and groups are as before, and its own are kept."""
        if self.is_on or not torch.distributed.is_available():
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(variables(self.world.environment, all_of_them=False))
            stack.enter_context(groups.groups_put_aside(self._groups))
            stack.callback(groups.forget_meshes)
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            stack.callback(self._keep)
            stack.enter_context(_alone(self.world, self._is_here, [], None))
            stack.enter_context(replaced_all(groups.default_group_noted(self._note)))
            self.is_on = True
            _ON.append(self)
            stack.callback(_ON.remove, self)
            yield

    def close(self) -> None:
        """Let no trace have its groups."""
        _STANDING.discard(self)

    def _keep(self) -> None:
        self._groups, self.is_on = groups.groups_known(), False

    def _note(self) -> None:
        self.asked += 1

    def _is_here(self) -> bool:
        alone = _ON[-1:] == [self] and not _TRACED
        return alone and threading.get_ident() == self._thread

    def end_group(self, group: object) -> None:
        """Forget all groups if the default one is still ``group``, which nobody destroyed."""
        if group is not None and self.groups.default is group:
            if self.is_on:
                groups.know_groups(groups.Groups())
            self._groups = groups.Groups()


def _rendezvous(
    world: World, on_thread: Callable[[], bool], stand_in: list[Any], mailbox: Mailbox | None
) -> Replacements:
    """Replace what waits for other processes, or takes another world for granted. ``stand_in`` has
    the group that is there in the place of one from before the trace.
    """
    c10d: Any = torch.distributed.distributed_c10d
    rendezvous, initialise = c10d.rendezvous, c10d.init_process_group
    stores_alive: list[SharedStore] = []

    def off() -> bool:
        return not on_thread()

    def make_store(*_: Any, **__: Any) -> SharedStore:
        return SharedStore(world.size, stores_alive, mailbox)

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
            given = ("world_size", world_size, world.size), ("rank", rank, world.rank)
            for name, asked, there in given:
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
        name: class_unless(off, make_store, getattr(torch.distributed, name), SharedStore)
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
