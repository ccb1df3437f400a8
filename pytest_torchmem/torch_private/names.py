"""Private names of torch, looked up in one place, and which torch this is.

What is missing is reported in one sentence.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from pytest_torchmem.errors import UnsupportedTorchError

#: What the modules imported so far declared, by dotted path; None is looked up later.
DECLARED: dict[str, Any] = {}


class MissingName:
    """Stands for a name that this torch does not have; any use of it raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported(f"it has no {self._path}")

    __call__ = __iter__ = __enter__ = __hash__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of annotations, which are evaluated before names are checked
            raise AttributeError(name)
        return self._raise()

    def __or__(self, other: object) -> Any:
        """Stand for a type of an annotation, too."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let classes be derived from it: modules are imported before names are checked."""
        return ()


def listed(names: str) -> tuple[str, ...]:
    """Return the names that stand in a text."""
    return tuple(names.split())


def private(path: str) -> Any:
    """Return what a private name of torch stands for, or a ``MissingName``. The result is bound to
    a name of the module that declares it, so that using it costs nothing.
    """
    DECLARED[path] = found = find(path)
    return found


def private_attribute(path: str) -> Any:
    """Return a function that reads a private attribute of an object like the one in ``path``."""
    return attrgetter(private_name(path))


def private_name(path: str) -> str:
    """Return the last name of a path, for what looks the attribute up itself. It may be an
    attribute that instances of a class in Python have, and their methods name.
    """
    name = path.rpartition(".")[2]
    if isinstance(private(path), MissingName) and is_named(path):
        DECLARED[path] = name
    return name


def private_if_imported(path: str) -> Callable[[], Any]:
    """Return what gives a name of a module that few programs import, or None where it is not."""
    DECLARED[path] = None
    module, _, name = path.rpartition(".")
    return lambda: getattr(sys.modules.get(module), name, None)


def private_name_if_imported(path: str) -> str:
    """Return the last name of a path into a module that few builds or programs have. It may be what
    ``is_named`` finds: an attribute of instances, or a function within a method.
    """
    DECLARED[path] = None
    return path.rpartition(".")[2]


def optional(path: str) -> Any:
    """Return what a private name stands for that not all versions of torch have, or None."""
    found = find(path)
    return None if isinstance(found, MissingName) else found


def dispatch_key(name: str) -> Any:
    """Return a dispatch key by its name (c10/core/DispatchKey.h), or a ``MissingName``."""
    parse = private("torch._C._parse_dispatch_key")
    try:
        found = parse(name)
    except (RuntimeError, UnsupportedTorchError):
        found = None
    path = f"dispatch key {name}"
    DECLARED[path] = MissingName(path) if found is None else found
    return DECLARED[path]


def missing_names() -> list[str]:
    """Return the declared names that this torch does not have."""
    return sorted(path for path, found in DECLARED.items() if isinstance(found, MissingName))


def unsupported(reason: str) -> UnsupportedTorchError:
    """Return the error of a torch whose private parts are not as in the versions known."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return UnsupportedTorchError(
        f"pytest-torchmem cannot trace on torch {torch.__version__} with Python {python}: "
        f"{reason}. It knows torch 2.11 to 2.15: install one of these or a newer pytest-torchmem"
    )


def is_named(path: str) -> bool:
    """Return whether the class that a path leads to has methods that name the path's last part.
    Attributes that only instances have are found so, and functions that a method defines.
    """
    owner, _, name = path.rpartition(".")
    return methods_name(find(owner), name)


def find(path: str) -> Any:
    """Return what a dotted path leads to, or a ``MissingName``; modules are imported for it."""
    try:
        return resolve_name(path)
    except (AttributeError, ImportError):
        return MissingName(path)


def methods_name(kind: Any, attribute: str) -> bool:
    """Return whether ``kind`` is a class in Python with methods that name an attribute."""
    found = vars(kind).values() if isinstance(kind, type) else ()
    functions = (getattr(one, "__func__", getattr(one, "fget", one)) for one in found)
    codes = (getattr(function, "__code__", None) for function in functions)
    named = ((*code.co_names, *code.co_varnames, *code.co_cellvars) for code in codes if code)
    return any(attribute in found for found in named)


@cache
def torch_library() -> ctypes.CDLL | None:
    """Return torch's library for the CPU, in which functions of those that it is linked with are
    found too (LAPACK, OpenMP); None where there is none by these names, as on Windows.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError):
            return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return None


#: Major and minor version.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
TORCH_SERIES = ".".join(map(str, TORCH_VERSION))
