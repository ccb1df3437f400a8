"""The errors a user can meet; each message says what was wrong, where, and what to do."""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from warnings import warn

from pytest_torchmem.printable import printable, printable_lines


class TorchmemError(Exception):
    """Base of all errors of this package.

    What a message quotes (a name, an id, a device) moves no cursor where it is shown.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(printable_lines(a) if isinstance(a, str) else a for a in arguments))


class UsageError(TorchmemError, ValueError):
    """An argument, marker, option or file is invalid."""


class SnapshotError(UsageError):
    """A snapshot or calibration file is invalid; it is not changed.

    The message is one line, whatever is quoted from the file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class UnknownValueError(TorchmemError, RuntimeError):
    """The program needs a value that the trace does not have, such as ``mask.any()``."""


class UnsupportedOperatorError(TorchmemError, NotImplementedError):
    """An operator's output shapes are unknown, or torch changes memory without operators."""


class DeviceMemoryError(TorchmemError, RuntimeError):
    """A measured step needs more memory than the real GPU has."""


class UnsupportedTorchError(TorchmemError, RuntimeError):
    """Private parts of this torch are missing or work differently."""


class NoCudaError(UsageError, RuntimeError, AssertionError):
    """A program asks for cuda in a trace on the CPU.

    It is what torch raises where it has no GPU: a ``RuntimeError``, and an ``AssertionError`` in a
    build without CUDA (``_lazy_init`` of torch/cuda/__init__.py).
    """


class PassEnded(BaseException):
    """Ends a pass of a trace that is run again. No ``Exception``, because programs catch those."""


def warn_of_defect(what: str, error: Exception) -> None:
    """Warn that something which would explain a failure could not be looked for."""
    said = f"{what} could not be looked for: {type(error).__name__}: {error}"
    warn(f"torchmem: {said}. This is a defect of pytest-torchmem", RuntimeWarning, stacklevel=3)


def meant(name: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return `` Did you mean …?`` with the known name that is closest, "" where none is close."""
    from difflib import get_close_matches  # few need it, and every run imports this module

    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_misspelt(function: Callable[..., Any], target: Any, given: Iterable[str]) -> None:
    """Raise ``UsageError`` for an argument that is nearly one of ``function``.

    All others go to ``target``, which may have one of that name, or take any.
    """
    for name in given:
        guess = _guess(function, name)
        if not guess:
            continue
        import inspect

        try:
            takes = inspect.signature(getattr(target, "forward", target)).parameters
        except (TypeError, ValueError):
            return
        if name not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise UsageError(f"{function.__name__}({name}=...) is no argument.{guess}")


@cache
def _guess(function: Callable[..., Any], name: str) -> str:
    """Return what may be meant by a name that is nearly one of a function's arguments, else ""."""
    import inspect

    own = inspect.signature(function).parameters
    return "" if name in own else meant(name, own, cutoff=0.8)


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what is shown of an error: ``BaseException.add_note``.

    Python 3.10 shows no notes, so there the line ends the message, if that is text.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
        return
    setattr(error, "__notes__", [*getattr(error, "__notes__", ()), note])  # noqa: B010
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
