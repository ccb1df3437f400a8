"""Source code of tests and fixtures: the names that they use, and questions to the process."""

import sys
from importlib.util import find_spec
from os.path import sep
from traceback import walk_tb
from types import FrameType
from typing import Any
from unittest import TestCase

import pytest

from pytest_torchmem.checks.defaults import MARKER
from pytest_torchmem.plugin.failure import MemoryCheckFailed
from pytest_torchmem.plugin.worlds import VARIABLES
from pytest_torchmem.printable import shown

_OWN = ("torchmem", "request")


def sees_anything(item: pytest.Item) -> bool:
    """Tell whether anything but the body of a test could see a GPU."""
    parameters = getattr(getattr(item, "callspec", None), "params", ())
    fixtures = set(getattr(item, "fixturenames", ())) - {*_OWN, *parameters}
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
        for name in _names(mark.args[0] if mark.args else mark.kwargs.get("argnames", ()))
    }
    return function is not None and bool(set(parameters) - direct)


def _names(written: Any) -> list[str]:
    return written.split(",") if isinstance(written, str) else list(written)


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
    files = str(item.config.rootpath)
    lines = [one for one in walk_tb(error.__traceback__) if is_in(one[0], files)]
    frame, line = lines[-1] if lines else (None, 0)
    where = "" if frame is None else f"{shown(frame.f_code.co_filename)}:{line}: "
    return MemoryCheckFailed(not_told(fixture.argname), f"{where}{type(error).__name__}")


def is_in(frame: FrameType, folder: str) -> bool:
    """Return whether a frame runs code of a folder that is not that of installed packages."""
    path = frame.f_code.co_filename
    return path.startswith(folder + sep) and "site-packages" not in path


def asks_for_world(error: Exception) -> bool:
    """Return whether an error is that a variable of torchrun is not set."""
    if isinstance(error, KeyError):
        return error.args[:1] != () and error.args[0] in VARIABLES
    # torch/distributed/rendezvous.py, _env_rendezvous_handler
    return "env:// rendezvous" in str(error) and "expected, but not set" in str(error)


def names_cuda(value: object) -> bool:
    """Return whether a value is a cuda device, or its name."""
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
