"""What a command line names: functions, and profiles that were saved."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_torchmem.commands.named_models import named_model
from pytest_torchmem.errors import UsageError
from pytest_torchmem.printable import printable

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


def load_function(written: str, batch: int = 1, sequence: int = 512) -> Callable[[], object]:
    """Return the function that ``package.module:function`` or ``file.py:function`` names, or one
    that makes the model which ``library:name`` does.

    Modules are looked for where the command was started, too. Raises ``UsageError`` where there is
    none, or where it needs arguments; what the module raises is its own.
    """
    if (named := named_model(written, batch, sequence)) is not None:
        return named
    place, separator, name = written.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(f"{written!r}: write package.module:function or file.py:function")
    sys.path.insert(0, os.getcwd())
    found: Any = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{written} is no function: {type(found).__name__}")
    if needed := _needed(found):
        raise UsageError(
            f"{written} needs arguments ({', '.join(needed)}): name a function without any, which "
            "runs a step, or returns a module and its inputs"
        )
    return found  # type: ignore[no-any-return]


def _needed(function: Callable[..., object]) -> list[str]:
    """Return the arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, which does not say
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty and one.kind not in several
    ]


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} does not exist, or is no file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _of_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the module itself asks for
        raise UsageError(f"there is no module {name!r} here, nor installed") from None


def returns_module(result: object) -> bool:
    """Return whether a function returned a module, or a tuple of one and its inputs."""
    from torch import nn

    first = result[0] if isinstance(result, tuple) and result else result
    return isinstance(first, nn.Module)


_GZIP = b"\x1f\x8b"


def is_profile(path: Path) -> bool:
    """Return whether a file is what ``MemoryProfile.load`` reads, rather than a snapshot."""
    from pytest_torchmem.profile.formats.recorded import PICKLE
    from pytest_torchmem.profile.profile import SAVED

    if not path.is_file():  # reading a pipe would wait
        return False
    content = path.read_bytes()
    if content.startswith((_GZIP, PICKLE)):
        return True  # snapshots are neither compressed nor pickles
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.get("kind") == SAVED


def print_profile(profile: MemoryProfile, rows: int = 10) -> None:
    """Print the table of a profile, its course and its warnings."""
    print(profile.table(rows))
    print(f"\nin the course of the step: {profile.sparkline()}")
    for warning in profile.warnings:
        print(f"note: {printable(warning)}")
