"""Which process of a distributed program the fixtures of a test are set up in.

The source code of tests and fixtures tells: the names that they use, and questions to the process.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from os.path import sep
from traceback import walk_stack, walk_tb
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest

from pytest_torchmem.checks import MARKER
from pytest_torchmem.checks.request import Settings, Worlds, worlds_of
from pytest_torchmem.errors import UsageError
from pytest_torchmem.plugin.failure import MemoryCheckFailed
from pytest_torchmem.plugin.settings import budget_of
from pytest_torchmem.plugin.start import checks_memory
from pytest_torchmem.printable import shown
from pytest_torchmem.targets.world import GPUS_OF_A_NODE, World

if TYPE_CHECKING:
    from pytest_torchmem.interception.world import StandingWorld

_BEFORE: pytest.StashKey[dict[str, str | None]] = pytest.StashKey()
_ALL: pytest.StashKey[tuple[World, ...]] = pytest.StashKey()
_NOW: pytest.StashKey[World | None] = pytest.StashKey()
VARIABLES = frozenset(World(1).environment)
"""What ``torchrun`` sets."""
_OF_A_RANK = frozenset(name for name in VARIABLES if name.endswith(("RANK", "WORLD_SIZE")))
"""What of it differs between the processes of a world, or between worlds."""


class StandingWorlds:
    """The worlds of one run in which fixtures are set up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._worlds: dict[World, StandingWorld] = {}

    def all_of(self, item: pytest.Item) -> tuple[World, ...]:
        """Return the processes that a test is checked as, which its marker or the options name."""
        if _ALL not in item.stash:
            worlds: Worlds = ()
            with suppress(UsageError):  # the check says so
                budget = budget_of(item)
                worlds = worlds_of(self._settings, budget) if checks_memory(item) else ()
            item.stash[_ALL] = tuple(
                World(world.size, world.rank, budget.gpus or min(GPUS_OF_A_NODE, world.size))
                for world in filter(None, worlds)
            )
        return item.stash[_ALL]

    def of(self, item: pytest.Item) -> World | None:
        """Return the process that a test's fixtures are set up in now: to begin with the first."""
        return item.stash.get(_NOW, None) or next(iter(self.all_of(item)), None)

    def become(self, item: pytest.Item, world: World) -> None:
        item.stash[_NOW] = world

    def on(self, world: World | None) -> AbstractContextManager[object]:
        if world is None:
            return nullcontext()
        if world not in self._worlds:
            from pytest_torchmem.interception.world import StandingWorld

            self._worlds[world] = StandingWorld(world)
        return self._worlds[world].on()

    def begin(self, item: pytest.Item) -> None:
        """Note the variables that are set before a test, which begins as its first process."""
        item.stash[_NOW] = None
        item.stash[_BEFORE] = {name: os.environ.get(name) for name in VARIABLES}

    def end(self, item: pytest.Item) -> None:
        """Take back what of its worlds a test has left in the environment.

        ``monkeypatch`` puts back what a fixture found, which was set for that fixture alone.
        """
        before = item.stash.get(_BEFORE, {})
        for world in self.all_of(item) if before else ():
            for name, value in world.environment.items():
                old = before[name]
                if os.environ.get(name) == value != old:
                    if old is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = old

    def group(self, world: World | None) -> tuple[object, int]:
        """Return the default process group that fixtures have made in it, and how often something
        has asked for a group of it that is there.
        """
        found = self._worlds.get(world) if world is not None else None
        return (found.groups.default, found.asked) if found is not None else (None, 0)

    def end_group(self, world: World | None, group: object) -> None:
        """Forget a group whose fixture is torn down and has not destroyed it."""
        if world in self._worlds:
            self._worlds[world].end_group(group)

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


@dataclass(slots=True)
class VariablesRead:
    names: list[str] = field(default_factory=list)
    in_vain: str = ""
    """Where one was asked for that says which process this is, and was not set: «file:line»."""


@contextmanager
def variables_noted() -> Iterator[VariablesRead]:
    """Yield which of ``torchrun``'s variables are read meanwhile."""
    kind: Any = type(os.environ)
    read, original = VariablesRead(), kind.__getitem__

    def getitem(environment: Any, name: str) -> Any:
        if name in VARIABLES:
            read.names.append(name)
        try:
            return original(environment, name)
        except KeyError:
            if name in _OF_A_RANK and not read.in_vain:
                read.in_vain = _line_that_asks()
            raise

    kind.__getitem__ = getitem
    try:
        yield read
    finally:
        kind.__getitem__ = original


def _line_that_asks() -> str:
    """Return the line that reads a variable, "" where its value decides nothing.

    A module that is imported (libraries that log know their rank so) would have asked before the
    fixture, too, and ``monkeypatch.setenv`` asks for what it is going to put back.
    """
    frames = [one for one, _ in walk_stack(sys._getframe(2))]
    names = [one.f_globals.get("__name__", "") for one in frames]
    while names and names[0] in ("os", "_collections_abc", "collections.abc"):
        del names[0], frames[0]
    if not names or names[0] == "_pytest.monkeypatch" or "importlib._bootstrap" in names:
        return ""
    return f"{shown(frames[0].f_code.co_filename)}:{frames[0].f_lineno}"


def sees_anything(item: pytest.Item) -> bool:
    """Tell whether anything but the body of a test could see a GPU."""
    parameters = getattr(getattr(item, "callspec", None), "params", ())
    fixtures = set(getattr(item, "fixturenames", ())) - {"torchmem", "request", *parameters}
    conditions = [text for mark in item.iter_markers("skipif") for text in mark.args]
    return (
        bool(fixtures)
        or is_of_unittest(item)
        or any(isinstance(text, str) for text in conditions)
        or _has_indirect(item, parameters)
    )


def _has_indirect(item: pytest.Item, parameters: Any) -> bool:
    """Tell whether a parameter is that of a fixture, which is a function that runs."""
    function = getattr(item, "function", None)
    direct = {
        name.strip()
        for mark in item.iter_markers("parametrize")
        if not mark.kwargs.get("indirect", len(mark.args) > 2 and mark.args[2])
        for names in [mark.args[0] if mark.args else mark.kwargs.get("argnames", ())]
        for name in (names.split(",") if isinstance(names, str) else names)
    }
    return function is not None and bool(set(parameters) - direct)


def not_told(fixture: str) -> str:
    """Say why a fixture that asks which process it is in has no answer."""
    return (
        f"the fixture {fixture!r} asks which process of a distributed program it is in "
        "(torchrun's RANK, WORLD_SIZE, ...). Fixtures are set up before a check says which: name "
        f"the world in the marker, {MARKER}(..., world_size=8, ranks=(0, 3)), or in the options, "
        "or make process groups and meshes in the test's body"
    )


def no_world(
    fixture: pytest.FixtureDef[Any], item: pytest.Item, error: Exception
) -> MemoryCheckFailed:
    """Say so of a fixture that ended there, and in which line."""
    start, where = f"{item.config.rootpath}{sep}", ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(start) and "site-packages" not in file:
            where = f"{shown(file)}:{line}: "
    return MemoryCheckFailed(not_told(fixture.argname), f"{where}{type(error).__name__}")


def asks_for_world(error: Exception) -> bool:
    """Return whether an error is that a variable of torchrun is not set."""
    if isinstance(error, KeyError):
        return error.args[:1] != () and error.args[0] in VARIABLES
    # torch/distributed/rendezvous.py, _env_rendezvous_handler
    return "env:// rendezvous" in str(error) and "expected, but not set" in str(error)


def names_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return type(value).__name__ == "device" and getattr(value, "type", "") == "cuda"


def find_torch() -> object:
    """Return what says where torch is, ``None`` where it is not installed."""
    try:
        return find_spec("torch")
    except ValueError:  # somebody has put something else in its place
        return sys.modules.get("torch")


def is_of_unittest(item: pytest.Item) -> bool:
    """Tell whether a test is a method of a ``unittest.TestCase``, whose setUp is a part of it."""
    cls = getattr(item, "cls", None)
    return isinstance(cls, type) and issubclass(cls, TestCase)
